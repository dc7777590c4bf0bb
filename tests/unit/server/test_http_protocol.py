"""A server that stops while a response is under way keeps that connection for one more request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import uvicorn
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from proxy.server import http_protocol
from proxy.server.http_protocol import BoundedProtocol

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
END = b"0\r\n\r\n"
LONG = 60.0
"""Seconds that no step of a test takes, even on a busy machine."""


class Stopping:
    """A connection whose response has begun before its server is told to stop."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.state = ServerState()
        self.served = 0

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the first request with a stream, in two halves, and the others with a plain response."""
        self.served += 1
        response: Response = PlainTextResponse("plain")
        if self.served == 1:
            response = StreamingResponse(self._halves())
        await response(scope, receive, send)

    async def _halves(self) -> AsyncIterator[bytes]:
        yield b"one"
        await self.go.wait()
        yield b"two"

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Connect, read the first half of the stream, and stop the server."""
        config = uvicorn.Config(
            self.app, interface="asgi3", ws="none", lifespan="off", log_config=None, timeout_keep_alive=int(2 * LONG)
        )
        config.load()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: BoundedProtocol(config, self.state, {}), "127.0.0.1", 0)
        async with asyncio.timeout(LONG), server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            try:
                writer.write(REQUEST)
                await reader.readuntil(b"one\r\n")
                for protocol in self.state.connections:
                    protocol.shutdown()
                yield reader, writer
            finally:
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()
                while self.state.connections or self.state.tasks:  # noqa: ASYNC110 - there is no event
                    await asyncio.sleep(0.001)


def is_last(response: bytes) -> bool:
    """Whether this is a whole plain response that announces the end of its connection."""
    head, _, body = response.partition(b"\r\n\r\n")
    return head.startswith(b"HTTP/1.1 200 ") and b"connection: close" in head.split(b"\r\n") and body == b"plain"


@pytest.mark.parametrize("early", [True, False], ids=["during the stream", "after the stream"])
def test_the_request_that_follows_a_stream_is_served(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "REUSE_SECONDS", LONG)

    async def exchange() -> tuple[bytes, bytes]:
        stopping = Stopping()
        async with stopping.connection() as (reader, writer):
            if early:
                writer.write(REQUEST)
                await writer.drain()
            stopping.go.set()
            stream = await reader.readuntil(END)
            if not early:
                writer.write(REQUEST)
            return stream, await reader.read()

    stream, following = asyncio.run(exchange())
    assert stream.endswith(b"two\r\n" + END)
    assert is_last(following), following


def test_without_a_request_the_connection_is_closed() -> None:
    async def exchange() -> bytes:
        stopping = Stopping()
        async with stopping.connection() as (reader, _):
            stopping.go.set()
            await reader.readuntil(END)
            return await reader.read()

    assert asyncio.run(exchange()) == b""
