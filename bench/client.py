"""Send requests over persistent connections, with minimal work between the clock and the socket."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import cast

import uvloop

from bench.servers import Server

_HEAD = (
    "POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer sk-bench\r\n"
    "content-type: application/json\r\naccept: */*\r\nuser-agent: bench\r\ncontent-length: {length}\r\n\r\n"
)
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_VERDICT = re.compile(rb"\r\nx-compaction(-summary)?: *([a-z]+)", re.IGNORECASE)
_LAST_CHUNK = b"0\r\n\r\n"


class Broken(Exception):
    """The response isn't the expected one, so a measurement would be meaningless."""


def request(body: bytes, path: str = "/v1/chat/completions") -> bytes:
    """Return the bytes of an HTTP request with this body."""
    return _HEAD.format(path=path, length=len(body)).encode() + body


def whole(answer: bytes | bytearray) -> bool:
    """Return whether a response is complete. Raises ``Broken`` for a status other than 200."""
    end = answer.find(b"\r\n\r\n")
    if end < 0:
        return False
    if not answer.startswith(b"HTTP/1.1 200"):
        raise Broken(f"unexpected response: {bytes(answer[:300])!r}")
    length = _LENGTH.search(answer, 0, end + 2)
    if length is None:
        return answer.endswith(_LAST_CHUNK)
    return len(answer) >= end + 4 + int(length[1])


def check(answer: bytes, expected: tuple[str, str], name: str) -> None:
    """Raise ``Broken`` if ``x-compaction`` and ``x-compaction-summary``, "" if omitted, aren't those of a case."""
    found = {kind: value.decode() for kind, value in _VERDICT.findall(answer)}
    if (reported := (found.get(b"", ""), found.get(b"-summary", ""))) != expected:
        raise Broken(f"{name}: the proxy reported {reported} instead of {expected}")


@dataclass(frozen=True, slots=True)
class Load:
    """The seconds of each request at the client, the server's CPU seconds per request, and a last response."""

    latencies: list[float]
    cpu: float
    last: bytes


def ask(server: Server, requests: Iterator[bytes], times: int, at_once: int = 1) -> Load:
    """Send the next ``times`` requests over ``at_once`` connections. Each sends the next one after its response."""
    return uvloop.run(_ask(server, requests, times, at_once))


async def _ask(server: Server, requests: Iterator[bytes], times: int, at_once: int) -> Load:
    left = islice(requests, times)
    latencies: list[float] = []
    callers = [await connection(server, left, latencies) for _ in range(at_once)]
    before = server.cpu
    for caller in callers:
        caller.begin()
    await asyncio.gather(*(caller.done for caller in callers))
    cpu = (server.cpu - before) / times
    for caller in callers:
        caller.close()
    return Load(latencies, cpu, callers[0].last)


class Asking(asyncio.Protocol):
    """A connection that sends one request after the other until there are none left.

    ``done`` ends then. ``last`` is the latest complete response.
    """

    def __init__(self, requests: Iterator[bytes], latencies: list[float]) -> None:
        self._requests = requests
        self._latencies = latencies
        self._received = bytearray()
        self.last = b""
        self._start = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class doesn't inherit from it.

    def begin(self) -> None:
        """Send the next request if one is left."""
        sent = next(self._requests, None)
        if sent is None:
            self.done.set_result(None)
            return
        self._start = time.perf_counter()
        self._transport.write(sent)

    def data_received(self, data: bytes) -> None:
        self._received += data
        try:
            if not whole(self._received):
                return
        except Broken as error:
            self.done.set_exception(error)
            return
        self._latencies.append(time.perf_counter() - self._start)
        self.last = bytes(self._received)
        self._received.clear()
        self.begin()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(Broken("the server closed a connection"))

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()


async def connection(server: Server, requests: Iterator[bytes], latencies: list[float]) -> Asking:
    """Connect to a server. The requests are sent after ``begin``, and their seconds are added to ``latencies``."""
    loop = asyncio.get_running_loop()
    return (await loop.create_connection(lambda: Asking(requests, latencies), "127.0.0.1", server.port))[1]
