"""The load: requests over kept connections, with as little between the clock and the socket as can be."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from bench.servers import Server

_HEAD = (
    "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer sk-bench\r\n"
    "content-type: application/json\r\naccept: */*\r\nuser-agent: bench\r\ncontent-length: {length}\r\n\r\n"
)
_PING = b"GET /livez HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_VERDICT = re.compile(rb"\r\nx-compaction(-summary)?: *([a-z]+)", re.IGNORECASE)
_LAST_CHUNK = b"0\r\n\r\n"


class Broken(Exception):
    """The response isn't the expected one, so a measurement would be meaningless."""


def request(body: bytes) -> bytes:
    """A whole request, as the wire has it."""
    return _HEAD.format(length=len(body)).encode() + body


def whole(answer: bytes | bytearray) -> bool:
    """Whether this is a complete answer. Raises ``Broken`` for a status other than 200."""
    end = answer.find(b"\r\n\r\n")
    if end < 0:
        return False
    if not answer.startswith(b"HTTP/1.1 200"):
        raise Broken(f"an answer begins {bytes(answer[:300])!r}")
    length = _LENGTH.search(answer, 0, end + 2)
    if length is None:
        return answer.endswith(_LAST_CHUNK)
    return len(answer) >= end + 4 + int(length[1])


def verdicts(answer: bytes) -> tuple[str, str]:
    """What the proxy says it did: ``x-compaction`` and ``x-compaction-summary``, empty where absent."""
    found = {kind: value.decode() for kind, value in _VERDICT.findall(answer)}
    return found.get(b"", ""), found.get(b"-summary", "")


class Caller:
    """One kept connection; requests go one after another."""

    def __init__(self, server: Server) -> None:
        self._socket: socket.socket = server.connected()

    def ask(self, sent: bytes) -> bytes:
        """Send a request and read its whole answer."""
        try:
            self._socket.sendall(sent)
        except OSError as error:
            raise Broken(f"the server took no more of a request ({error})") from error
        received = bytearray()
        while not received or not whole(received):
            data = self._socket.recv(262_144)
            if not data:
                raise Broken(f"the server closed the connection after {bytes(received[:300])!r}")
            received += data
        return bytes(received)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


@dataclass(frozen=True, slots=True)
class Load:
    """What one run of requests took, in seconds: each request for the client, and the server's CPU per request."""

    latencies: list[float]
    cpu: float


def one_by_one(server: Server, caller: Caller, sent: bytes, times: int) -> Load:
    """So many requests over one connection."""
    latencies = []
    clock = time.perf_counter
    before = server.cpu
    for _ in range(times):
        start = clock()
        caller.ask(sent)
        latencies.append(clock() - start)
    return Load(latencies, (server.cpu - before) / times)


async def side_by_side(server: Server, sent: bytes, times: int, at_once: int) -> Load:
    """So many requests over ``at_once`` connections, each sending its next one when it has its answer."""
    left = iter(range(times))
    latencies: list[float] = []
    loop = asyncio.get_running_loop()
    callers = [
        (await loop.create_connection(lambda: _Asking(sent, left, latencies), "127.0.0.1", server.port))[1]
        for _ in range(at_once)
    ]
    before = server.cpu
    for caller in callers:
        caller.begin()
    await asyncio.gather(*(caller.done for caller in callers))
    cpu = (server.cpu - before) / times
    for caller in callers:
        caller.close()
    return Load(latencies, cpu)


class _Asking(asyncio.Protocol):
    """A connection that goes on asking while ``left`` has something."""

    def __init__(self, sent: bytes, left: Iterator[int], latencies: list[float]) -> None:
        self._sent = sent
        self._left = left
        self._latencies = latencies
        self._received = bytearray()
        self._start = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def begin(self) -> None:
        """Send the next request, if there is one."""
        if next(self._left, None) is None:
            self.done.set_result(None)
            return
        self._start = time.perf_counter()
        self._transport.write(self._sent)

    def data_received(self, data: bytes) -> None:
        self._received += data
        try:
            if not whole(self._received):
                return
        except Broken as error:
            self.done.set_exception(error)
            return
        self._latencies.append(time.perf_counter() - self._start)
        self._received.clear()
        self.begin()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(Broken("the server closed a connection"))

    def close(self) -> None:
        self._transport.close()


async def pings(server: Server, every: float, until: asyncio.Future[None]) -> list[float]:
    """Latencies in seconds of ``GET /livez``, one every so many seconds until ``until`` is done.

    Each is counted from the moment it was due, so that an answer that comes late also shows in those that had to wait.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    clock = time.perf_counter
    latencies = []
    due = clock()
    while not until.done():
        due += every
        if (wait := due - clock()) > 0:
            await asyncio.sleep(wait)
        writer.write(_PING)
        head = await reader.readuntil(b"\r\n\r\n")
        length = _LENGTH.search(head)
        await reader.readexactly(int(length[1]) if length else 0)
        latencies.append(clock() - due)
    writer.close()
    return latencies
