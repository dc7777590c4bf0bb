"""The archive: complete messages that compaction removes, stored for the tenant that sent them."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import structlog
import zstandard
from cachetools import LRUCache

from proxy.store import Store
from proxy.store.tenant_cache import Codec, Place, TenantCache, Waiting
from proxy.telemetry.metrics import ARCHIVED

log = structlog.get_logger(__name__)

KIND = "archive.2"  # entries compressed by Zstandard, whose library compresses many of them in one call
FIRST_KIND = "archive"  # Entries of version 0.1, compressed by zlib. The proxy only reads them.
PENDING_BYTES = 64_000_000  # Maximum bytes of pending entries in memory. A single pending entry may be larger.
REMEMBERED = 10_000  # entries that each process remembers as written
_OVERHEAD = 50  # bytes of memory per message in addition to its text


_UNREADABLE = (zlib.error, zstandard.ZstdError, MemoryError, msgspec.DecodeError, UnicodeDecodeError)
"""Errors of damaged entries. Their header may state any size."""


@dataclass(frozen=True, slots=True)
class Removed:
    """Messages that a compaction removed, as the client's JSON.

    ``id`` is derived from the content: 20 lowercase hexadecimal digits. ``previous`` is the id of the entry with the
    messages before these.
    """

    id: str
    messages: tuple[bytes, ...]
    previous: str | None = None

    @property
    def size(self) -> int:
        """Return the approximate bytes of memory."""
        return _size_of(self.messages)


@dataclass(frozen=True, slots=True)
class Found:
    """Messages in conversation order. ``complete`` is false if the oldest ones are missing from the store."""

    messages: list[bytes]
    complete: bool


def _size_of(messages: Sequence[bytes]) -> int:
    return sum(map(len, messages)) + _OVERHEAD * len(messages)


class _Entry(msgspec.Struct, frozen=True):
    """The stored form of an entry."""

    messages: list[bytes]
    previous: str | None

    @property
    def size(self) -> int:
        """Return the approximate bytes of memory."""
        return _size_of(self.messages)


class Archive(TenantCache[_Entry]):
    """Write removed messages in the background, and skip recently written entries. Memory has only their ids."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        """Use ``clock`` for seconds."""
        self._clock = clock
        self._write_again: LRUCache[Place, float] = LRUCache(REMEMBERED)
        """The time from which to write an entry again."""
        codec = Codec(_packed, _unpacked, damaged=_UNREADABLE, inline_bytes=0)
        super().__init__(store, KIND, codec, self._write_again, PENDING_BYTES)

    def keep(self, tenant: str, removed: Sequence[Removed], seconds: float) -> None:
        """Keep entries for at least ``seconds``, in the background. Call this in the event loop.

        A repeated call rewrites an entry after half of its lifetime. If too many entries wait, the proxy logs that and
        keeps an entry at the next call for it.
        """
        over = 0
        for entry in removed:
            place = tenant, entry.id
            if self._clock() < self._write_again.get(place, 0.0) or self.writes.get(place) is not None:
                continue
            if not self.writes.takes(entry.size):
                over += 1
                continue
            # Copy, because a slice of a request's body would keep the whole body in memory.
            self.save(place, _Entry(list(map(bytes, entry.messages)), entry.previous), seconds)
        if over:
            ARCHIVED.labels(outcome="skipped").inc(over)
            log.warning("archive.skipped", entries=over, waiting_bytes=self.writes.bytes)

    async def fetch(self, tenant: str, id: str) -> Found | None:
        """Return the messages of an entry and of all before it, oldest first.

        Return ``None`` if the tenant has no such entry. Raises ``StoreFailed``.
        """
        parts: list[Sequence[bytes]] = []
        seen: set[str] = set()
        link: str | None = id
        while link is not None and link not in seen:
            seen.add(link)
            entry = self.get(tenant, link) or await self.read(tenant, link)
            if entry is None:
                break
            parts.append(entry.messages)
            link = entry.previous
        if not parts:
            return None
        return Found([message for part in reversed(parts) for message in part], complete=link is None)

    def get(self, *place: str) -> _Entry | None:
        """Return an entry that waits to be written."""
        return self.writes.get(place)

    async def read(self, *place: str) -> _Entry | None:
        """Return an entry from the store, also one of the first format. Raises ``StoreFailed``."""
        found = await super().read(*place)
        return found or (await self.read_many(place[0], [place], FIRST_KIND)).get(place)

    def _size(self, value: _Entry) -> int:
        return value.size

    def _ended(self, place: Place, waiting: Waiting[_Entry], written: bool) -> None:
        ARCHIVED.labels(outcome="written" if written else "dropped").inc()
        if written:
            self._write_again[place] = self._clock() + waiting.seconds / 2

    def _failed(self, entries: int, reason: str) -> None:
        ARCHIVED.labels(outcome="failed").inc(entries)
        log.warning("archive.write_failed", entries=entries, reason=reason)

    def _given_up(self, entries: int) -> None:
        ARCHIVED.labels(outcome="dropped").inc(entries)
        log.warning("archive.given_up", entries=entries)

    def _unreadable(self, place: Place, error: Exception) -> None:
        # Damaged, or written by another version: treat it as missing, so that it can be written again.
        log.warning("archive.entry_unreadable", reason=str(error))
        self._write_again.pop(place, None)


def _packed(entries: Sequence[_Entry]) -> list[bytes]:
    values: list[bytes | bytearray | memoryview] = list(map(msgspec.msgpack.encode, entries))
    # One call, because each one waits for the interpreter lock.
    compressed = zstandard.ZstdCompressor(level=1, write_checksum=True).multi_compress_to_buffer(values)
    return [compressed[place].tobytes() for place in range(len(compressed))]


def _unpacked(value: bytes) -> _Entry:
    if value.startswith(zstandard.FRAME_HEADER):
        plain = zstandard.ZstdDecompressor().decompress(value)
    else:
        plain = zlib.decompress(value)
    return msgspec.msgpack.decode(plain, type=_Entry)
