"""The beginning of a compressed answer, unpacked while it comes."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Protocol

import brotli
import zstandard

_STEP = 65_536
_ZSTD_STEP = 256
"""A block takes four bytes at least and gives 128 KiB at most, so a step gives 8 MiB."""


class _Unpacker(Protocol):
    def feed(self, data: bytes, most: int) -> bytes:
        """What the next bytes unpack to, some ``most`` bytes of it. Raises ``zlib.error`` and its likes."""
        ...


class _Zlib:
    def __init__(self, window_bits: int) -> None:
        self._decoder = zlib.decompressobj(window_bits)

    def feed(self, data: bytes, most: int) -> bytes:
        return self._decoder.decompress(data, most)


class _Brotli:
    def __init__(self) -> None:
        self._decoder = brotli.Decompressor()

    def feed(self, data: bytes, most: int) -> bytes:
        found: bytes = self._decoder.process(data, output_buffer_limit=_STEP)
        while len(found) < most and not self._decoder.is_finished():
            piece = self._decoder.process(b"", output_buffer_limit=_STEP)
            if not piece:
                break
            found += piece
        return found


class _Zstandard:
    def __init__(self) -> None:
        # The window a frame may ask for is bounded: its memory is taken before any output is seen.
        self._decoder = zstandard.ZstdDecompressor(max_window_size=1 << 23).decompressobj()

    def feed(self, data: bytes, most: int) -> bytes:
        found = b""
        for start in range(0, len(data), _ZSTD_STEP):
            if len(found) >= most or self._decoder.eof:
                break
            found += self._decoder.decompress(data[start : start + _ZSTD_STEP])
        return found


_UNPACKERS: dict[str, Callable[[], _Unpacker]] = {
    "gzip": lambda: _Zlib(31),
    "x-gzip": lambda: _Zlib(31),
    "deflate": lambda: _Zlib(15),
    "br": _Brotli,
    "zstd": _Zstandard,
}


class Unpacking:
    """Unpacks what comes, as far as it can be and up to some ``most`` bytes; ``beginning`` is what there is so far."""

    def __init__(self, encoding: str, most: int) -> None:
        made = _UNPACKERS.get(encoding.strip().lower())
        self._unpacker: _Unpacker | None = made() if made else None
        self._most = most
        self.beginning = bytearray()

    @property
    def ended(self) -> bool:
        """Whether no more of it will be unpacked: it is too much, not valid, or of an encoding not known here."""
        return self._unpacker is None

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the answer."""
        if self._unpacker is None:
            return
        try:
            self.beginning += self._unpacker.feed(data, self._most - len(self.beginning) + 1)
        except (zlib.error, brotli.error, zstandard.ZstdError):
            self._unpacker = None
        if len(self.beginning) > self._most:
            self._unpacker = None
