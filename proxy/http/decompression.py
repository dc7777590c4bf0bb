"""Decompress request bodies and upstream responses in time and memory proportional to their size.

Every decoder here takes input in slices and yields output in bounded pieces, so a caller can stop, yield to other work,
or charge memory between two pieces. The number of gzip members or zstd frames is limited because an empty one costs
time and produces no output.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from itertools import chain

import brotli
import zstandard

from proxy.errors import BodyTooLarge, UnsupportedEncoding

SLICE = 16_384  # Bytes of compressed input that a decoder takes at once. It copies the rest for each piece.
PIECE = 65_536  # Bytes of output after which a decoder yields. A zstd piece can have up to 8 MiB.
MEMBERS = 100  # Gzip members, deflate streams, or zstd frames that one body can have. One is usual.
RATIO = 25  # How many times its compressed size a body may become. JSON conversations become 3 to 10 times their size.
RATIO_FLOOR = 16_000_000  # Bytes that any body may become. A conversation that repeats itself compresses well.

OVER = "The request body is over this proxy's limit of {limit} bytes. Send less, or have server.body_limit raised."
OVER_RATIO = "The request body decompresses to more than {ratio} times its size. Send it uncompressed."

_ZSTD_SLICE = 256  # a zstd block of at least 4 bytes becomes at most 128 KiB, so a slice becomes at most 8 MiB


class Undecodable(ValueError):
    """The data isn't valid in its encoding, is incomplete, or has more than ``MEMBERS`` members."""


_ERRORS = (zlib.error, brotli.error, zstandard.ZstdError, Undecodable)


class _Decoder(ABC):
    _count = 0

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Return whether the data so far is complete."""

    @abstractmethod
    def feed(self, data: bytes) -> Iterator[bytes]:
        """Decompress the next slice. Exhaust the iterator before the next call, or drop the decoder."""

    def begin(self) -> None:
        """Count a member of the body."""
        self._count += 1
        if self._count > MEMBERS:
            raise Undecodable(f"more than {MEMBERS} members")


class _Zlib(_Decoder):
    def __init__(self, window_bits: int) -> None:
        self._bits = window_bits
        self._member: zlib._Decompress | None = None

    @property
    def finished(self) -> bool:
        return self._member is None

    def feed(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self._member is None:
                self.begin()
                # HTTP's deflate has zlib's header, which some servers leave out.
                self._member = zlib.decompressobj(self._bits or (15 if data[0] & 15 == 8 else -15))
            member = self._member
            yield member.decompress(data, PIECE)
            data = member.unused_data if member.eof else member.unconsumed_tail
            if member.eof:
                self._member = None


class _Brotli(_Decoder):
    def __init__(self) -> None:
        self._decoder = brotli.Decompressor()
        self._fed = False

    @property
    def finished(self) -> bool:
        return not self._fed or self._decoder.is_finished()

    def feed(self, data: bytes) -> Iterator[bytes]:
        decoder = self._decoder
        self._fed = True
        yield decoder.process(data, output_buffer_limit=PIECE)
        while not decoder.is_finished() and (piece := decoder.process(b"", output_buffer_limit=PIECE)):
            yield piece


class _Zstandard(_Decoder):
    def __init__(self, window_log: int) -> None:
        # A frame's window is allocated before any output appears, so its size is limited.
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=1 << window_log)
        self._frame: zstandard.ZstdDecompressionObj | None = None

    @property
    def finished(self) -> bool:
        return self._frame is None

    def feed(self, data: bytes) -> Iterator[bytes]:
        start = 0
        while start < len(data):
            if self._frame is None:
                self.begin()
                self._frame = self._decompressor.decompressobj()
            frame = self._frame
            piece = data[start : start + _ZSTD_SLICE]
            yield frame.decompress(piece)
            start += len(piece)
            if frame.eof:
                start -= len(frame.unused_data)
                self._frame = None


_DECODERS: dict[str, Callable[[], _Decoder]] = {
    "gzip": lambda: _Zlib(31),
    "x-gzip": lambda: _Zlib(31),
    "deflate": lambda: _Zlib(0),
    "br": _Brotli,
    "zstd": lambda: _Zstandard(27),
}


class Unpacking:
    """Decompress data as it arrives, up to about ``most`` bytes; ``beginning`` has the output so far."""

    def __init__(self, encoding: str, most: int) -> None:
        names = [name for part in encoding.split(",") if (name := part.strip().lower()) not in ("", "identity")]
        known = len(names) <= 2 and _DECODERS.keys() >= set(names)
        self._decoders = [_DECODERS[name]() for name in reversed(names)] if known else []
        self._most = self._left = most * len(names)
        self.beginning = bytearray()

    @property
    def ended(self) -> bool:
        """Return whether decompression is over: there is too much output, or the data or encoding is invalid."""
        return not self._decoders

    def feed(self, data: bytes) -> None:
        if not self._decoders:
            return
        pieces = _slices(data)
        for decoder in self._decoders:
            pieces = self._within(decoder, pieces)
        try:
            for piece in pieces:
                self.beginning += piece
        except _ERRORS:
            self._decoders = []

    def take(self) -> bytes:
        """Remove and return the output so far. Then the limit applies to the output that follows."""
        taken = bytes(self.beginning)
        self.beginning.clear()
        self._left = self._most
        return taken

    def _within(self, decoder: _Decoder, pieces: Iterator[bytes]) -> Iterator[bytes]:
        for data in chain.from_iterable(map(_slices, pieces)):
            for piece in decoder.feed(data):
                yield piece
                self._left -= len(piece)
                if self._left < 0:
                    raise Undecodable("too long")


def unpacked(body: bytes, encoding: str, limit: int) -> Iterator[bytes]:
    """Decompress a body piece by piece. ``limit`` is in bytes and applies to the output of each encoding.

    Pieces may be empty. Raises ``UnsupportedEncoding`` for an unknown encoding, for more than two, and for
    invalid data, and ``BodyTooLarge`` when the output exceeds the limit or ``RATIO``.
    """
    names = [name.strip().lower() for name in encoding.split(",")]
    if len(names) > 2:
        raise UnsupportedEncoding("The body is compressed more than twice. Send it compressed once.")
    allowed = max(RATIO_FLOOR, RATIO * len(body))
    pieces: Iterator[bytes] = _slices(body)
    for name in reversed(names):
        if name in ("identity", ""):
            continue
        if name not in _DECODERS:
            known = ", ".join(_DECODERS)
            raise UnsupportedEncoding(f"Content-Encoding {name[:40]!r} is not known here. Use one of {known}, or none.")
        pieces = _bounded(_through(name, pieces), limit, allowed)
    return pieces


def unpack(body: bytes, encoding: str, limit: int) -> bytes:
    """Decompress a whole body. Raises the same errors as ``unpacked``."""
    return b"".join(unpacked(body, encoding, limit))


def _slices(data: bytes) -> Iterator[bytes]:
    return (data[start : start + SLICE] for start in range(0, len(data), SLICE))


def _through(name: str, pieces: Iterator[bytes]) -> Iterator[bytes]:
    decoder = _DECODERS[name]()
    try:
        for data in chain.from_iterable(map(_slices, pieces)):
            yield from decoder.feed(data)
        if not decoder.finished:
            raise Undecodable("incomplete")
    except _ERRORS as error:
        raise UnsupportedEncoding(f"The body is not valid {name}. Send it as its Content-Encoding says.") from error


def _bounded(pieces: Iterator[bytes], limit: int, allowed: int) -> Iterator[bytes]:
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > limit:
            raise BodyTooLarge(OVER.format(limit=limit))
        if size > allowed:
            raise BodyTooLarge(OVER_RATIO.format(ratio=RATIO))
        yield piece
