"""Overload: the proxy rejects requests at once, and serves all others."""

import contextlib
import http.client
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from itertools import islice
from typing import Any

import pytest

from proxy.http import request_body as door
from tests.kit import waiting
from tests.kit.client import CHAT, TIMEOUT, Got, StartProxy, ask, chat, connected, read_until, received, request_bytes
from tests.kit.raw_upstream import Arrived, RawUpstream, Stage, Step, answer, chunk, stream_head

DONE = b'{"choices":[]}'

Held = tuple[RawUpstream, threading.Event]
"""An upstream, and what lets it answer."""


def is_slow(arrived: Arrived) -> bool:
    return b"slow" in arrived.body


@contextlib.contextmanager
def held(
    stage: Stage, holds: Callable[[Arrived], bool] = is_slow, begins: Callable[[Arrived], list[Step]] | None = None
) -> Iterator[Held]:
    """An upstream that holds some answers until the test releases them. Earlier answers have not waited for them.

    ``begins`` says what it sends of such an answer at once.
    """
    go = threading.Event()

    def script(arrived: Arrived) -> list[Step]:
        if not holds(arrived):
            return [answer(DONE)]
        return [go, answer(DONE)] if begins is None else [*begins(arrived), go, chunk(b"data: [DONE]\n\n"), chunk(b"")]

    with stage(script) as upstream:
        try:
            yield upstream, go
        finally:
            go.set()


def number_of_slow(upstream: RawUpstream) -> int:
    return sum(is_slow(arrived) for arrived in upstream.arrived)


def overloaded(got: Got) -> bool:
    """Whether a request was turned away, checked for what the refusal says."""
    if got.status == 200:
        return False
    assert got.status == 503
    assert got.header("retry-after") == "1"
    assert (got.error["type"], got.error["code"], got.error["param"]) == ("server_error", "overloaded", None)
    assert "Try again" in got.error["message"]
    return True


def occupied(url: str, upstream: RawUpstream, clients: ThreadPoolExecutor) -> Future[Got]:
    """A request that has the only place. An earlier request may still be releasing it."""
    until = time.monotonic() + TIMEOUT
    while time.monotonic() < until:
        first = clients.submit(ask, url, body=chat("slow"))
        while not first.done() and not number_of_slow(upstream):
            time.sleep(0.005)
        if not first.done():
            return first
        assert overloaded(first.result())
    raise AssertionError("the place is never free")


def in_flight(url: str) -> float:
    found = re.search(r"^compaction_requests_in_flight (\S+)$", ask(url, "/metrics", None).body.decode(), re.MULTILINE)
    assert found is not None
    return float(found[1])


def soon_served(url: str, path: str = CHAT, body: bytes = chat()) -> bool:
    until = time.monotonic() + TIMEOUT
    while time.monotonic() < until:
        if not overloaded(ask(url, path, body)):
            return True
        time.sleep(0.02)
    return False


@pytest.mark.long
def test_ten_times_what_it_can_take_on(stage: Stage, start_proxy: StartProxy) -> None:
    with held(stage) as (upstream, go):
        url = start_proxy(upstream.url, {"server": {"max_concurrent": 5, "max_queue": 3, "queue_timeout": 60}})
        ask(url, body=chat())
        with ThreadPoolExecutor(50) as clients:
            flood = [clients.submit(ask, url, body=chat("slow")) for _ in range(50)]
            # The upstream answers nothing so far: neither a refusal nor word of the health waits for anything.
            refusals = list(islice(as_completed(flood, TIMEOUT), 42))
            assert all(overloaded(found.result()) for found in refusals)
            healthy = [ask(url, path, None) for path in ("/livez", "/readyz", "/metrics")]
            assert upstream.wait_arrived(1 + 5)
            assert sum(found.done() for found in flood) == 42
            assert number_of_slow(upstream) == in_flight(url) == 5
            go.set()
            results = [found.result() for found in flood]
        assert soon_served(url)
        assert waiting.until(lambda: in_flight(url) == 0)
    assert sum(map(overloaded, results)) == 42
    assert number_of_slow(upstream) == 8
    assert [got.status for got in healthy] == [200, 200, 200]
    assert re.search(r'^compaction_refusals_total\{reason="overload"\} [1-9]', healthy[2].body.decode(), re.MULTILINE)


def test_who_waits_too_long_is_turned_away(stage: Stage, start_proxy: StartProxy) -> None:
    with held(stage) as (upstream, go):
        url = start_proxy(upstream.url, {"server": {"max_concurrent": 1, "max_queue": 5, "queue_timeout": 0.3}})
        with ThreadPoolExecutor(1) as clients:
            first = occupied(url, upstream, clients)
            began = time.monotonic()
            assert overloaded(ask(url, body=chat()))
            assert time.monotonic() - began >= 0.3
            assert not first.done()
            go.set()
            assert first.result().status == 200


ONE: dict[str, Any] = {"server": {"max_concurrent": 1, "max_queue": 0}}


@pytest.mark.parametrize("path", [CHAT, "/v1/files", "/v1/models", "/compaction/archive/0", "/nothing"])
def test_no_path_but_health_gets_past(path: str, stage: Stage, start_proxy: StartProxy) -> None:
    with held(stage) as (upstream, go):
        url = start_proxy(upstream.url, ONE)
        with ThreadPoolExecutor(1) as clients:
            first = occupied(url, upstream, clients)
            # Its body never comes: the answer does not wait for it.
            with connected(url) as connection:
                head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 60000000\r\n\r\n"
                connection.sendall(head.encode() + b"{")
                assert connection.recv(65_536).startswith(b"HTTP/1.1 503 ")
            assert not first.done()
            go.set()
            assert first.result().status == 200


def streaming(arrived: Arrived) -> list[Step]:
    event = chunk(b'data: {"choices":[{"index":0,"delta":{"content":"word "}}]}\n\n')
    return [stream_head(), event, event]


def test_a_stream_holds_its_place_until_its_end(stage: Stage, start_proxy: StartProxy) -> None:
    with held(stage, begins=streaming) as (upstream, go):
        url = start_proxy(upstream.url, ONE)
        assert soon_served(url)
        with connected(url) as connection:
            while True:  # the one before may just be giving its place back
                connection.sendall(request_bytes(chat("slow", stream=True)))
                if b"HTTP/1.1 200 " in read_until(connection, b"}\n\n"):
                    break
            assert overloaded(ask(url, body=chat()))
            go.set()
            read_until(connection, b"[DONE]")
        assert soon_served(url)


@pytest.mark.parametrize("wait", [0.0, 0.2])
def test_who_leaves_gives_the_place_back(wait: float, stage: Stage, start_proxy: StartProxy) -> None:
    with held(stage) as (upstream, _):
        url = start_proxy(upstream.url, ONE)
        with connected(url) as connection:
            connection.sendall(request_bytes(chat("slow")))
            assert upstream.wait_arrived(1)
            time.sleep(wait)
        assert soon_served(url)


LARGE = chat("x" * 900_000)
MEMORY: dict[str, Any] = {
    "server": {"body_limit": "1MB", "max_body_memory": "2MB", "queue_timeout": 0.5},
    "policies": {"default": {"mode": "off"}},
}


def is_large(arrived: Arrived) -> bool:
    return len(arrived.body) > 800_000


@pytest.mark.parametrize("path", [CHAT, "/v1/files"])
@pytest.mark.parametrize("in_chunks", [False, True])
def test_bodies_take_no_more_memory_than_there_is(
    path: str, in_chunks: bool, stage: Stage, start_proxy: StartProxy
) -> None:
    # The proxy never holds a forwarded stream, and answers it like a small response.
    passed_on = path == "/v1/files" and in_chunks

    def holds(arrived: Arrived) -> bool:
        return is_large(arrived) and arrived.target == CHAT

    with held(stage, holds) as (upstream, go):
        url = start_proxy(upstream.url, MEMORY)
        with ThreadPoolExecutor(2) as clients:
            large = [clients.submit(ask, url, body=LARGE) for _ in range(2)]
            assert upstream.wait_arrived(2)
            if passed_on:
                assert ask(url, path, iter([LARGE])).status == 200
            else:
                body: Any = iter([LARGE[:500_000], LARGE[500_000:]]) if in_chunks else LARGE
                assert overloaded(ask(url, path, body))
            assert not overloaded(ask(url, path, chat()))
            assert not any(found.done() for found in large)
            go.set()
            assert [found.result().status for found in large] == [200, 200]
        assert soon_served(url, path, LARGE)


def test_a_body_waits_for_memory(stage: Stage, start_proxy: StartProxy) -> None:
    with held(stage, is_large) as (upstream, go):
        url = start_proxy(upstream.url, {**MEMORY, "server": {**MEMORY["server"], "queue_timeout": 60}})
        with ThreadPoolExecutor(4) as clients:
            large = [clients.submit(ask, url, body=LARGE) for _ in range(4)]
            assert upstream.wait_arrived(2)
            assert not upstream.wait_arrived(3, 0.5)
            go.set()
            assert [found.result().status for found in large] == [200] * 4


def test_bodies_in_chunks_do_not_wait_for_each_others_memory(stage: Stage, start_proxy: StartProxy) -> None:
    head = request_bytes(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    with held(stage, lambda arrived: False) as (upstream, _):
        url = start_proxy(upstream.url, {**MEMORY, "server": {**MEMORY["server"], "queue_timeout": 600}})
        with contextlib.ExitStack() as closing:
            clients = [closing.enter_context(connected(url)) for _ in range(3)]
            for part in (LARGE[:600_000], LARGE[600_000:], b""):
                for one in clients:
                    one.sendall((head if part == LARGE[:600_000] else b"") + b"%x\r\n%b\r\n" % (len(part), part))
                assert ask(url, body=chat()).status == 200
            found = [answer_on(one) for one in clients]
        assert {one.status for one in found if not overloaded(one)} == {200}


def answer_on(connection: socket.socket) -> Got:
    response = http.client.HTTPResponse(connection, method="POST")
    response.begin()
    return received(response)


# A body without a length is passed on as it comes, and has the time that the upstream gives it.
@pytest.mark.parametrize(
    ("path", "length"),
    [(CHAT, "Content-Length: 1000"), (CHAT, "Transfer-Encoding: chunked"), ("/v1/files", "Content-Length: 1000")],
)
def test_a_body_that_does_not_come_gives_the_place_back(
    path: str, length: str, stage: Stage, start_proxy: StartProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "BODY_SECONDS", 0.5)
    with stage(lambda arrived: [answer(DONE)]) as upstream:
        url = start_proxy(upstream.url, ONE)
        assert soon_served(url)
        upstream.arrived.clear()
        with connected(url) as connection:
            connection.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{length}\r\n\r\n".encode())
            told = read_until(connection, b"}}")
        assert told.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"request_timeout"' in told
        assert soon_served(url)
        assert [arrived.target for arrived in upstream.arrived] == [CHAT]
