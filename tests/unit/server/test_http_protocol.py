"""Test the requests that a connection reads, and the one that it serves after its server was told to stop."""

import asyncio
import contextlib
import hashlib
import random
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st
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


class Fed(asyncio.Transport):
    """A transport without a network."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.reading = asyncio.Event()
        self.reading.set()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def write(self, data: Any) -> None:
        self.written += data

    def pause_reading(self) -> None:
        self.reading.clear()

    def resume_reading(self) -> None:
        self.reading.set()

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        raise AssertionError("the connection was closed")


FORMS = ("plain", "zeros", "chunked", "upgrade", "early")
"""Requests with a length, with zeros before it, in chunks, with ``Upgrade``, and ones answered before their body."""


def posted(body: bytes, form: str) -> bytes:
    """Return a request with a body."""
    head = f"POST /{form} HTTP/1.1\r\nhost: localhost\r\n"
    if form == "chunked":
        middle = len(body) // 2
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:middle], body[middle:]) if part)
        return f"{head}transfer-encoding: chunked\r\n\r\n".encode() + chunks + END
    if form == "upgrade":
        head += "connection: upgrade\r\nupgrade: h2c\r\n"
    length = f"{'0' * 6_000 * (form == 'zeros')}{len(body)}"
    return f"{head}content-length: {length}\r\n\r\n".encode() + body


async def digests(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with a digest of the body."""
    found, more = hashlib.sha256(), scope["path"] != "/early"
    while more:
        message = await receive()
        found.update(message["body"])
        more = message["more_body"]
    await PlainTextResponse(found.hexdigest())(scope, receive, send)


def connected(app: Any) -> tuple[BoundedProtocol, Fed, ServerState]:
    """Return a connection to an application."""
    config = uvicorn.Config(app, interface="asgi3", ws="none", lifespan="off", log_config=None)
    config.load()
    transport, state = Fed(), ServerState()
    protocol = BoundedProtocol(config, state, {})
    protocol.connection_made(transport)
    return protocol, transport, state


async def answered(pieces: Sequence[bytes]) -> list[str]:
    """Return the bodies of the responses to requests that arrive in pieces."""
    protocol, transport, state = connected(digests)
    async with asyncio.timeout(LONG):
        for piece in pieces:
            await transport.reading.wait()
            protocol.data_received(piece)
            await asyncio.sleep(0)
        while state.tasks:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0)
    await asyncio.sleep(0)
    protocol.connection_lost(ConnectionResetError())
    return re.findall(r"[0-9a-f]{64}", transport.written.decode())


sizes = st.sampled_from((0, 1, 9_999, 10_000, 65_536, 70_000, 300_000)) | st.integers(0, 20_000)


@settings(max_examples=2 * settings().max_examples)
@given(
    st.lists(st.tuples(sizes, st.sampled_from(FORMS)), min_size=1, max_size=5),
    st.lists(st.floats(0, 1), max_size=12),
)
def test_bodies_arrive_whole_however_they_are_cut(requests: list[tuple[int, str]], cuts: list[float]) -> None:
    bodies = [random.Random(number).randbytes(size) for number, (size, _) in enumerate(requests)]
    forms = [form for _, form in requests]
    sent = b"".join(map(posted, bodies, forms))
    places = sorted(round(cut * len(sent)) for cut in cuts)
    pieces = [sent[start:end] for start, end in zip([0, *places], [*places, len(sent)], strict=True)]
    read = [b"" if form == "early" else body for body, form in zip(bodies, forms, strict=True)]
    assert asyncio.run(answered([piece for piece in pieces if piece])) == [
        hashlib.sha256(body).hexdigest() for body in read
    ]


@pytest.mark.parametrize("form", ["plain", "chunked"])
def test_a_body_that_the_application_does_not_read_stays_outside(form: str) -> None:
    piece, sent = 20_000, posted(bytes(1_000_000), form)

    async def fed() -> int:
        go = asyncio.Event()

        async def slow(scope: Scope, receive: Receive, send: Send) -> None:
            await go.wait()
            await digests(scope, receive, send)

        protocol, transport, state = connected(slow)
        place = 0
        while transport.reading.is_set():
            protocol.data_received(sent[place : place + piece])
            place += piece
            await asyncio.sleep(0)
        taken = place
        go.set()
        async with asyncio.timeout(LONG):
            while place < len(sent):
                await transport.reading.wait()
                protocol.data_received(sent[place : place + piece])
                place += piece
            while state.tasks:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0)
        assert hashlib.sha256(bytes(1_000_000)).hexdigest() in transport.written.decode()
        protocol.connection_lost(ConnectionResetError())
        return taken

    assert asyncio.run(fed()) <= 65_536 + 2 * piece
