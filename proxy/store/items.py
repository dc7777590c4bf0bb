"""Item memory: output items of answers, stored for the tenant that received them.

Clients of the Responses API may repeat an item as a reference to its id. With the item, the proxy can count and
summarize such a conversation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import structlog
from cachetools import LRUCache

from proxy.store.forgetting import drop
from proxy.store.interface import Store, StoreFailed
from proxy.store.tenant_cache import CacheCapacity, Codec, Place, TenantCache, TenantMemory, Waiting

log = structlog.get_logger(__name__)

KIND = "item"

LARGEST = 1_000_000  # Bytes. Larger items, such as generated images, aren't remembered.
LONGEST_ID = 200  # Characters. Items with longer ids aren't remembered.
PENDING_BYTES = 16_000_000  # maximum bytes of items that wait to be written
MOST_READ = 2_000  # ids per request to read from the store: the newest ones
SIZES = 20_000  # sizes of unknown items in each process's memory, and ids whose items aren't in the store
DIGITS = 15  # the most digits of the time that begins a stored item
_OVERHEAD = 300  # bytes of memory per item in addition to its content
FORGOTTEN = b""  # in place of the items of an id that several had

NEVER = float("-inf")


class Item(NamedTuple):
    """An item, and when it was written to the store, in seconds since 1970, or ``NEVER``."""

    raw: bytes
    written: float


class ItemMemory(TenantCache[Item]):
    """Remember items in memory, and write them to the store in the background. Requests only wait for reads."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time, most: int = CacheCapacity().items) -> None:
        """Use ``clock`` for seconds. ``most`` is the bytes of items in memory. Others are read from the store again."""
        self._clock = clock
        self._sizes: LRUCache[Place, int] = LRUCache(SIZES)
        self._missed: LRUCache[Place, bool] = LRUCache(SIZES)
        codec = Codec(_encoded, _decoded, damaged=(ValueError,))
        super().__init__(store, KIND, codec, TenantMemory(most, self._size), PENDING_BYTES)

    def keep(self, tenant: str, id: str, item: bytes, seconds: float) -> None:
        """Keep an item for at least ``seconds`` after its last use. Call this in the event loop.

        If another item had the same id, forget both, because the id doesn't say which one is meant.
        """
        if len(item) > LARGEST or len(id) > LONGEST_ID:
            return
        before = self._memory.get((tenant, id))
        if before is not None:
            if before.raw in (item, FORGOTTEN):
                return
            item = FORGOTTEN
        self._write(tenant, {id: item}, seconds)

    async def find(self, tenant: str, ids: Sequence[str], seconds: float) -> dict[str, bytes]:
        """Return the known items with these ids. Read those that aren't in memory from the store at once.

        Items that a store keeps are written again after half of their lifetime, ``seconds``.
        """
        items = {id: item for id in ids if (item := self.get(tenant, id)) is not None}
        missing = [id for id in dict.fromkeys(ids) if id not in items and len(id) <= LONGEST_ID]
        if missing:
            items |= await self._stored(tenant, missing[-MOST_READ:])
        due = self._clock() - seconds / 2
        old = {id: item.raw for id, item in items.items() if item.written <= due}
        if old:
            self._write(tenant, old, seconds)
        return {id: item.raw for id, item in items.items() if item.raw != FORGOTTEN}

    def may_come(self, tenant: str, ids: Sequence[str]) -> bool:
        """Return whether one of these ids wasn't missed before, so that its item may be on its way to the store."""
        return any((tenant, id) not in self._missed for id in ids)

    def missed(self, tenant: str, ids: Sequence[str]) -> None:
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
        return super().forget(forgotten) | drop(self._sizes, forgotten) | drop(self._missed, forgotten)

    async def _stored(self, tenant: str, ids: Sequence[str]) -> dict[str, Item]:
        try:
            items = await self.read_many(tenant, [(tenant, id) for id in ids])
        except StoreFailed as failure:
            log.warning("items.read_failed", reason=str(failure), items=len(ids))
            return {}
        for place, item in items.items():
            self.remember(place, item)
        return {place[1]: item for place, item in items.items()}

    def _write(self, tenant: str, items: Mapping[str, bytes], seconds: float) -> None:
        now = self._clock()
        skipped = 0
        for id, raw in items.items():
            taken = self.save((tenant, id), Item(raw, now), seconds)
            self.remember((tenant, id), Item(raw, now if taken else NEVER))
            skipped += not taken
        if skipped:
            log.warning("items.skipped", items=skipped, waiting_bytes=self.writes.bytes)

    def _size(self, value: Item) -> int:
        return len(value.raw) + _OVERHEAD

    def _ended(self, place: Place, waiting: Waiting[Item], written: bool) -> None:
        if not written and place in self._memory:
            self.remember(place, Item(waiting.value.raw, NEVER))  # its next use tries again

    def _failed(self, entries: int, reason: str) -> None:
        log.warning("items.write_failed", items=entries, reason=reason)

    def _given_up(self, entries: int) -> None:
        log.warning("items.given_up", items=entries)

    def _unreadable(self, place: Place, error: Exception) -> None:
        """Ignore a damaged item: it's unknown, like one that was never stored."""


def _encoded(items: Sequence[Item]) -> list[bytes]:
    # The time of writing says when to write the item again.
    return [b"%d\n%b" % (item.written, item.raw) for item in items]


def _decoded(value: bytes) -> Item:
    written, separator, raw = value.partition(b"\n")
    if not separator or not written.isdigit() or len(written) > DIGITS:
        raise ValueError("no time")
    return Item(raw, int(written))
