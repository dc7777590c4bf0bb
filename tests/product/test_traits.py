"""An upstream refuses a word that the proxy wrote: the client gets its answer, and the next request leaves right."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from proxy.server.loopback import serve
from tests.kit.scripted import behind
from tests.kit.three_apis import PATHS, Answer


class Strict:
    """An upstream that refuses fields by their names."""

    def __init__(self, *fields: str, otherwise: int = 200) -> None:
        self.refused: list[str] = []
        self.answered: list[dict[str, Any]] = []
        self._fields = fields
        self._otherwise = otherwise
        self.app = Starlette(routes=[Route(path, self._answer, methods=["POST"]) for path in PATHS.values()])

    async def _answer(self, request: Request) -> Response:
        body = json.loads(await request.body())
        api = next(name for name, path in PATHS.items() if request.url.path == path)
        for field in self._fields:
            if field in body:
                self.refused.append(field)
                error = {
                    "message": f"Unsupported parameter: '{field}'.",
                    "type": "invalid_request_error",
                    "param": field,
                }
                return JSONResponse({"error": error}, 400)
        if self._otherwise != 200:
            return JSONResponse({"error": {"message": "Something else."}}, self._otherwise)
        self.answered.append(body)
        return Response(Answer("Noted.").parts(api, stream=False)[1], media_type="application/json")


@pytest.mark.parametrize("fields", [("temperature",), ("stop",), ("temperature", "top_p", "stop"), ("max_tokens",)])
@pytest.mark.parametrize("stream", [False, True])
def test_a_refused_word_is_taken_back_once(fields: tuple[str, ...], stream: bool, tmp_path: Path) -> None:
    upstream = Strict(*fields)
    main = {"base_url": "", "api_key": "k", "speaks": ["chat"]}
    body = {
        "model": "m",
        "max_tokens": 900,
        "stream": stream,
        "temperature": 0.5,
        "top_p": 0.9,
        "stop_sequences": ["END"],
        "messages": [{"role": "user", "content": "hi"}],
    }
    with served(upstream, main, tmp_path) as (http, entrance):
        answers = [http.post(f"{entrance}/v1/messages", json=body) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert upstream.refused == list(fields)
    assert all(field not in sent for sent in upstream.answered for field in fields)


def test_a_client_gets_the_refusal_of_its_own_word(tmp_path: Path) -> None:
    upstream = Strict("temperature")
    main = {"base_url": "", "api_key": "k", "speaks": ["chat"]}
    body = {"model": "m", "temperature": 0.5, "messages": [{"role": "user", "content": "hi"}]}
    with served(upstream, main, tmp_path) as (http, entrance):
        answer = http.post(f"{entrance}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "temperature"
    assert upstream.refused == ["temperature"]


@pytest.mark.parametrize("field", ["messages", "tools"])
def test_the_client_gets_a_refusal_of_what_the_answer_depends_on(field: str, tmp_path: Path) -> None:
    upstream = Strict(field)
    main = {"base_url": "", "api_key": "k", "speaks": ["chat"]}
    tool = {"name": "get", "input_schema": {"type": "object", "properties": {}}}
    body = {"model": "m", "max_tokens": 9, "tools": [tool], "messages": [{"role": "user", "content": "hi"}]}
    with served(upstream, main, tmp_path) as (http, entrance):
        answer = http.post(f"{entrance}/v1/messages", json=body)
    assert answer.status_code == 400
    assert upstream.refused == [field]


@contextmanager
def served(upstream: Strict, main: dict[str, Any], folder: Path) -> Iterator[tuple[httpx.Client, str]]:
    with serve(upstream.app) as url, httpx.Client(trust_env=False, timeout=60) as http:
        main = {**main, "base_url": f"{url}/v1"}
        with behind(upstream.app, folder, upstreams={"main": main}) as entrance:
            yield http, entrance


@pytest.mark.parametrize(("status", "first"), [(400, True), (429, False), (500, False)])
def test_the_first_of_two_refusals_is_for_the_client(status: int, first: bool, tmp_path: Path) -> None:
    upstream = Strict("temperature", otherwise=status)
    main = {"base_url": "", "api_key": "k", "speaks": ["chat"]}
    body = {"model": "m", "max_tokens": 9, "temperature": 0.5, "messages": [{"role": "user", "content": "hi"}]}
    with served(upstream, main, tmp_path) as (http, entrance):
        answer = http.post(f"{entrance}/v1/messages", json=body)
    assert answer.status_code == status
    assert ("temperature" in answer.json()["error"]["message"]) is first
