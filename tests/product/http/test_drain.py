"""A signal to stop: open answers end properly, new connections are refused, the exit is clean."""

import json
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.kit.client import CHAT, ask, chat, connected, read_all, read_until, request_bytes
from tests.kit.combinations import combined
from tests.kit.program import Program, relaying
from tests.kit.raw_upstream import Arrived, RawUpstream, Step, answer, chunk, stream_head
from tests.kit.waiting import until

EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"word "}}]}\n\n'
DONE = b"data: [DONE]\n\n"
EVENTS = 20


class Upstream(RawUpstream):
    """Goes on with its answers, after the first half of a stream, once it is let."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.go = threading.Event()

    def _answer(self, arrived: Arrived) -> list[Step]:
        if b'"stream": true' not in arrived.body:
            return [self.go, answer(b'{"choices":[]}')]
        half = [chunk(EVENT)] * (EVENTS // 2)
        return [stream_head(), *half, self.go, *half, chunk(DONE), chunk(b"")]


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    with Upstream() as running:
        yield running


@pytest.fixture
def server(upstream: Upstream, tmp_path: Path) -> Iterator[Program]:
    with relaying(upstream.url, tmp_path) as running:
        yield running


def test_open_answers_end_and_new_connections_are_refused(server: Program, upstream: Upstream) -> None:
    with ThreadPoolExecutor(55) as pool:
        streams = [pool.submit(ask, server.url, CHAT, chat(stream=True)) for _ in range(50)]
        plain = [pool.submit(ask, server.url, CHAT, chat()) for _ in range(5)]
        assert upstream.wait_arrived(55, 30)
        stop(server)
        assert not any(stream.done() for stream in streams)
        upstream.go.set()
        for stream in streams:
            got = stream.result(30)
            assert (got.status, got.body, got.whole) == (200, EVENT * EVENTS + DONE, True)
        for answered in plain:
            assert (answered.result(30).status, json.loads(answered.result().body)) == (200, {"choices": []})
    assert server.process.wait(20) == 0
    log = server.log.read_text()
    assert "Traceback" not in log
    assert "sk-canary" not in log


@pytest.mark.parametrize("sent", combined(2, [30, 0]), ids=["half a head", "nothing"])
def test_a_connection_without_a_whole_request_is_still_served(sent: int, server: Program, upstream: Upstream) -> None:
    upstream.go.set()
    request = request_bytes(chat())
    with connected(server.url) as connection:
        connection.sendall(request[:sent])
        assert ask(server.url, "/livez", None).status == 200  # connections are accepted in order
        stop(server)
        connection.sendall(request[sent:])
        got = read_all(connection)
    head, _, body = got.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close" in head.split(b"\r\n")
    assert b'{"choices":[]}' in body
    assert server.process.wait(20) == 0


def test_the_request_after_a_stream_is_still_served(server: Program, upstream: Upstream) -> None:
    """The head of the stream couldn't announce that the connection closes."""
    with connected(server.url) as connection:
        connection.sendall(request_bytes(chat(stream=True)))
        read_until(connection, EVENT)
        stop(server)
        connection.sendall(request_bytes(chat()))  # already here when the stream ends, however busy the machine is
        upstream.go.set()
        got = read_all(connection)
    _, ended, following = got.partition(DONE + b"\r\n0\r\n\r\n")
    assert ended
    head, _, body = following.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close" in head.split(b"\r\n")
    assert body == b'{"choices":[]}'
    assert server.process.wait(20) == 0


def test_connections_that_send_nothing_hold_nobody_up(server: Program) -> None:
    """An idle connection and a new one are closed, and the process ends."""
    with connected(server.url) as idle, connected(server.url) as new:
        idle.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        read_until(idle, b"\r\n\r\n")
        stop(server)
        assert server.process.wait(20) == 0
        read_all(idle)
        assert read_all(new) == b""


def stop(server: Program) -> None:
    """Send SIGTERM, and wait until the server has stopped listening."""
    server.process.send_signal(signal.SIGTERM)
    assert until(server.refuses)


def test_an_idle_server_ends_at_once(server: Program) -> None:
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(20) == 0
    assert time.monotonic() - began < 15, "half of the time that answers would have had"


def test_answers_that_take_too_long_are_cut(upstream: Upstream, tmp_path: Path) -> None:
    """``server.drain`` bounds the wait."""
    with relaying(upstream.url, tmp_path, drain=1) as server, connected(server.url) as connection:
        connection.sendall(request_bytes(chat(stream=True)))
        read_until(connection, EVENT)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
        assert b"[DONE]" not in read_all(connection)
