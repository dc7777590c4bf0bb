"""Clients that disconnect at the last event of a stream, before the upstream has ended it."""

import socket
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest

from tests.kit.held_end import HeldEnd
from tests.kit.scripted import behind
from tests.kit.strict_messages import StrictMessages
from tests.kit.strict_responses import StrictResponses
from tests.kit.upstream import Reply, StandIn
from tests.kit.waiting import until

MESSAGES = [{"role": "user", "content": "Hello."}]
CHAT = {"model": "m", "messages": MESSAGES, "stream": True}
INPUT = {"model": "m", "input": MESSAGES, "stream": True}
APIS: dict[str, tuple[Any, str, dict[str, Any], str]] = {
    "chat": (StandIn, "/v1/chat/completions", CHAT, "[DONE]"),
    "responses": (StrictResponses, "/v1/responses", INPUT, "response.completed"),
    "messages": (StrictMessages, "/v1/messages", {**CHAT, "max_tokens": 100}, "message_stop"),
}


def left_at(url: str, path: str, body: dict[str, Any], text: str) -> None:
    """Send a request, and disconnect when this text has arrived."""
    raw, place = msgspec.json.encode(body), urlsplit(url)
    with socket.create_connection((place.hostname, place.port), timeout=30) as connection:
        head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer sk\r\ncontent-length: {len(raw)}"
        connection.sendall(f"{head}\r\nanthropic-version: 2023-06-01\r\n\r\n".encode() + raw)
        got = b""
        while text.encode() not in got:
            piece = connection.recv(65_536)
            assert piece, got
            got += piece


def ended(url: str, path: str) -> tuple[int, str | None]:
    """Return the status and the error of the only record of a path."""
    found: list[Any] = []

    def recorded() -> bool:
        answer = httpx.get(f"{url}/compaction/requests", headers={"authorization": "Bearer sk"}, trust_env=False)
        found[:] = [one for one in answer.json()["data"] if one["path"].startswith(path)]
        return bool(found)

    assert until(recorded)
    return found[0]["status"], found[0]["error"]


@pytest.mark.parametrize("api", APIS)
def test_a_client_that_has_the_last_event_has_not_left(tmp_path: Path, api: str) -> None:
    kind, path, body, last = APIS[api]
    held = HeldEnd(last)
    with behind(held.before(kind(window=100_000).app), tmp_path) as url:
        try:
            left_at(url, path, body, last)
            assert ended(url, path) == (200, None)
        finally:
            held.release()


def test_a_client_without_the_last_event_has_left(tmp_path: Path) -> None:
    go = threading.Event()
    upstream = StandIn(window=100_000, responder=lambda _: Reply(content="one two three four five six seven", go=go))
    with behind(upstream, tmp_path) as url:
        try:
            left_at(url, "/v1/chat/completions", CHAT, "one")
            assert ended(url, "/v1/chat/completions") == (499, "client_disconnected")
        finally:
            go.set()
