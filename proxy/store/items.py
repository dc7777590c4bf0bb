"""Item memory: output items of answers, stored for the tenant that received them.

Clients of the Responses API may repeat an item as a reference to its id. With the item, the proxy can count and
summarize such a conversation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import structlog
from cachetools import LRUCache

from proxy.store.background import Place, Waiting, WriteBehind
from proxy.store.interface import Store, StoreFailed

log = structlog.get_logger(__name__)

KIND = "item"

CACHED_BYTES = 64_000_000
"""Maximum bytes of items in each process's memory. The least recently used ones are read from the store again."""

LARGEST = 1_000_000
"""Bytes. Larger items, such as generated images, aren't remembered."""

LONGEST_ID = 200
"""Characters. Items with longer ids aren't remembered."""

PENDING_BYTES = 16_000_000
"""Maximum bytes of items that wait to be written."""

MOST_READ = 2_000
"""Ids per request to read from the store: the newest ones."""

SIZES = 50_000
"""Sizes of unknown items in each process's memory, and ids whose items aren't in the store."""

DIGITS = 15
"""The most digits of the time that begins a stored item."""

_OVERHEAD = 300
"""Bytes of memory per item in addition to its content."""

FORGOTTEN = b""
"""In place of the items of an id that several had."""

_Key = tuple[str, str]


class _Cached:
    __slots__ = ("item", "write_again")

    def __init__(self, item: bytes, write_again: float) -> None:
        self.item = item
        self.write_again = write_again
        """The time from which to write the item again."""


class ItemMemory:
    """Remember items in memory, and write them to the store in the background. Requests only wait for reads."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        """Use ``clock`` for seconds."""
        self._store = store
        self._clock = clock
        self._cache: LRUCache[_Key, _Cached] = LRUCache(CACHED_BYTES, getsizeof=_size)
        self._sizes: LRUCache[_Key, int] = LRUCache(SIZES)
        self._missed: LRUCache[_Key, bool] = LRUCache(SIZES)
        self.writes: WriteBehind[_Cached] = WriteBehind(
            store, KIND, self._packed, PENDING_BYTES, failed=_report, ended=_ended
        )

    def keep(self, tenant: str, id: str, item: bytes, seconds: float) -> None:
        """Keep an item for at least ``seconds`` after its last use. Call this in the event loop.

        If another item had the same id, forget both, because the id doesn't say which one is meant.
        """
        if len(item) > LARGEST or len(id) > LONGEST_ID:
            return
        known = self._cache.get((tenant, id))
        if known is not None:
            if known.item in (item, FORGOTTEN):
                return
            item = FORGOTTEN
        self._cache[tenant, id] = cached = _Cached(item, 0.0)
        self._write(tenant, {id: cached}, seconds)

    async def recall(self, tenant: str, ids: Sequence[str], seconds: float) -> dict[str, bytes]:
        """Return the known items with these ids. Read those that aren't in memory from the store at once.

        Items that a store keeps are written again after half of their lifetime, ``seconds``.
        """
        found = {id: cached for id in ids if (cached := self._known((tenant, id))) is not None}
        missing = [id for id in dict.fromkeys(ids) if id not in found and len(id) <= LONGEST_ID]
        if missing:
            found |= await self._read(tenant, missing[-MOST_READ:], seconds)
        now = self._clock()
        old = {id: cached for id, cached in found.items() if cached.write_again <= now}
        if old:
            self._write(tenant, old, seconds)
        return {id: cached.item for id, cached in found.items() if cached.item != FORGOTTEN}

    def may_come(self, tenant: str, ids: Sequence[str]) -> bool:
        """Return whether one of these ids wasn't missed before, so that its item may be on its way to the store."""
        return any((tenant, id) not in self._missed for id in ids)

    def missed(self, tenant: str, ids: Sequence[str]) -> None:
        """Remember that the store has no items with these ids."""
        for id in ids:
            if len(id) <= LONGEST_ID:
                self._missed[tenant, id] = True

    def sizes(self, tenant: str, ids: Sequence[str]) -> dict[str, int]:
        """Return the sizes, in tokens, of unknown items, as far as upstreams have reported them."""
        return {id: size for id in ids if (size := self._sizes.get((tenant, id))) is not None}

    def note_size(self, tenant: str, ids: Sequence[str], tokens: int) -> None:
        """Remember the size that several unknown items have together, in equal shares. It has no content."""
        for id in ids:
            if len(id) <= LONGEST_ID:
                self._sizes[tenant, id] = tokens // len(ids)

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        """Forget the items of forgotten tenants, and return those tenants. One pending write may continue."""
        tenants = self.writes.forget(forgotten)
        for cache in (self._cache, self._sizes, self._missed):
            gone = [key for key in list(cache) if forgotten(key[0])]
            tenants |= {tenant for tenant, _ in gone}
            for key in gone:
                cache.pop(key, None)
        return tenants

    async def aclose(self) -> None:
        """Finish pending writes, and drop those that take too long. The store stays open."""
        if left := await self.writes.aclose():
            log.warning("items.given_up", items=left)

    def _known(self, place: Place) -> _Cached | None:
        """Return an item in memory. The cache may have dropped one that waits to be written."""
        return self._cache.get(place) or self.writes.get(place)

    async def _read(self, tenant: str, ids: Sequence[str], seconds: float) -> dict[str, _Cached]:
        try:
            stored = await self._store.get_many(tenant, KIND, ids)
        except StoreFailed as failure:
            log.warning("items.read_failed", reason=str(failure), items=len(ids))
            return {}
        found: dict[str, _Cached] = {}
        for id, value in stored.items():
            written, separator, item = value.partition(b"\n")
            if separator and written.isdigit() and len(written) <= DIGITS:
                self._cache[tenant, id] = found[id] = _Cached(item, int(written) + seconds / 2)
        return found

    def _write(self, tenant: str, items: Mapping[str, _Cached], seconds: float) -> None:
        again = self._clock() + seconds / 2
        skipped = 0
        for id, cached in items.items():
            if self.writes.put((tenant, id), cached, _size(cached), seconds):
                cached.write_again = again
            else:
                skipped += 1
        if skipped:
            log.warning("items.skipped", items=skipped, waiting_bytes=self.writes.bytes)

    def _packed(self, items: Sequence[_Cached]) -> list[bytes]:
        # The time of writing says when to write the item again.
        return [b"%d\n%b" % (self._clock(), cached.item) for cached in items]


def _report(items: int, reason: str) -> None:
    log.warning("items.write_failed", items=items, reason=reason)


def _ended(place: Place, waiting: Waiting[_Cached], written: bool) -> None:
    if not written:
        waiting.value.write_again = 0.0  # its next use tries again


def _size(cached: _Cached) -> int:
    return len(cached.item) + _OVERHEAD
