"""Taking a request in: its body within limits, and word of the client leaving."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Protocol

import brotli
import zstandard
from starlette.types import Receive, Scope, Send

from proxy.errors import BadBody, BodyTooLarge, ProxyError, UnsupportedEncoding
from proxy.headers import encoded

__all__ = ["ClientLeft", "answer_error", "header", "leaving", "read_body", "unpack"]

OVER = "The request body is over this proxy's limit of {limit} bytes. Send less, or have server.body_limit raised."


class ClientLeft(Exception):
    """The client closed its connection; there is nobody to answer."""


def header(scope: Scope, name: bytes) -> str | None:
    """The first header of a name (lower case), if there is one."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return None


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole body, decompressed.

    Raises ``BodyTooLarge`` before more than ``limit`` bytes are held, ``UnsupportedEncoding``, ``BadBody`` where fewer
    bytes came than were announced, and ``ClientLeft``.
    """
    announced = header(scope, b"content-length")
    if announced is not None and announced.isdigit() and int(announced) > limit:
        raise BodyTooLarge(OVER.format(limit=limit))
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise BodyTooLarge(OVER.format(limit=limit))
        chunks.append(chunk)
        if not message.get("more_body", False):
            break
    body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    encoding = header(scope, b"content-encoding")
    if encoding is None:
        return body
    # Decompression of megabytes takes a while.
    return await asyncio.to_thread(unpack, body, encoding, limit)


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
        reader = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(data, read_across_frames=True)
        while piece := reader.read(_STEP):
            yield piece


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


@asynccontextmanager
async def leaving(receive: Receive) -> AsyncIterator[None]:
    """Within this block, once the body has been read, the client's leaving ends the work at once (``ClientLeft``)."""
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("leaving() needs a task")
    left = False

    async def watch() -> None:
        nonlocal left
        while (await receive())["type"] != "http.disconnect":
            pass
        left = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if left and task.uncancel() == 0:
            raise ClientLeft from None
        raise
    finally:
        watcher.cancel()


async def answer_error(send: Send, error: ProxyError, extra: Iterable[tuple[str, str]] = ()) -> None:
    """Answer with an error of ours."""
    body = error.body()
    headers = [("content-type", "application/json"), ("content-length", str(len(body))), *extra]
    if isinstance(error, BodyTooLarge | BadBody):
        headers.append(("connection", "close"))  # what is left of the body is not read
    await send({"type": "http.response.start", "status": error.status, "headers": encoded(headers)})
    await send({"type": "http.response.body", "body": body})
