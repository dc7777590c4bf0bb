"""The head of a response travels with the first piece of its body, and never waits for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from uvicorn.protocols.http.httptools_impl import HEADER_RE, HEADER_VALUE_RE

from proxy.server.app import create_app
from proxy.server.cycle import CoalescingTransport, check_headers
from proxy.server.http_protocol import BoundedProtocol
from proxy.server.loopback import serve
from tests.conftest import settings_for
from tests.kit.client import connected, read_all, read_until, request_bytes
from tests.kit.raw_upstream import Arrived, RawUpstream, Step, chunk, stream_head


class Recorder:
    """A transport that records the writes."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


def after(act: Callable[[CoalescingTransport], object], *, turns: int = 1) -> tuple[list[bytes], bool]:
    """The writes that reach the socket, and whether it is closed, some turns of the event loop after an action."""

    async def run() -> tuple[list[bytes], bool]:
        recorder = Recorder()
        act(CoalescingTransport(cast(Any, recorder), asyncio.get_running_loop()))
        for _ in range(turns):
            await asyncio.sleep(0)
        return recorder.written, recorder.closed

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("act", "written", "closed"),
    [
        (lambda t: [t.write(b"head"), t.write(b"body")], [b"headbody"], False),
        (lambda t: [t.write(b"head"), t.write(b"one"), t.write(b"two")], [b"headone", b"two"], False),
        (lambda t: t.write(b"head"), [b"head"], False),
        (lambda t: [t.write(b"head"), t.close()], [b"head"], True),
        (lambda t: [t.write(b"head"), t.write(b"body"), t.close()], [b"headbody"], True),
    ],
    ids=["head and body", "further pieces", "head alone", "head and close", "whole response and close"],
)
def test_what_reaches_the_socket(
    act: Callable[[CoalescingTransport], object], written: list[bytes], closed: bool
) -> None:
    assert after(act) == (written, closed)


def test_a_head_without_a_body_does_not_wait_for_one(tmp_path: Path) -> None:
    go = threading.Event()

    def script(arrived: Arrived) -> list[Step]:
        return [stream_head(), go, chunk(b"data: late\n\n"), chunk(b"")]

    with RawUpstream(script) as upstream:
        app = create_app(settings_for(upstream.url, tmp_path))
        with serve(app, http=BoundedProtocol) as url, connected(url) as connection:
            connection.sendall(request_bytes(b"{}", "/v1/other", [("connection", "close")]))
            assert read_until(connection, b"\r\n\r\n").startswith(b"HTTP/1.1 200")
            go.set()
            assert b"data: late" in read_all(connection)


def test_a_small_response_takes_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[bytes] = []
    made = BoundedProtocol.connection_made

    class Noting:
        def __init__(self, transport: Any) -> None:
            self._transport = transport

        def write(self, data: bytes) -> None:
            writes.append(data)
            self._transport.write(data)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._transport, name)

    monkeypatch.setattr(BoundedProtocol, "connection_made", lambda self, transport: made(self, Noting(transport)))
    with RawUpstream() as upstream:
        app = create_app(settings_for(upstream.url, tmp_path))
        with serve(app, http=BoundedProtocol) as url, connected(url) as connection:
            connection.sendall(request_bytes(b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'))
            read_until(connection, b"\r\n\r\n{}")
            assert len(writes) == 1


@pytest.mark.parametrize("status", ["204 No Content", "304 Not Modified"])
def test_a_response_that_has_no_body_has_no_framing(status: str, tmp_path: Path) -> None:
    with RawUpstream(lambda _: [f"HTTP/1.1 {status}\r\n\r\n".encode()]) as upstream:
        app = create_app(settings_for(upstream.url, tmp_path))
        with serve(app, http=BoundedProtocol) as url, connected(url) as connection:
            connection.sendall(request_bytes(b"{}", "/v1/other", [("connection", "close")]))
            head, _, rest = read_all(connection).partition(b"\r\n\r\n")
            assert head.startswith(f"HTTP/1.1 {status[:3]} ".encode())
            assert b"transfer-encoding" not in head
            assert rest == b""


@pytest.mark.parametrize("byte", range(256))
def test_headers_are_refused_like_by_uvicorn(byte: int) -> None:
    spelled = b"x" + bytes([byte]) + b"y"
    for pair, expression in (((spelled, b"fine"), HEADER_RE), ((b"fine", spelled), HEADER_VALUE_RE)):
        headers = [(b"content-type", b"text/plain; a=b"), pair, (b"x-last", b"1")]
        if expression.search(spelled):
            with pytest.raises(RuntimeError):
                check_headers(headers)
        else:
            check_headers(headers)
