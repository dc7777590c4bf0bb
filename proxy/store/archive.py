"""The archive: complete messages that compaction removes, stored for the tenant that sent them."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
import structlog
import zstandard
from cachetools import LRUCache

from proxy.store import Store
from proxy.store.background import Place, Waiting, WriteBehind
from proxy.telemetry.metrics import ARCHIVED

log = structlog.get_logger(__name__)

KIND = "archive.2"
"""Entries compressed by Zstandard, whose library compresses many of them in one call."""

FIRST_KIND = "archive"
"""Entries of version 0.1, compressed by zlib. The proxy only reads them."""

PENDING_BYTES = 64_000_000
"""Maximum bytes of pending entries in memory. A single pending entry may be larger."""

REMEMBERED = 20_000
"""Entries that each process remembers as written."""

_OVERHEAD = 50
"""Bytes of memory per message in addition to its text."""


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
        """Return the approximate bytes of memory, including the overhead per message."""
        return sum(map(len, self.messages)) + _OVERHEAD * len(self.messages)


@dataclass(frozen=True, slots=True)
class Found:
    """Messages in conversation order. ``complete`` is false if the oldest ones are missing from the store."""

    messages: list[bytes]
    complete: bool


class _Entry(msgspec.Struct, frozen=True):
    """The stored form of an entry."""

    messages: list[bytes]
    previous: str | None


class Archive:
    """Write removed messages in the background, many in one call, and skip recently written entries."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        """Use ``clock`` for seconds."""
        self._store = store
        self._clock = clock
        self._write_again: LRUCache[tuple[str, str], float] = LRUCache(REMEMBERED)
        """The time from which to write an entry again."""
        self.writes: WriteBehind[Removed] = WriteBehind(
            store, KIND, _packed, PENDING_BYTES, failed=_report, ended=self._ended
        )

    def keep(self, tenant: str, removed: Sequence[Removed], seconds: float) -> None:
        """Keep entries for at least ``seconds``, in the background. Call this in the event loop.

        A repeated call rewrites an entry after half of its lifetime. If too many entries wait, the proxy logs that and
        keeps an entry at the next call for it.
        """
        now = self._clock()
        over = 0
        for entry in removed:
            key = (tenant, entry.id)
            if now < self._write_again.get(key, 0.0):
                continue
            if self.writes.get(key) is not None:
                continue
            size = entry.size
            if not self.writes.takes(size):
                over += 1
                continue
            # Copy, because a slice of a request's body would keep the whole body in memory.
            copied = replace(entry, messages=tuple(map(bytes, entry.messages)))
            self.writes.put(key, copied, size, seconds)
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
            entry = self.writes.get((tenant, link)) or await self._stored(tenant, link)
            if entry is None:
                break
            parts.append(entry.messages)
            link = entry.previous
        if not parts:
            return None
        return Found([message for part in reversed(parts) for message in part], complete=link is None)

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        """Drop the entries of forgotten tenants, and return those tenants. One pending write may continue."""
        tenants = {tenant for tenant, _ in self._write_again if forgotten(tenant)}
        for key in [key for key in self._write_again if key[0] in tenants]:
            del self._write_again[key]
        return tenants | self.writes.forget(forgotten)

    async def settled(self) -> None:
        """Wait until the write in progress has ended."""
        await self.writes.settled()

    async def aclose(self) -> None:
        """Finish pending writes, and drop those that take too long. The store stays open."""
        if left := await self.writes.aclose():
            ARCHIVED.labels(outcome="dropped").inc(left)
            log.warning("archive.given_up", entries=left)

    def _ended(self, place: Place, waiting: Waiting[Removed], written: bool) -> None:
        ARCHIVED.labels(outcome="written" if written else "dropped").inc()
        if written:
            self._write_again[place] = self._clock() + waiting.seconds / 2

    async def _stored(self, tenant: str, id: str) -> _Entry | None:
        value = await self._store.get(tenant, KIND, id)
        if value is None and (value := await self._store.get(tenant, FIRST_KIND, id)) is None:
            return None
        try:
            return await asyncio.to_thread(_unpacked, value)
        except _UNREADABLE as failure:
            # Damaged, or written by another version: treat it as missing, so that it can be written again.
            log.warning("archive.entry_unreadable", reason=str(failure))
            self._write_again.pop((tenant, id), None)
            return None


def _report(entries: int, reason: str) -> None:
    ARCHIVED.labels(outcome="failed").inc(entries)
    log.warning("archive.write_failed", entries=entries, reason=reason)


def _packed(entries: Sequence[Removed]) -> list[bytes]:
    values: list[bytes | bytearray | memoryview] = [
        msgspec.msgpack.encode(_Entry(list(entry.messages), entry.previous)) for entry in entries
    ]
    # One call, because each one waits for the interpreter lock.
    compressed = zstandard.ZstdCompressor(level=1, write_checksum=True).multi_compress_to_buffer(values)
    return [compressed[place].tobytes() for place in range(len(compressed))]


def _unpacked(value: bytes) -> _Entry:
    if value.startswith(zstandard.FRAME_HEADER):
        plain = zstandard.ZstdDecompressor().decompress(value)
    else:
        plain = zlib.decompress(value)
    return msgspec.msgpack.decode(plain, type=_Entry)
