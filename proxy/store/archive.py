"""The archive: complete messages that compaction removes, stored for the tenant that sent them."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
import structlog
from cachetools import LRUCache

from proxy.store import Store, StoreFailed
from proxy.store.background import BackgroundWrites
from proxy.telemetry.metrics import ARCHIVED

log = structlog.get_logger(__name__)

KIND = "archive"

PENDING_BYTES = 64_000_000
"""Maximum bytes of pending entries in memory. A single pending entry may be larger."""

REMEMBERED = 20_000
"""Entries that each process remembers as written."""

_OVERHEAD = 50
"""Bytes of memory per message in addition to its text."""


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
    """Write removed messages in the background, one batch at a time, and skip recently written entries."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        """Use ``clock`` for seconds."""
        self._store = store
        self._clock = clock
        self._write_again: LRUCache[tuple[str, str], float] = LRUCache(REMEMBERED)
        """The time from which to write an entry again."""
        self._waiting: dict[tuple[str, str], Removed] = {}
        self._waiting_bytes = 0
        self.writes = BackgroundWrites()

    def keep(self, tenant: str, removed: Sequence[Removed], seconds: float) -> None:
        """Keep entries for at least ``seconds``, in the background. Call this in the event loop.

        A repeated call rewrites an entry after half of its lifetime. If an entry can't be kept now, the proxy logs that
        and tries again at the next call for it.
        """
        now = self._clock()
        batch: list[Removed] = []
        over = 0
        for entry in removed:
            key = (tenant, entry.id)
            if now < self._write_again.get(key, 0.0):
                continue
            if key not in self._waiting:
                size = entry.size
                if self._waiting_bytes and self._waiting_bytes + size > PENDING_BYTES:
                    over += 1
                    continue
                # Copy, because a slice of a request's body would keep the whole body in memory.
                self._waiting[key] = replace(entry, messages=tuple(map(bytes, entry.messages)))
                self._waiting_bytes += size
                batch.append(self._waiting[key])
        if over:
            ARCHIVED.labels(outcome="skipped").inc(over)
            log.warning("archive.skipped", entries=over, waiting_bytes=self._waiting_bytes)
        if batch:
            self.writes.start(self._write(tenant, batch, seconds))

    async def fetch(self, tenant: str, id: str) -> Found | None:
        """Return the messages of an entry and of all before it, oldest first.

        Return ``None`` if the tenant has no such entry. Raises ``StoreFailed``.
        """
        parts: list[Sequence[bytes]] = []
        seen: set[str] = set()
        link: str | None = id
        while link is not None and link not in seen:
            seen.add(link)
            entry = self._waiting.get((tenant, link)) or await self._stored(tenant, link)
            if entry is None:
                break
            parts.append(entry.messages)
            link = entry.previous
        if not parts:
            return None
        return Found([message for part in reversed(parts) for message in part], complete=link is None)

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        """Drop the entries of forgotten tenants, and return those tenants. One pending write may continue."""
        tenants = {tenant for tenant, _ in (*self._write_again, *self._waiting) if forgotten(tenant)}
        for key in [key for key in self._write_again if key[0] in tenants]:
            del self._write_again[key]
        for (tenant, _), entry in list(self._waiting.items()):
            if tenant in tenants:
                self._settled(tenant, entry)
        return tenants

    async def settled(self) -> None:
        """Wait until the write in progress has ended."""
        async with self.writes.turn:
            return

    async def aclose(self) -> None:
        """Finish pending writes, and drop those that take too long. The store stays open."""
        if await self.writes.drained():
            return
        log.warning("archive.given_up", entries=len(self._waiting))
        await self.writes.cancel()

    async def _write(self, tenant: str, batch: Sequence[Removed], seconds: float) -> None:
        left = list(reversed(batch))
        try:
            async with self.writes.turn:
                while left:
                    entry = left[-1]
                    if self._is_waiting(tenant, entry):
                        value = await asyncio.to_thread(_packed, entry)
                        began = self._clock()
                        await self._store.put(tenant, KIND, entry.id, value, seconds)
                        ARCHIVED.labels(outcome="written").inc()
                        if self._is_waiting(tenant, entry):
                            self._settled(tenant, entry)
                            self._write_again[tenant, entry.id] = began + seconds / 2
                    left.pop()
        except StoreFailed as failure:
            # Drop the rest of the batch: it would probably fail too, and delay reads from the store.
            log.warning("archive.write_failed", reason=str(failure), entries=len(left))
        finally:
            for entry in left:
                if self._is_waiting(tenant, entry):
                    self._settled(tenant, entry)
                ARCHIVED.labels(outcome="failed").inc()

    async def _stored(self, tenant: str, id: str) -> _Entry | None:
        value = await self._store.get(tenant, KIND, id)
        if value is None:
            return None
        try:
            return await asyncio.to_thread(_unpacked, value)
        except (zlib.error, msgspec.DecodeError, UnicodeDecodeError) as failure:
            # Damaged, or written by another version: treat it as missing, so that it can be written again.
            log.warning("archive.entry_unreadable", reason=str(failure))
            self._write_again.pop((tenant, id), None)
            return None

    def _is_waiting(self, tenant: str, entry: Removed) -> bool:
        """Return whether an entry is still to be written: its tenant wasn't forgotten since."""
        return self._waiting.get((tenant, entry.id)) is entry

    def _settled(self, tenant: str, entry: Removed) -> None:
        """Remove an entry from the pending ones."""
        del self._waiting[tenant, entry.id]
        self._waiting_bytes -= entry.size


def _packed(entry: Removed) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(_Entry(list(entry.messages), entry.previous)), 1)


def _unpacked(value: bytes) -> _Entry:
    return msgspec.msgpack.decode(zlib.decompress(value), type=_Entry)
