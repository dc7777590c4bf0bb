"""Thinking that the upstream refuses because the proxy changed an earlier message."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.kit.messages import words
from tests.kit.scripted import behind

MODEL = "claude-sonnet-5-5"
PROFILE = {"context_window": 8_000, "max_output_tokens": 1_000, "tokenizer": "o200k_base"}
REFUSAL = {
    "type": "error",
    "error": {
        "type": "invalid_request_error",
        "message": "messages.1.content.0: This thinking block is bound to a different conversation.",
    },
}
ANSWER = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "model": MODEL,
    "content": [{"type": "text", "text": "Done."}],
    "stop_reason": "end_turn",
    "usage": {"input_tokens": 1, "output_tokens": 1},
}


class Refusing:
    """An upstream that refuses any thinking, in a compressed response."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.app = Starlette(routes=[Route("/v1/messages", self._answer, methods=["POST"])])

    async def _answer(self, request: Request) -> Response:
        body = await request.body()
        self.bodies.append(body)
        if b'"thinking"' not in body:
            return JSONResponse(ANSWER)
        packed = gzip.compress(json.dumps(REFUSAL).encode())
        return Response(packed, 400, {"content-encoding": "gzip", "content-type": "application/json"})


def thought(number: int) -> dict[str, Any]:
    thinking = {"type": "thinking", "thinking": f"thought {number}", "signature": f"s{number}"}
    return {"role": "assistant", "content": [thinking, {"type": "text", "text": words(400, f"a{number}x")}]}


def conversation(turns: int) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for number in range(turns):
        messages += [{"role": "user", "content": words(100, f"u{number}x")}, thought(number)]
    return [*messages, {"role": "user", "content": "What now?"}]


@pytest.mark.parametrize("changed", [True, False])
def test_a_refusal_is_answered_without_thinking_if_the_proxy_changed_the_prompt(changed: bool, tmp_path: Path) -> None:
    """The client caused the refusal of an unchanged request, so it gets that."""
    upstream = Refusing()
    with behind(upstream.app, tmp_path, profile=PROFILE) as url, httpx.Client(base_url=url, trust_env=False) as caller:

        def ask(messages: list[dict[str, Any]]) -> httpx.Response:
            body = {"model": MODEL, "max_tokens": 100, "messages": messages}
            return caller.post("/v1/messages", json=body, headers={"x-api-key": "sk-client"})

        turns = conversation(20 if changed else 2)
        first = ask(turns)
        grown = [*turns, thought(99), {"role": "user", "content": "And now?"}]
        upstream.bodies.clear()
        second = ask(grown)
    assert first.status_code == second.status_code == (200 if changed else 400)
    thinking = [body.count(b'"thinking"') > 0 for body in upstream.bodies]
    assert thinking == ([True, False] if changed else [True])
    assert second.headers["x-compaction"] == ("compacted" if changed else "none")
    if not changed:
        assert second.json() == REFUSAL


def test_a_refusal_is_remembered_though_the_client_moves_its_breakpoints(tmp_path: Path) -> None:
    upstream = Refusing()
    with behind(upstream.app, tmp_path, profile=PROFILE) as url, httpx.Client(base_url=url, trust_env=False) as caller:

        def ask(messages: list[dict[str, Any]], *, marked: bool) -> None:
            marks = {"cache_control": {"type": "ephemeral"}} if marked else {}
            first = {"role": "user", "content": [{"type": "text", "text": messages[0]["content"], **marks}]}
            body = {"model": MODEL, "max_tokens": 100, "messages": [first, *messages[1:]]}
            answer = caller.post("/v1/messages", json=body, headers={"x-api-key": "sk-client"})
            assert answer.status_code == 200

        turns = [*conversation(20), thought(99), {"role": "user", "content": "And now?"}]
        ask(conversation(20), marked=True)
        ask(turns, marked=True)
        upstream.bodies.clear()
        ask([*turns, {"role": "assistant", "content": "Done."}, {"role": "user", "content": "More?"}], marked=False)
    assert len(upstream.bodies) == 1, "nothing was refused again"


def test_a_conversation_with_the_same_beginning_keeps_its_thinking(tmp_path: Path) -> None:
    """A refusal says nothing about another conversation of the same team."""
    upstream = Refusing()
    with behind(upstream.app, tmp_path, profile=PROFILE) as url, httpx.Client(base_url=url, trust_env=False) as caller:

        def ask(messages: list[dict[str, Any]]) -> None:
            body = {"model": MODEL, "max_tokens": 100, "messages": messages}
            assert caller.post("/v1/messages", json=body, headers={"x-api-key": "sk-client"}).status_code == 200

        turns = conversation(20)
        ask(turns)
        ask([*turns, thought(99), {"role": "user", "content": "And now?"}])
        other = [*turns[:2], *({**turn, "content": _another(turn["content"])} for turn in turns[2:]), thought(98)]
        upstream.bodies.clear()
        ask([*other, {"role": "user", "content": "And now?"}])
    own = [body for body in upstream.bodies if b'"And now?"' in body]
    assert [b'"thinking"' in body for body in own] == [True, False]


def _another(content: Any) -> Any:
    """Return other content of the same size."""
    return json.loads(json.dumps(content).replace("x0", "y0"))
