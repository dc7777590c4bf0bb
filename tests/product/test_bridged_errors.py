"""Compressed answers, broken streams, and errors behind a bridge, as clients of each API see them."""

import gzip
import json
import re
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import brotli
import httpx
import openai
import pytest
import zstandard
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from structlog.testing import capture_logs

from tests.kit.combinations import combined
from tests.kit.three_apis import PATHS, Answer, event
from tests.product.test_bridged_answers import HELLO, clients, entrance, response

PACKED: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "br": brotli.compress,
    "zstd": zstandard.ZstdCompressor().compress,
    "unknown": bytes,
    "mislabeled gzip": bytes,
}
BRIDGES = [("messages", "chat"), ("responses", "chat"), ("messages", "responses"), ("chat", "responses")]
NAMES = {"chat": "messages", "messages": "messages", "responses": "input"}


class Upstream:
    """An upstream of one API. ``answer`` returns the status, headers, and body for a request's body."""

    def __init__(self, api: str, answer: Callable[[dict[str, Any]], Response]) -> None:
        self.heads: list[Any] = []
        self._answer = answer
        self.app = Starlette(routes=[Route(PATHS[api], self._serve, methods=["POST"])])

    async def _serve(self, request: Request) -> Response:
        self.heads.append(request.headers)
        return self._answer(json.loads(await request.body()))


def whole(api: str, *, stream: bool) -> tuple[str, bytes]:
    """The content type and the body of an answer."""
    events, body = Answer("Hello to you, and to all the others.").parts(api, stream=stream)
    return ("text/event-stream", b"".join(events)) if stream else ("application/json", body)


def ask(url: str, api: str, *, stream: bool) -> httpx.Response:
    """Send a request of an API."""
    fields = {"model": "m", "max_tokens": 50, NAMES[api]: HELLO, "stream": stream}
    with httpx.Client(trust_env=False, timeout=60) as http:
        return http.post(f"{url}{PATHS[api]}", json=fields)


@pytest.mark.parametrize(("stream", "encoding", "bridge"), combined(3, [False, True], PACKED, BRIDGES))
def test_compressed_answers_and_errors(bridge: tuple[str, str], encoding: str, stream: bool, tmp_path: Path) -> None:
    """Some servers and CDNs compress without being asked."""
    api, behind = bridge
    pack, name = PACKED[encoding], encoding.rpartition(" ")[2]
    refused = b'{"error": {"message": "Unsupported value: temperature", "type": "invalid_request_error"}}'

    def answer(asked: dict[str, Any]) -> Response:
        if len(upstream.heads) > 1:
            return Response(pack(refused), 400, {"content-encoding": name}, "application/json")
        kind, body = whole(behind, stream=stream)
        return Response(pack(body), 200, {"content-encoding": name}, kind)

    upstream = Upstream(behind, answer)
    with entrance(upstream.app, tmp_path, speaks=[behind]) as url:
        answered, error = ask(url, api, stream=stream), ask(url, api, stream=stream)
    assert {head["accept-encoding"] for head in upstream.heads} == {"identity"}
    assert answered.status_code == 200
    for word in ("Hello", "others."):
        assert word in answered.text
    assert error.status_code == 400
    assert error.json()["error"]["message"] == "Unsupported value: temperature"


def test_a_compressed_answer_is_bounded(tmp_path: Path) -> None:
    bomb = zlib.compress(b"a" * 64_000_000)
    upstream = Upstream("chat", lambda asked: Response(bomb, headers={"content-encoding": "deflate"}))
    with entrance(upstream.app, tmp_path, speaks=["chat"]) as url:
        assert ask(url, "responses", stream=False).status_code == 502


def cut(api: str) -> Callable[[dict[str, Any]], Response]:
    """An answer that breaks off in the middle of its text."""
    kind, body = whole(api, stream=True)

    async def part() -> AsyncIterator[bytes]:
        yield body[: body.index(b"\n\n", body.index(b"others")) + 2]
        raise OSError("cut")

    return lambda asked: StreamingResponse(part(), media_type=kind)


@pytest.mark.parametrize("behind", ["responses", "chat"])
def test_a_broken_stream_ends_with_an_event_of_its_api(behind: str, tmp_path: Path) -> None:
    with entrance(Upstream(behind, cut(behind)).app, tmp_path, speaks=[behind]) as url:
        texts = {api: ask(url, api, stream=True).text for api in PATHS}
        with clients(url) as (_, gpt), pytest.raises(openai.APIError, match="broke off"):
            response(gpt, stream=True)
    lasts = {api: text.strip().rpartition("\n\n")[2] for api, text in texts.items()}
    errors = {api: json.loads(last.rpartition("data: ")[2]) for api, last in lasts.items()}
    assert lasts["responses"].startswith("event: error\n")
    assert lasts["messages"].startswith("event: error\n")
    assert (errors["responses"]["type"], errors["responses"]["code"]) == ("error", "upstream_interrupted")
    numbers = [int(number) for number in re.findall(r'"sequence_number": ?(\d+)', texts["responses"])]
    assert numbers == [*range(len(numbers))]
    assert (errors["messages"]["type"], errors["messages"]["error"]["type"]) == ("error", "api_error")
    assert errors["chat"]["error"]["code"] == "upstream_interrupted"


NAMED = {
    "rate_limit_exceeded": 429,
    "insufficient_quota": 429,
    "server_is_overloaded": 503,
    "slow_down": 503,
    "vector_store_timeout": 504,
    "invalid_prompt": 400,
    "context_length_exceeded": 400,
    "image_content_policy_violation": 400,
    "image_file_not_found": 400,
    "invalid_api_key": 401,
    "model_not_found": 404,
    "server_error": 502,
}


@pytest.mark.parametrize(("stream", "code", "api"), combined(3, [False, True], NAMED, ["chat", "messages"]))
def test_failed_responses_have_the_status_of_their_code(api: str, code: str, stream: bool, tmp_path: Path) -> None:
    begun = {"id": "resp_1", "object": "response", "created_at": 1, "model": "m", "status": "in_progress", "output": []}
    failed = {**begun, "status": "failed", "error": {"code": code, "message": "It failed."}}
    events = [{"type": "response.created", "response": begun}, {"type": "response.failed", "response": failed}]

    def answer(asked: dict[str, Any]) -> Response:
        headers = {"retry-after": "3"}
        if stream:
            return Response(b"".join(map(event, events)), headers=headers, media_type="text/event-stream")
        return Response(json.dumps(failed), headers=headers, media_type="application/json")

    with entrance(Upstream("responses", answer).app, tmp_path, speaks=["responses"]) as url:
        answered = ask(url, api, stream=stream)
    assert answered.status_code == NAMED[code]
    assert "It failed." in answered.json()["error"]["message"]
    assert answered.headers["retry-after"] == "3"


FUNCTIONS = {
    ("chat", "request"): "chat.without_compression",
    ("chat", "answer"): "chat.ChatTranslation",
    ("responses", "request"): "over_responses.without_compression",
    ("responses", "answer"): "over_responses.ChatOverResponses",
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("part", ["request", "answer"])
@pytest.mark.parametrize(("api", "behind"), [("messages", "chat"), ("responses", "chat"), ("chat", "responses")])
def test_a_fault_of_a_translation_blames_nobody_else(
    api: str, behind: str, part: str, stream: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client has a valid request, and the upstream a valid answer."""

    def fault(*_: object, **__: object) -> Any:
        raise ImportError("a function that moved")

    def answer(asked: dict[str, Any]) -> Response:
        kind, body = whole(behind, stream=stream)
        return Response(body, media_type=kind)

    upstream = Upstream(behind, answer)
    with capture_logs() as logs, entrance(upstream.app, tmp_path, speaks=[behind]) as url:
        assert ask(url, api, stream=stream).status_code == 200
        for name in ("events", "whole") if part == "answer" else ("",):
            monkeypatch.setattr(f"proxy.upstream.bridge.{FUNCTIONS[behind, part]}.{name}".rstrip("."), fault)
        answered = ask(url, api, stream=stream)
    assert answered.status_code == 500
    assert "report it" in answered.json()["error"]["message"]
    assert [line["exc_info"] for line in logs if line["event"] == "translation.failed"]
