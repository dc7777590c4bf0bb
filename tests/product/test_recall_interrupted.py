"""Hidden rounds that the upstream doesn't finish, or that the client doesn't wait for."""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from proxy.endpoints import conversations
from proxy.recall.tool import NAME
from tests.kit.front_door import HUGE, long_talk
from tests.kit.scripted import PROFILE, behind
from tests.kit.upstream import Reply, StandIn, ToolCall

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
CALL = Reply(tool_calls=(ToolCall("r1", NAME, json.dumps({"query": "q1x", "id": None, "offset": None})),))
DEADLINE = 6
WAIT = 30
both = pytest.mark.parametrize("stream", [False, True])


class Stalling:
    """An upstream that stops after the first bytes of each response in ``where``: its hidden rounds, or all."""

    def __init__(self, where: str = "hidden") -> None:
        self.stand_in = StandIn(window=HUGE, max_output=32_000, responder=lambda body: self.reply(body))
        self.where = where
        self.begun = threading.Event()
        self.left = threading.Event()
        self.bodies: list[dict[str, Any]] = []

    def reply(self, body: dict[str, Any]) -> Reply:
        return CALL if NAME in json.dumps(body.get("tools", ())) else Reply(content="Without.")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.stand_in.app(scope, receive, send)
            return
        raw = b""
        while (message := await receive())["type"] == "http.request":
            raw += message.get("body", b"")
            if not message.get("more_body"):
                break
        body = json.loads(raw)
        self.bodies.append(body)
        hidden = body["messages"][-1]["role"] == "tool"
        if not hidden and self.where == "hidden":
            waiting: list[Message] = [{"type": "http.request", "body": raw, "more_body": False}]

            async def replayed() -> Message:
                return waiting.pop() if waiting else await receive()

            await self.stand_in.app(scope, replayed, send)
            return
        kind = b"text/event-stream" if body.get("stream") else b"application/json"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        start = b": wait\n\n" if self.where == "hidden" else b'data: {"choices":[{"delta":{"content":"A"}}]}\n\n'
        await send({"type": "http.response.body", "body": start, "more_body": True})
        self.begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        self.left.set()


@contextlib.contextmanager
def stalled(folder: Path, where: str = "hidden", **server: Any) -> Iterator[tuple[Stalling, str]]:
    upstream = Stalling(where)
    policy = {"recall": {"tool": "auto"}, "prepare": None}
    with behind(upstream, folder, policy=policy, profile={**PROFILE}, server=server) as url:
        yield upstream, url


def body(stream: bool) -> dict[str, Any]:
    return {"model": "m", "messages": long_talk(), "tools": TOOLS, "stream": stream}


def post(url: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60, trust_env=False)


def test_a_hidden_round_has_the_deadline_of_its_request(tmp_path: Path) -> None:
    with stalled(tmp_path, deadline=DEADLINE) as (upstream, url):
        response = post(url, body(False))
        assert (response.status_code, response.json()["error"]["code"]) == (504, "upstream_timeout")
        assert upstream.left.wait(WAIT)


def test_each_hidden_round_of_a_stream_has_a_deadline(tmp_path: Path) -> None:
    with stalled(tmp_path, deadline=DEADLINE) as (upstream, url):
        assert "Without." in post(url, body(True)).text
        assert upstream.left.wait(WAIT)


@both
def test_a_client_leaves_while_a_hidden_round_begins(tmp_path: Path, stream: bool) -> None:
    with stalled(tmp_path) as (upstream, url):
        place, raw = urlsplit(url), json.dumps(body(stream)).encode()
        with socket.create_connection((place.hostname, place.port)) as client:
            client.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%b" % (len(raw), raw)
            )
            assert upstream.begun.wait(WAIT)
        assert upstream.left.wait(WAIT), "the upstream stops writing"


def test_an_error_of_the_proxy_closes_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(conversations, "outcome_headers", broken)
    with stalled(tmp_path, "all") as (upstream, url):
        assert post(url, {**body(True), "messages": long_talk()[-1:]}).status_code == 500
        assert upstream.left.wait(WAIT), "the upstream stops writing"
