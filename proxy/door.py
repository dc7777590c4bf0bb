"""Taking a request in: its body within limits, and word of the client leaving."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import zlib
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Protocol

import brotli
import zstandard
from starlette.types import Receive, Scope, Send

from proxy.admission import Holding
from proxy.errors import BodyTooLarge, BodyTooSlow, ProxyError, UnsupportedEncoding
from proxy.headers import encoded
from proxy.overdue import Overdue, overdue

__all__ = ["ClientLeft", "answer_error", "arriving", "header", "leaving", "read_body", "unpack"]

OVER = "The request body is over this proxy's limit of {limit} bytes. Send less, or have server.body_limit raised."


BODY_SECONDS = 30.0
BODY_RATE = 10_000
"""A body has so many seconds to come, and one more for each so many bytes: whoever sends nothing holds a place."""

SLOW = "The request body came too slowly, or stopped coming. Send it again."


class ClientLeft(Exception):
    """The client closed its connection; there is nobody to answer."""


def header(scope: Scope, name: bytes) -> str | None:
    """The first header of a name (lower case), if there is one."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return None


async def read_body(scope: Scope, receive: Receive, limit: int, held: Holding) -> bytes:
    """The whole body, decompressed. ``held`` takes the memory for it.

    Raises ``BodyTooLarge`` before more than ``limit`` bytes are held, ``BodyTooSlow``, ``UnsupportedEncoding``,
    ``Overloaded``, and ``ClientLeft``.
    """
    length = header(scope, b"content-length")
    announced = int(length) if length is not None and length.isdigit() else 0
    if announced > limit:
        raise BodyTooLarge(OVER.format(limit=limit))
    # Taken before anything is read: bodies that wait for each other's memory would all wait in vain.
    if not held.grown(announced):
        await held.wait(announced)
    chunks: list[bytes] = []
    with arriving() as body_in_time:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            chunk = message.get("body", b"")
            size = body_in_time.came(len(chunk))
            if size > limit:
                raise BodyTooLarge(OVER.format(limit=limit))
            if size > held.size and not held.grown(size - held.size):
                await held.wait(size - held.size)
            chunks.append(chunk)
            if not message.get("more_body", False):
                break
    body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    encoding = header(scope, b"content-encoding")
    if encoding is None:
        return body
    # How large it becomes shows only in the end.
    if not held.grown(limit):
        await held.wait(limit)
    # Decompression of megabytes takes a while.
    body = await asyncio.to_thread(unpack, body, encoding, limit)
    held.shrink(len(body))
    return body


class arriving:
    """Within this block a body must keep coming. Raises ``BodyTooSlow``."""

    def __init__(self) -> None:
        self._size = 0
        late = overdue()
        self._began = late.now()
        self._limit = late.until(self._began + BODY_SECONDS)

    def __enter__(self) -> arriving:
        self._limit.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._limit.__exit__(kind, error, trace)
        except TimeoutError:
            raise BodyTooSlow(SLOW) from None

    def came(self, size: int) -> int:
        """So many bytes have come; how many all together."""
        self._size += size
        self._limit.when = self._began + BODY_SECONDS + self._size / BODY_RATE
        return self._size


def unpack(body: bytes, encoding: str, limit: int) -> bytes:
    """A body out of its content encoding, or encodings, ``limit`` bytes at most after each.

    Raises ``UnsupportedEncoding`` and ``BodyTooLarge``.
    """
    names = [name.strip().lower() for name in encoding.split(",")]
    if len(names) > 2:
        raise UnsupportedEncoding("The body is compressed more than twice. Send it compressed once.")
    for name in reversed(names):
        if name in ("identity", ""):
            continue
        if name not in _DECODERS:
            known = ", ".join(_DECODERS)
            raise UnsupportedEncoding(f"Content-Encoding {name[:40]!r} is not known here. Use one of {known}, or none.")
        try:
            body = _bounded(_DECODERS[name](), body, limit)
        except (zlib.error, gzip.BadGzipFile, EOFError, brotli.error, zstandard.ZstdError) as error:
            raise UnsupportedEncoding(f"The body is not valid {name}. Send it as its Content-Encoding says.") from error
    return body


class _Decoder(Protocol):
    def feed(self, data: bytes) -> Iterable[bytes]:
        """Pieces of bounded size; whoever takes them may stop at any time."""
        ...


_STEP = 65_536
_ZSTD_STEP = 256
"""A block takes four bytes at least and gives 128 KiB at most, so a step gives 8 MiB."""


class _Zlib:
    def __init__(self, window_bits: int) -> None:
        self._bits = window_bits

    def feed(self, data: bytes) -> Iterable[bytes]:
        while data:
            decoder = zlib.decompressobj(self._bits)
            while data and not decoder.eof:
                yield decoder.decompress(data, _STEP)
                data = decoder.unconsumed_tail
            if not decoder.eof:
                raise EOFError
            data = decoder.unused_data  # gzip files may be put one after another


class _Brotli:
    def feed(self, data: bytes) -> Iterable[bytes]:
        decoder = brotli.Decompressor()
        yield decoder.process(data, output_buffer_limit=_STEP)
        while not decoder.is_finished():
            piece = decoder.process(b"", output_buffer_limit=_STEP)
            if not piece and not decoder.is_finished():
                raise EOFError
            yield piece


class _Zstandard:
    def feed(self, data: bytes) -> Iterable[bytes]:
        # The window a frame may ask for is bounded: its memory is taken before any output is seen.
        decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 27)
        start = 0
        while start < len(data):
            frame = decompressor.decompressobj()
            while not frame.eof:
                piece = data[start : start + _ZSTD_STEP]
                if not piece:
                    raise EOFError
                start += len(piece)
                yield frame.decompress(piece)
            start -= len(frame.unused_data)


_DECODERS: dict[str, Callable[[], _Decoder]] = {
    "gzip": lambda: _Zlib(31),
    "x-gzip": lambda: _Zlib(31),
    "deflate": lambda: _Zlib(15),
    "br": _Brotli,
    "zstd": _Zstandard,
}


def _bounded(decoder: _Decoder, body: bytes, limit: int) -> bytes:
    pieces = []
    size = 0
    for piece in decoder.feed(body):
        size += len(piece)
        if size > limit:
            raise BodyTooLarge(OVER.format(limit=limit))
        pieces.append(piece)
    return b"".join(pieces)


class leaving:
    """Within this block, once the body has been read, the client's leaving ends the work (``ClientLeft``).

    At once, that is, where the work is ``overdue``: what is done by then needs nobody to watch. Gives the timer that
    tells so.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._watcher: asyncio.Task[None] | None = None
        self._left = False

    def __enter__(self) -> Overdue:
        self._overdue = overdue()
        self._task = self._overdue.task()
        self._overdue.add(self, self._begin)
        return self._overdue

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._overdue.discard(self)
        if self._watcher is not None:
            self._watcher.cancel()
            # How it ended knows this block, and so the request: what knew each other would stay until it is collected.
            self._watcher = None
        if self._left and isinstance(error, asyncio.CancelledError) and self._task.uncancel() == 0:
            raise ClientLeft from None

    def _begin(self) -> None:
        self._watcher = self._overdue.loop.create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._left = True
        self._task.cancel()


LINGERING_SECONDS = 30.0
LINGERING_SILENCE = 5.0
"""A client that is still sending is listened to for so long, or it would find its connection broken, and no answer."""


async def answer_error(
    send: Send, error: ProxyError, extra: Iterable[tuple[str, str]] = (), *, receive: Receive | None = None
) -> None:
    """Answer with an error of ours. With ``receive``, what is left of a body that is too large is thrown away."""
    body = error.body()
    headers = [("content-type", "application/json"), ("content-length", str(len(body))), *extra]
    if error.retry_after is not None:
        headers.append(("retry-after", str(error.retry_after)))
    unread = isinstance(error, BodyTooLarge) and receive is not None
    if unread:
        headers.append(("connection", "close"))
    await send({"type": "http.response.start", "status": error.status, "headers": encoded(headers)})
    await send({"type": "http.response.body", "body": body, "more_body": unread})
    if unread and receive is not None:
        await _linger(receive)
        await send({"type": "http.response.body", "body": b""})


async def _linger(receive: Receive) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGERING_SECONDS):
            more = True
            while more:
                message = await asyncio.wait_for(receive(), LINGERING_SILENCE)
                more = message["type"] == "http.request" and message.get("more_body", False)
