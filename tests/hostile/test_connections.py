"""Clients' connections: slow ones end after a bounded time, and idle ones give way."""

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.server.app import Proxy
from proxy.server.http_protocol import BoundedProtocol
from proxy.server.loopback import serve
from tests.conftest import settings_for
from tests.kit.client import CHAT, StartProxy, ask, chat, connected, read_all, read_until, request_bytes
from tests.kit.raw_upstream import RawUpstream, answer
from tests.kit.watched import SOON

HEAD = request_bytes(chat())[:60]


class Quick(BoundedProtocol):
    head_seconds = 0.3


@pytest.fixture(scope="module")
def upstream() -> Iterator[RawUpstream]:
    with RawUpstream(lambda _: [answer(b'{"choices":[]}')]) as running:
        yield running


@pytest.fixture(scope="module")
def quick(upstream: RawUpstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serve(Proxy(settings_for(upstream.url, tmp_path_factory.mktemp("quick"))), http=Quick) as url:
        yield url


def dribbled(connection: socket.socket, data: bytes, seconds: float = SOON) -> bool:
    """Whether the server closes the connection while the client sends a byte at a time."""
    until = time.monotonic() + seconds
    connection.settimeout(0.05)
    for byte in data * 1_000:
        if time.monotonic() > until:
            return False
        with contextlib.suppress(TimeoutError):
            try:
                connection.sendall(bytes([byte]))
                if not connection.recv(1):
                    return True
            except ConnectionError:
                return True
    return False


@pytest.mark.parametrize("begun", [False, True], ids=["a new connection", "after a response"])
def test_a_head_that_comes_slowly(quick: str, begun: bool) -> None:
    with connected(quick) as connection:
        if begun:
            connection.sendall(request_bytes(chat()))
            read_until(connection, b'{"choices":[]}')
        assert dribbled(connection, HEAD)


def test_a_connection_that_sends_nothing(quick: str) -> None:
    with connected(quick) as connection:
        assert read_all(connection) == b""


def test_the_rest_of_a_body_that_nobody_reads(quick: str) -> None:
    """The response is complete long before the body is."""
    with connected(quick) as connection:
        connection.sendall(b"POST /livez HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n")
        read_until(connection, b"\r\n\r\n")
        assert dribbled(connection, b"x")


def test_requests_and_pauses_may_take_longer(quick: str, upstream: RawUpstream) -> None:
    """Only heads are bounded: an upstream may take its time, and so may a client between two requests."""
    upstream.script = lambda _: [1.0, answer(b'{"choices":[]}')]
    try:
        with connected(quick) as connection:
            for _ in range(2):
                connection.sendall(request_bytes(chat()))
                assert read_until(connection, b'{"choices":[]}').startswith(b"HTTP/1.1 200 ")
                time.sleep(1.0)
    finally:
        upstream.script = lambda _: [answer(b'{"choices":[]}')]


def test_connections_beyond_the_limit_replace_idle_ones(
    upstream: RawUpstream, start_proxy: StartProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.server.http_protocol.most_connections", lambda: 20)
    with contextlib.ExitStack() as held, serve(Proxy(settings_for(upstream.url, tmp_path))) as url:
        idle = [held.enter_context(connected(url)) for _ in range(30)]
        time.sleep(0.1)
        idle.append(held.enter_context(connected(url)))
        assert ask(url, CHAT, chat()).status == 200
        open_ones = sum(not closed(connection) for connection in idle)
        assert 10 <= open_ones <= 20
        idle[-1].sendall(request_bytes(chat()))
        assert idle[-1].recv(12) == b"HTTP/1.1 200"


def closed(connection: socket.socket) -> bool:
    connection.settimeout(0.01)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    finally:
        connection.settimeout(SOON)
