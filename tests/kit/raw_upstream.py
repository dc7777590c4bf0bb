"""An upstream at the level of bytes: it records what arrives and answers what a script says, byte by byte."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import Protocol, Self

from tests.kit.waiting import until

Headers = list[tuple[str, str]]


class End(Enum):
    """How a script may end a connection."""

    CLOSE = "close"
    RESET = "reset"
    SILENCE = "silence"
    """Say nothing more until the other side leaves."""


Step = bytes | float | threading.Event | End
"""Bytes to send, seconds or an event to wait for (or until the other side leaves), or an end."""


@dataclass(slots=True)
class Arrived:
    """A request as it came. ``body`` is without its transfer encoding; ``left_at`` is when the other side closed."""

    method: str
    target: str
    headers: Headers
    head: bytes
    body: bytes
    at: float = field(default_factory=time.monotonic)
    left_at: float | None = None

    def header(self, name: str) -> str | None:
        """The first header of a name (lower case)."""
        return next((value for key, value in self.headers if key == name), None)


Script = Callable[[Arrived], Sequence[Step]]


class Stage(Protocol):
    """Answers by a script for as long as a block runs."""

    def __call__(self, script: Script) -> AbstractContextManager[RawUpstream]: ...


def answer(
    body: bytes = b"{}",
    status: str = "200 OK",
    headers: Sequence[tuple[str, str]] = (("Content-Type", "application/json"),),
) -> bytes:
    return head(status, [*headers, ("Content-Length", str(len(body)))]) + body


def head(status: str = "200 OK", headers: Sequence[tuple[str, str]] = ()) -> bytes:
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in headers), "", ""]
    return "\r\n".join(lines).encode("latin-1")


def stream_head(*headers: tuple[str, str]) -> bytes:
    return head("200 OK", [("Content-Type", "text/event-stream"), ("Transfer-Encoding", "chunked"), *headers])


def chunk(data: bytes) -> bytes:
    """One piece of a body in the chunked transfer encoding; an empty one ends it."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def streamed(parts: Sequence[bytes], pause: float = 0.0, headers: Sequence[tuple[str, str]] = ()) -> list[Step]:
    steps: list[Step] = [stream_head(*headers)]
    for part in parts:
        steps.append(chunk(part))
        if pause:
            steps.append(pause)
    return [*steps, chunk(b"")]


class RawUpstream:
    """Serves on loopback, from a thread, for as long as a block runs. ``script`` decides on the answers."""

    def __init__(
        self, script: Script | None = None, *, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1"
    ) -> None:
        self._host = host
        self.script: Script = script or (lambda _: [answer()])
        self.arrived: list[Arrived] = []
        self.connections = 0
        self.closed = 0
        """Connections that a script ended, counted after the system has closed the socket."""
        self.url = ""
        self._tls = tls
        self._writers: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="raw-upstream", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(5)
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.url = f"http://{host}:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    @property
    def last(self) -> Arrived:
        return self.arrived[-1]

    def wait_left(self, index: int = -1, seconds: float = 15.0) -> float | None:
        """When the other side of a request left; ``None`` if it did not within the time."""
        until(lambda: len(self.arrived) > max(index, 0) and self.arrived[index].left_at is not None, seconds)
        return self.arrived[index].left_at if len(self.arrived) > max(index, 0) else None

    def wait_arrived(self, count: int, seconds: float = 15.0) -> bool:
        return until(lambda: len(self.arrived) >= count, seconds)

    def wait_closed(self, seconds: float = 15.0) -> bool:
        """Block until scripts have ended all connections so far. Return whether they did within the time."""
        return until(lambda: self.closed >= self.connections, seconds)

    async def _start(self) -> asyncio.Server:
        return await asyncio.start_server(self._connected, self._host, 0, limit=1 << 20, ssl=self._tls)

    async def _stop(self) -> None:
        # asyncio leaks a connection that it has accepted when the server closes before the connection is set up.
        for listening in self._server.sockets:
            asyncio.get_running_loop().remove_reader(listening.fileno())
        accepting = asyncio.all_tasks() - self._serving - {asyncio.current_task()}
        if accepting:
            await asyncio.wait(accepting, timeout=1)
        self._server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()
        # The loop closes the sockets of aborted connections in its next round.
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A task that is cancelled before it begins closes nothing. So the writers are kept here.
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        self._writers = {writer for writer in self._writers if not writer.transport.is_closing()} | {writer}

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await self._one(reader, writer):
                pass
            writer.close()
            await writer.wait_closed()
            self.closed += 1
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            return
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer; whether another one may follow."""
        raw = await reader.readuntil(b"\r\n\r\n")
        lines = raw.decode("latin-1").split("\r\n")
        method, target, _ = lines[0].split(" ")
        headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines[1:-2])]
        arrived = Arrived(method, target, headers, raw, b"")
        try:
            arrived.body = await _body(reader, arrived)
        except asyncio.IncompleteReadError:
            arrived.left_at = time.monotonic()
            self.arrived.append(arrived)
            raise
        self.arrived.append(arrived)
        for step in self.script(arrived):
            if isinstance(step, bytes):
                writer.write(step)
                await writer.drain()
            elif (isinstance(step, float) and not await _left(reader, step)) or (
                isinstance(step, threading.Event) and not await _left_before(reader, step)
            ):
                continue
            elif step is End.CLOSE:
                return False
            elif step is End.RESET:
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                return False
            else:
                await _left(reader, 60.0)
                arrived.left_at = time.monotonic()
                return False
        return True


async def _body(reader: asyncio.StreamReader, arrived: Arrived) -> bytes:
    if arrived.header("transfer-encoding") == "chunked":
        parts = []
        while size := int(await reader.readuntil(b"\r\n"), 16):
            parts.append(await reader.readexactly(size))
            await reader.readexactly(2)
        await reader.readexactly(2)
        return b"".join(parts)
    return await reader.readexactly(int(arrived.header("content-length") or 0))


async def _left_before(reader: asyncio.StreamReader, event: threading.Event) -> bool:
    """Wait until an event is set; whether the other side left before, at once when it does."""
    while not event.is_set():
        if await _left(reader, 0.005):
            return True
    return False


async def _left(reader: asyncio.StreamReader, seconds: float) -> bool:
    """Wait; whether the other side left meanwhile, at once when it does."""
    try:
        return await asyncio.wait_for(reader.read(1), seconds) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True
