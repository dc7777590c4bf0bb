"""Take a request in: read its body within limits, notice that its client left, and refuse it if it is in a loop."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from time import perf_counter

from starlette.types import Message, Receive, Scope, Send

from proxy.errors import BodyTooLarge, BodyTooSlow, ErrorShape, Limit, LoopDetected, ProxyError
from proxy.http.decompression import OVER, unpacked
from proxy.http.headers import VIA, encoded

STEP = 2_000_000  # bytes that a body is decompressed to in one step, about 10 ms of work in a thread
INLINE_STEP = 65_536  # bytes that a small body is decompressed to on the event loop, less than 1 ms of work
EMPTY_PIECE = 4_096  # bytes that a piece of decompressed output counts for besides its own

BODY_SECONDS = 30.0
BODY_RATE = 10_000
"""The seconds that a body has to arrive, and the bytes for which it gets one more second.

A client that doesn't send its body holds a place in the concurrency limit.
"""

SLOW = "The request body came too slowly, or stopped coming. Send it again."

SMALL = 65_536  # a body of at most this many bytes doesn't queue behind large ones that wait for memory


class MemoryLease(ABC):
    """The memory that is charged to one request. ``size`` is in bytes. See ``access.admission``."""

    size = 0

    @abstractmethod
    def grown(self, amount: int) -> bool:
        """Take this many more bytes if they're free. Return whether they were taken."""

    @abstractmethod
    async def wait(self, amount: int) -> None:
        """Wait for this many more bytes. Raises ``Overloaded``."""

    @abstractmethod
    def shrink(self, size: int) -> None:
        """Keep only this many bytes."""

    async def more(self, amount: int) -> None:
        """Take this many bytes more; wait if they aren't free. Raises ``Overloaded``."""
        if not self.grown(amount):
            await self.wait(amount)


class ClientLeft(Exception):
    """The client closed its connection."""


def header(scope: Scope, name: bytes) -> str | None:
    """Return the first header with a name (lower case), or ``None``."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return None


def is_handshake(scope: Scope) -> bool:
    """Return whether a GET request is a WebSocket handshake. A relay in between may have dropped ``Upgrade``."""
    wanted = header(scope, b"upgrade")
    return (wanted is not None and "websocket" in wanted.lower()) or header(scope, b"sec-websocket-key") is not None


_FAILURES = (500, 502, 504)  # the statuses of errors that happen to a request, rather than reject it


@dataclass(slots=True, eq=False)
class Sent:
    """A ``send`` that records how much of the response it has sent."""

    _send: Send
    begun: bool = False
    complete: bool = False
    status: int = 0  # 0 before the response begins
    error: str | None = None  # the code of the proxy's error in the response
    refused: bool = False  # the proxy rejected the request
    limit: Limit | None = None  # the team's limit that rejected the request
    retry_after: int = 0
    first_byte: float = 0.0  # when the response began, by `perf_counter`
    size: int = 0  # bytes of the body

    async def __call__(self, message: Message) -> None:
        """Send a message. ``complete`` is true once the server has taken the last one."""
        self.begun = True
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.first_byte = perf_counter()
            await self._send(message)
            return
        await self._send(message)
        self.size += len(message.get("body", b""))
        if not message.get("more_body", False):
            self.complete = True


def note_error(send: Send, error: ProxyError) -> None:
    """Remember an error of the proxy as the end of a response."""
    if isinstance(send, Sent):
        # Not the exception: its traceback refers to the request's body.
        send.error, send.refused = error.code, error.status not in _FAILURES
        send.limit, send.retry_after = error.limit, error.retry_after or 0


def note_complete(send: Send) -> None:
    """Remember that the client has the whole response, although the upstream hasn't ended it."""
    if isinstance(send, Sent):
        send.complete = True


async def read_body(scope: Scope, receive: Receive, limit: int, held: MemoryLease) -> bytes:
    """Return the whole body, decompressed. Charge its memory to ``held``.

    Raises ``BodyTooLarge`` before more than ``limit`` bytes are held, ``BodyTooSlow``, ``UnsupportedEncoding``,
    ``Overloaded``, and ``ClientLeft``.
    """
    length, encoding = header(scope, b"content-length"), header(scope, b"content-encoding")
    announced = int(length) if length is not None and length.isdigit() else 0
    if announced > limit:
        raise BodyTooLarge(OVER.format(limit=limit))
    # Charge the memory before reading. Otherwise, bodies could wait for each other's memory in a deadlock.
    if not held.grown(announced):
        await held.wait(announced)
    chunks: list[bytes] = []
    size = 0
    async with body_time() as came:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            chunk, more = message.get("body", b""), message.get("more_body", False)
            size += len(chunk)
            if more or size > held.size:  # otherwise, nothing is waited for
                came(size)
            if size > limit:
                raise BodyTooLarge(OVER.format(limit=limit))
            if size > held.size and not held.grown(size - held.size):
                await held.wait(size - held.size)
            chunks.append(chunk)
            if not more:
                break
    body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    if encoding is None:
        return body
    return await _unpacked(receive, body, encoding, limit, held)


@contextlib.asynccontextmanager
async def body_time() -> AsyncIterator[Callable[[int], None]]:
    """Within this block a body must keep coming. Call the value with the bytes so far. Raises ``BodyTooSlow``."""
    began = asyncio.get_running_loop().time()
    limit = asyncio.timeout_at(began + BODY_SECONDS)
    try:
        async with limit:
            yield lambda size: limit.reschedule(began + BODY_SECONDS + size / BODY_RATE)
    except TimeoutError:
        if not limit.expired():
            raise
        raise BodyTooSlow(SLOW) from None


async def _unpacked(receive: Receive, body: bytes, encoding: str, limit: int, held: MemoryLease) -> bytes:
    """Decompress a body in steps. Memory is charged after each step, and the work ends when the client disconnects.

    Raises ``UnsupportedEncoding``, ``BodyTooLarge``, ``Overloaded``, and ``ClientLeft``.
    """
    pieces = unpacked(body, encoding, limit)
    found: list[bytes] = []
    size = 0
    with leaving(receive):
        # A small body takes less time than handing it to a thread.
        step, done = _step(pieces, INLINE_STEP) if len(body) <= SMALL else ([], False)
        while True:
            grown = sum(map(len, step))
            await held.more(grown)
            found += step
            size += grown
            if done:
                break
            step, done = await asyncio.to_thread(_step, pieces, STEP)
    held.shrink(size)
    return found[0] if len(found) == 1 else b"".join(found)


def _step(pieces: Iterator[bytes], size: int) -> tuple[list[bytes], bool]:
    """Return the next pieces, of about ``size`` bytes together, and whether those are the last ones."""
    step: list[bytes] = []
    for piece in pieces:
        if piece:
            step.append(piece)
        # A piece without output takes time as well.
        size -= len(piece) + EMPTY_PIECE
        if size <= 0:
            return step, False
    return step, True


class leaving:
    """Within this block, which begins once the body has been read, cancel the work when the client leaves.

    Raises ``ClientLeft`` then. Servers also report a disconnect once the response is complete; that one doesn't cancel
    anything, because the client has the whole response. ``sent`` says so; a block that doesn't send the response goes
    without it.
    """

    def __init__(self, receive: Receive, sent: Sent | None = None) -> None:
        self._receive = receive
        self._sent = sent
        self._left = False

    def __enter__(self) -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        if task is None:
            raise RuntimeError("no task is running")
        self._task = task
        self._watcher = loop.create_task(self._watch())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._watcher.cancel()
        # The task's exception refers to this block. A reference cycle would stay until the next garbage collection.
        del self._watcher
        if self._left and isinstance(error, asyncio.CancelledError) and self._task.uncancel() == 0:
            raise ClientLeft from None

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if self._sent is None or not self._sent.complete:
            self._left = True
            self._task.cancel()


LINGERING_SECONDS = 30.0
LINGERING_SILENCE = 5.0
"""Seconds, in total and without data, to read from a client that is still sending after its error response.

If the proxy closed the connection at once, the client would get a reset instead of the response.
"""


async def answer_json(send: Send, body: bytes, extra: Iterable[tuple[str, str]] = ()) -> None:
    """Answer with JSON and further headers."""
    headers = [("content-type", "application/json"), ("content-length", str(len(body))), *extra]
    await send({"type": "http.response.start", "status": 200, "headers": encoded(headers)})
    await send({"type": "http.response.body", "body": body})


async def answer_error(
    send: Send,
    error: ProxyError,
    extra: Iterable[tuple[str, str]] = (),
    *,
    receive: Receive | None = None,
    shape: ErrorShape = "openai",
) -> None:
    """Answer with an error of the proxy. With ``receive``, read and discard the rest of a body that is too large."""
    note_error(send, error)
    body = error.body(shape)
    headers = [("content-type", "application/json"), ("content-length", str(len(body))), *extra, *error.retry_headers]
    unread = isinstance(error, BodyTooLarge) and receive is not None
    if unread:
        headers.append(("connection", "close"))
    await send({"type": "http.response.start", "status": error.status, "headers": encoded(headers)})
    await send({"type": "http.response.body", "body": body, "more_body": unread})
    if unread and receive is not None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGERING_SECONDS):
                message = await asyncio.wait_for(receive(), LINGERING_SILENCE)
                while message["type"] == "http.request" and message.get("more_body", False):
                    message = await asyncio.wait_for(receive(), LINGERING_SILENCE)
        await send({"type": "http.response.body", "body": b""})


MOST_HOPS = 5  # instances of this proxy that one request may pass


def next_via(scope: Scope, instance: str) -> str:
    """Return the value of the header ``x-compaction-via`` for the next hop. Raises ``LoopDetected``."""
    before = header(scope, VIA.encode())
    if before is None:
        return instance
    hops = [hop.strip() for hop in before.split(",") if hop.strip()]
    if instance in hops or len(hops) >= MOST_HOPS:
        raise LoopDetected(
            "This request has been through this proxy before: an upstream's base_url leads back to it. "
            "Point base_url at the provider."
        )
    return ",".join([*hops, instance])
