"""A stream that goes on doesn't keep its request in memory, nor in the quota for bodies."""

import contextlib
import gc
import hashlib
import json
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.types import ASGIApp

from proxy.server.app import Proxy
from tests.kit.client import CHAT, JSON, StartProxy, ask, chat, connected, read_until, request_bytes
from tests.kit.raw_upstream import Arrived, End, RawUpstream, Step, answer, chunk, stream_head
from tests.kit.watched import CONTENT, ROLE

MB = 1_000_000
STREAMS = 10
LIMIT = 2_500_000
"""Bytes of memory for bodies: two of these fit."""

KEY = "cp-restricted"


def hashed(key: str) -> str:
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


class Inside:
    """Gives a test the application that it talks to."""

    app: Proxy

    def wrap(self, app: ASGIApp) -> ASGIApp:
        assert isinstance(app, Proxy)
        self.app = app
        return app

    @property
    def used(self) -> int:
        return self.app.service.access.bodies.used

    def comes_down_to(self, size: int, seconds: float = 10.0) -> bool:
        until = time.monotonic() + seconds
        while self.used > size and time.monotonic() < until:
            time.sleep(0.01)
        return self.used <= size


@pytest.fixture(scope="module")
def upstream() -> Iterator[RawUpstream]:
    def script(arrived: Arrived) -> list[Step]:
        arrived.body = arrived.body[:100]
        if b"hold" in arrived.body or not arrived.target.endswith(CHAT):
            return [stream_head(), chunk(ROLE + CONTENT), End.SILENCE]
        return [answer(b'{"choices":[]}')]

    with RawUpstream(script) as running:
        yield running


@pytest.fixture(scope="module")
def inside() -> Inside:
    return Inside()


@pytest.fixture(scope="module")
def url(start_proxy: StartProxy, upstream: RawUpstream, inside: Inside) -> str:
    def model(match: str, window: int) -> dict[str, Any]:
        return {"match": match, "upstream": "main", "profile": {"context_window": window, "max_input_tokens": window}}

    settings = {
        "auth": {"mode": "keys"},
        "upstreams": {"main": {"api_key": "sk-upstream"}},
        "models": [model("small", 8_000), model("counted", 1_000_000), model("bytes", 4_000_000)],
        "policies": {"default": {"prepare": None}},
        "server": {"max_body_memory": LIMIT, "body_limit": LIMIT // 2, "queue_timeout": 0.5},
        "teams": {
            "all": {"keys": [hashed("cp-all")]},
            "few": {"keys": [hashed(KEY)], "models": ["small"], "paths": "models"},
        },
    }
    return start_proxy(upstream.url, settings, wrap=inside.wrap)


def large(model: str) -> bytes:
    """A streamed conversation of 1 MB."""
    start = json.dumps({"user": "hold", "model": model, "stream": True})
    words = json.dumps("lorem ipsum dolor " * 1_100)
    turns = [{"role": role, "content": "@"} for _ in range(25) for role in ("user", "assistant")]
    text = json.dumps([*turns, {"role": "user", "content": "Go on."}]).replace('"@"', words)
    return f'{start[:-1]},"messages":{text}}}'.encode()


WAYS: dict[str, tuple[bytes, str, str]] = {
    "counted": (large("counted"), CHAT, "cp-all"),
    "compacted": (large("small"), CHAT, "cp-all"),
    "passed through": (large("small"), "/v1/embeddings", "cp-all"),
    "passed through and read": (large("small"), "/v1/embeddings", KEY),
}


@contextlib.contextmanager
def without_collector() -> Iterator[Callable[[], int]]:
    """Without a collector, so that a reference cycle counts as memory in use. Yields the bytes since the beginning."""
    gc.collect()
    gc.disable()
    tracemalloc.start(1)
    try:
        before = tracemalloc.get_traced_memory()[0]
        yield lambda: tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
        gc.enable()


@pytest.mark.parametrize("way", WAYS)
def test_streams_do_not_keep_their_requests(url: str, inside: Inside, way: str) -> None:
    body, path, key = WAYS[way]
    headers = [JSON, ("authorization", f"Bearer {key}")]
    sent = request_bytes(body, path, headers)
    with connected(url) as first:  # loads tokenizers and tables
        first.sendall(sent)
        read_until(first, CONTENT)
    with contextlib.ExitStack() as held, without_collector() as taken:
        streams = []
        for _ in range(STREAMS):
            stream = held.enter_context(connected(url))
            stream.sendall(sent)
            read_until(stream, CONTENT)  # its memory was there although the earlier streams are open
            streams.append(stream)
        assert inside.comes_down_to(0)
        until = time.monotonic() + 10
        while taken() > STREAMS * MB / 4 and time.monotonic() < until:
            time.sleep(0.05)
        assert taken() < STREAMS * MB / 4
        for stream in streams:
            stream.setblocking(False)
            with pytest.raises(BlockingIOError):
                stream.recv(1)
        assert ask(url, body=chat(model="small"), headers=headers).status == 200


def test_what_nobody_counted_is_charged_until_the_end(url: str, inside: Inside) -> None:
    """The proxy may have to count such a request when it sees the end of the answer."""
    body = large("bytes")
    headers = [JSON, ("authorization", "Bearer cp-all")]
    with contextlib.ExitStack() as held:
        for number in range(2):
            stream = held.enter_context(connected(url))
            stream.sendall(request_bytes(body, headers=headers))
            read_until(stream, CONTENT)
            assert inside.used == (number + 1) * len(body)
        refused = ask(url, body=body, headers=headers)
        assert (refused.status, refused.error["code"]) == (503, "overloaded")
    assert inside.comes_down_to(0)
