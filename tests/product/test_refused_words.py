"""Each word that a translation writes is refused in the wordings of real servers, whole and streamed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from proxy.server.loopback import serve
from tests.kit.refusals import WORDINGS
from tests.kit.scripted import proxied
from tests.kit.three_apis import PATHS, Answer

_SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
_OPTIONS = {"temperature": 0.5, "top_p": 0.9, "service_tier": "flex"}

ASKED: dict[str, dict[str, Any]] = {
    "messages": {
        "max_tokens": 900,
        **_OPTIONS,
        "metadata": {"user_id": "someone"},
        "stop_sequences": ["END"],
        "thinking": {"type": "enabled", "budget_tokens": 5_000},
        "output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}},
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "tools": [{"name": "get", "input_schema": _SCHEMA}],
        "system": "Be brief.",
        "messages": [{"role": "user", "content": "hi"}],
    },
    "responses": {
        "max_output_tokens": 900,
        **_OPTIONS,
        "user": "someone",
        "safety_identifier": "s",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "high"},
        "text": {"format": {"type": "json_schema", "name": "answer", "schema": _SCHEMA}},
        "tool_choice": "required",
        "tools": [{"type": "function", "name": "get", "parameters": _SCHEMA}],
        "instructions": "Be brief.",
        "input": "hi",
    },
    "chat": {
        "max_completion_tokens": 900,
        **_OPTIONS,
        "user": "someone",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "reasoning_effort": "high",
        "verbosity": "low",
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": _SCHEMA}},
        "tool_choice": "required",
        "tools": [{"type": "function", "function": {"name": "get", "parameters": _SCHEMA}}],
        "messages": [{"role": "user", "content": "hi"}],
    },
}
BRIDGES = (("messages", "chat"), ("responses", "chat"), ("chat", "responses"), ("messages", "responses"))
KEPT = frozenset(
    {
        *("model", "messages", "input", "tools", "tool_choice", "response_format", "text", "text.format", "stream"),
        *("store", "prompt_cache_retention", "max_output_tokens"),
    }
)
"""Fields that no refusal changes."""

INSIDE = ("stream_options.include_usage", "reasoning.effort", "text.verbosity", "text.format")


class Case(NamedTuple):
    client: str
    upstream: str
    stream: bool
    field: str
    wording: str

    @property
    def model(self) -> str:
        return f"{self.upstream}-{self.client}-{self.field}-{self.wording}-{self.stream}".replace(" ", "_")


class Picky:
    """An upstream whose models each refuse one field, in the wording of one server."""

    def __init__(self) -> None:
        self.cases: dict[str, Case] = {}
        self.sent: dict[str, list[dict[str, Any]]] = {}
        self.app = Starlette(routes=[Route(path, self._answer, methods=["POST"]) for path in PATHS.values()])

    async def _answer(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.sent.setdefault(body["model"], []).append(body)
        case = self.cases.get(body["model"])
        if case is not None and (value := at(body, case.field)) is not None:
            refusal = WORDINGS[case.wording](case.field, value)
            return Response(refusal.body, refusal.status, media_type="application/json")
        api = next(name for name, path in PATHS.items() if request.url.path == path)
        events, whole = Answer("Noted.").parts(api, stream=bool(body.get("stream")))
        if events:
            return Response(b"".join(events), media_type="text/event-stream")
        return Response(whole, media_type="application/json")


def at(body: Any, path: str) -> Any:
    for name in path.split("."):
        body = body.get(name) if isinstance(body, dict) else None
    return body


class Front(NamedTuple):
    upstream: Picky
    url: str
    http: httpx.Client

    def ask(self, client: str, model: str, stream: bool) -> httpx.Response:
        body = {**ASKED[client], "model": model, "stream": stream}
        return self.http.post(f"{self.url}{PATHS[client]}", json=body)


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    upstream = Picky()
    with serve(upstream.app) as url, httpx.Client(trust_env=False, timeout=60) as http:
        upstreams = {api: {"base_url": f"{url}/v1", "api_key": "k", "speaks": [api]} for api in ("chat", "responses")}
        profile = {"like": "gpt-5"}
        models = [{"match": f"{api}-*", "upstream": api, "profile": profile} for api in upstreams]
        settings = {"upstreams": upstreams, "models": models, "policies": {"default": {}}}
        with proxied(settings, tmp_path_factory.mktemp("front")) as entrance:
            yield Front(upstream, entrance, http)


def written(front: Front, client: str, upstream: str, stream: bool) -> list[str]:
    """Return the fields that leave if nothing is refused."""
    model = f"{upstream}-{client}-probe-{stream}"
    assert front.ask(client, model, stream).status_code == 200
    body = front.upstream.sent[model][-1]
    return [name for name in (*body, *INSIDE) if at(body, name) is not None and name != "stream"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("client", "upstream"), BRIDGES)
def test_a_refused_word_is_taken_back_and_the_next_request_leaves_right(
    client: str, upstream: str, stream: bool, front: Front, full: bool
) -> None:
    """Without ``--full``, each field has one of the wordings, and another one in each API."""
    wrong = []
    fields = written(front, client, upstream, stream)
    assert len(fields) >= 10
    turn = 2 * BRIDGES.index((client, upstream)) + stream
    for number, (place, field) in itertools.product(range(8 if full else 1), enumerate(fields)):
        wording = [*WORDINGS][(turn + place + number) % 8]
        case = Case(client, upstream, stream, field, wording)
        front.upstream.cases[case.model] = case
        answers = [front.ask(client, case.model, stream) for _ in range(2)]
        seen = [answer.status_code for answer in answers], len(front.upstream.sent[case.model])
        expected = ([WORDINGS[wording](field, 1).status] * 2, 2) if field in KEPT else ([200, 200], 3)
        if seen != expected:
            wrong.append((field, wording, seen, answers[-1].text[:150]))
    assert wrong == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wording", WORDINGS)
def test_a_client_gets_the_refusal_of_its_own_word_unchanged(wording: str, stream: bool, front: Front) -> None:
    for api in ("chat", "responses"):
        case = Case(api, api, stream, "temperature", wording)
        front.upstream.cases[case.model] = case
        answers = [front.ask(api, case.model, stream) for _ in range(2)]
        refusal = WORDINGS[wording]("temperature", 0.5)
        assert [(answer.status_code, answer.content) for answer in answers] == [refusal, refusal]
        wishes = stream and api == "chat"  # the proxy's wish for the usage is the first suspect, once an hour
        assert len(front.upstream.sent[case.model]) == 2 + wishes
