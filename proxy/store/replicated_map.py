"""A map that the processes on one store share.

It reads entries at first use, refreshes them every ``REFRESH_SECONDS``, and writes them in the background. A request
waits only for the first read, for up to ``FIRST_READ_SECONDS``. If a read fails, the process keeps its own value and
tries again at the next refresh. A write merges the value into the stored one by compare-and-swap.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Self, TypeVar

import msgspec
import structlog

from proxy.store.interface import UNSTORED_TENANT, Store, StoreFailed
from proxy.store.tenant_cache import Codec, Place, TenantCache, Waiting

log = structlog.get_logger(__name__)

FIRST_READ_SECONDS = 0.05
REFRESH_SECONDS = 60.0

ATTEMPTS = 10
"""Attempts to merge a value into the stored one, while other processes write it. Later writes repeat a failed merge."""

SIZE = 500  # approximate bytes of a value in memory
PENDING_BYTES = 16_000_000  # Maximum bytes of values that wait to be written. The next refresh writes those over it.


class SharedValue(msgspec.Struct, frozen=True):
    """A value that processes share. A struct can't be abstract, so methods that every kind defines raise an error."""

    @property
    def until(self) -> float:
        """Return the expiration time, in seconds since 1970."""
        raise NotImplementedError

    def merged(self, other: Self) -> Self:
        """Return the newer parts of both values. Parts of this one win if they are equally new."""
        raise NotImplementedError


V = TypeVar("V", bound=SharedValue)


@dataclass(slots=True)
class _Slot(Generic[V]):
    """State of one value. Times are from ``time.monotonic``."""

    value: V | None = None
    read_next: float = 0.0
    wait_until: float | None = None
    reading: asyncio.Task[None] | None = None
    damaged: bool = False
    """True if the proxy has already logged that the stored entry is unreadable."""


class ReplicatedMap(TenantCache[V]):
    """Values of one kind by tenant, upstream, and model. The ``most`` recently used ones are in memory.

    Without a store they stay in the process. ``UNSTORED_TENANT`` covers unrelated callers, so the map keeps nothing for
    it.
    """

    def __init__(
        self, store: Store | None, kind: str, form: type[V], most: int, clock: Callable[[], float] = time.time
    ) -> None:
        """Decode stored entries as ``form``. ``clock`` returns seconds since 1970."""
        self._clock = clock
        self._most = most
        self._slots: OrderedDict[Place, _Slot[V]] = OrderedDict()
        codec: Codec[V] = Codec(_encoded, partial(msgspec.json.decode, type=form))
        super().__init__(store, kind, codec, self._slots, PENDING_BYTES)

    def prefetch(self, tenant: str, upstream: str, model: str, *, latest: bool = False) -> asyncio.Task[None] | None:
        """Start a read from the store if one is due. Return the task if it is a first read worth waiting for.

        With ``latest``, a read is due, and worth waiting for. Call this in the event loop.
        """
        if self._store is None or tenant == UNSTORED_TENANT:
            return None
        place = (tenant, upstream, model)
        slot = self._slot(place)
        now = time.monotonic()
        if slot.reading is None and (latest or now >= slot.read_next):
            slot.read_next = now + REFRESH_SECONDS
            slot.reading = asyncio.get_running_loop().create_task(self._refresh(place, slot))
            if slot.wait_until is None:
                slot.wait_until = now + FIRST_READ_SECONDS
        wanted = latest or (slot.wait_until is not None and now < slot.wait_until)
        return slot.reading if wanted else None

    def get(self, *place: str) -> V | None:
        """Return the value in this process, or ``None``. This isn't a use: ``prefetch`` is."""
        slot = self._slots.get(place)
        return None if slot is None else slot.value

    def set_local(self, tenant: str, upstream: str, model: str, value: V) -> None:
        """Replace a value in this process. The map stores it at the next refresh."""
        if tenant != UNSTORED_TENANT:
            self._slot((tenant, upstream, model)).value = value

    def put(self, tenant: str, upstream: str, model: str, value: V) -> None:
        """Replace a value, also in the store if there is one. With a store, call this in the event loop."""
        self.set_local(tenant, upstream, model, value)
        if tenant != UNSTORED_TENANT:
            self._share((tenant, upstream, model), value)

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        """Drop the values of forgotten tenants, and return those tenants. End their reads."""
        for place, slot in self._slots.items():
            if slot.reading is not None and forgotten(place[0]):
                slot.reading.cancel()
        return super().forget(forgotten)

    async def aclose(self) -> None:
        reads = [slot.reading for slot in self._slots.values() if slot.reading is not None]
        for read in reads:
            read.cancel()
        if reads:
            await asyncio.wait(reads)
        await super().aclose()

    def _slot(self, place: Place) -> _Slot[V]:
        slot = self._slots.get(place)
        if slot is None:
            if len(self._slots) >= self._most:
                self._slots.popitem(last=False)
            slot = self._slots[place] = _Slot()
        else:
            self._slots.move_to_end(place)
        return slot

    async def _refresh(self, place: Place, slot: _Slot[V]) -> None:
        try:
            stored = await self.read(*place)
            if slot.value is not None:
                ours = slot.value if stored is None else slot.value.merged(stored)
                if ours != stored and ours.until > self._clock():
                    self._share(place, ours)
                slot.value = ours
            else:
                slot.value = stored
        except StoreFailed as error:
            log.warning("shared.not_read", kind=self._kind, error=str(error))
        finally:
            slot.reading = None

    def _share(self, place: Place, value: V) -> None:
        self.save(place, value, value.until - self._clock())

    async def _store_batch(self, batch: Sequence[tuple[Place, Waiting[V]]]) -> None:
        """Merge values into the stored ones. Raises ``StoreFailed``."""
        for place, waiting in batch:
            for _ in range(ATTEMPTS):
                if await self._merge(place, waiting.value):
                    break

    async def _merge(self, place: Place, value: V) -> bool:
        """Merge a value into the stored one. Return false if another process changed that one meanwhile."""
        if self._store is None:
            return True
        entry = place[0], self._kind, self._key(place)
        raw = await self._store.get(*entry)
        stored, error = (None, None) if raw is None else self._decode(raw)
        if error is not None:
            self._unreadable(place, error)
        if stored is not None:
            value = value.merged(stored)
        (new,), seconds = _encoded([value]), value.until - self._clock()
        if seconds <= 0:
            return True
        if raw is None:
            return await self._store.add(*entry, new, seconds) == new
        return await self._store.replace(*entry, raw, new, seconds)

    def _key(self, place: Place) -> str:
        return name_of(*place[1:])

    def _size(self, value: V) -> int:
        return SIZE

    def _unreadable(self, place: Place, error: Exception) -> None:
        """Log the first damaged entry of a place. The next write replaces it."""
        slot = self._slots.get(place)
        if slot is None or not slot.damaged:
            super()._unreadable(place, error)
        if slot is not None:
            slot.damaged = True


class ReplicatedFigures(Generic[V]):
    """Figures of models at upstreams, by tenant, that the processes on one store share."""

    def __init__(self, values: ReplicatedMap[V]) -> None:
        self._values = values

    def first_read(self, upstream: str, model: str, tenant: str) -> asyncio.Task[None] | None:
        """Start a read of stored figures if one is due (see ``ReplicatedMap.prefetch``)."""
        return self._values.prefetch(tenant, upstream, model)

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        """Drop the figures of forgotten tenants, and return those tenants."""
        return self._values.forget(forgotten)

    async def settled(self) -> None:
        """Wait until the write in progress has ended."""
        await self._values.settled()

    async def aclose(self) -> None:
        """Write the figures that wait to be written."""
        await self._values.aclose()


def _encoded(values: Sequence[SharedValue]) -> list[bytes]:
    return list(map(msgspec.json.encode, values))


def name_of(upstream: str, model: str) -> str:
    """Return the store key for a model at an upstream."""
    return hashlib.sha256(msgspec.json.encode([upstream, model])).hexdigest()
