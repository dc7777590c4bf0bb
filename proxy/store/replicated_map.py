"""A map that the processes on one store share.

It reads entries at first use, refreshes them every ``REFRESH_SECONDS``, and writes them in the background. A request
waits only for the first read, for up to ``FIRST_READ_SECONDS``. If a read or a write fails, the process keeps its own
value and tries again at the next refresh.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

import msgspec
import structlog
from cachetools import LRUCache

from proxy.store import Store, StoreFailed
from proxy.store.interface import UNSTORED_TENANT

log = structlog.get_logger(__name__)

FIRST_READ_SECONDS = 0.05
REFRESH_SECONDS = 60.0

ATTEMPTS = 10
"""Attempts to merge a value into the stored one, while other processes write it. Later writes repeat a failed merge."""

CLOSING_SECONDS = 5.0
"""Seconds to write pending values when the process ends."""


class Known(Protocol):
    """A shared value. ``until`` is its expiration time, in seconds since 1970."""

    @property
    def until(self) -> float: ...

    def merged(self, other: Self) -> Self:
        """Return the newer parts of both values. Parts of this one win if they are equally new."""
        ...


UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of msgspec for a damaged entry. Invalid UTF-8 in a string doesn't raise ``DecodeError``."""

V = TypeVar("V", bound=Known)
Key = tuple[str, str, str]


@dataclass(slots=True)
class _Slot(Generic[V]):
    """State of one key. Times are from ``time.monotonic``."""

    value: V | None = None
    read_next: float = 0.0
    wait_until: float | None = None
    reading: asyncio.Task[None] | None = None
    damaged: bool = False
    """True if the proxy has already logged that the stored entry is unreadable."""


class ReplicatedMap(Generic[V]):
    """Values of one kind by tenant, upstream, and model. The ``most`` recently used ones are in memory.

    Without a store they stay in the process. ``UNSTORED_TENANT`` covers unrelated callers, so the map keeps nothing for
    it.
    """

    def __init__(
        self, store: Store | None, kind: str, form: type[V], most: int, clock: Callable[[], float] = time.time
    ) -> None:
        """Decode stored entries as ``form``. ``clock`` returns seconds since 1970."""
        self._store = store
        self._kind = kind
        self._form = form
        self._clock = clock
        self._slots: LRUCache[Key, _Slot[V]] = LRUCache(most)
        self._unsaved: dict[Key, V] = {}
        self._writer: asyncio.Task[None] | None = None

    def prefetch(self, tenant: str, upstream: str, model: str, *, latest: bool = False) -> asyncio.Task[None] | None:
        """Start a read from the store if one is due. Return the task if it is a first read worth waiting for.

        With ``latest``, a read is due, and worth waiting for. Call this in the event loop.
        """
        if self._store is None or tenant == UNSTORED_TENANT:
            return None
        key = (tenant, upstream, model)
        slot = self._slot(key)
        now = time.monotonic()
        if slot.reading is None and (latest or now >= slot.read_next):
            slot.read_next = now + REFRESH_SECONDS
            slot.reading = asyncio.get_running_loop().create_task(self._read(self._store, key, slot))
            if slot.wait_until is None:
                slot.wait_until = now + FIRST_READ_SECONDS
        wanted = latest or (slot.wait_until is not None and now < slot.wait_until)
        return slot.reading if wanted else None

    def get(self, tenant: str, upstream: str, model: str) -> V | None:
        """Return the value in this process, or ``None``."""
        slot = self._slots.get((tenant, upstream, model))
        return None if slot is None else slot.value

    def set_local(self, tenant: str, upstream: str, model: str, value: V) -> None:
        """Replace a value in this process. The map stores it at the next refresh."""
        if tenant != UNSTORED_TENANT:
            self._slot((tenant, upstream, model)).value = value

    def put(self, tenant: str, upstream: str, model: str, value: V) -> None:
        """Replace a value, also in the store if there is one. With a store, call this in the event loop."""
        self.set_local(tenant, upstream, model, value)
        if tenant != UNSTORED_TENANT:
            self._save((tenant, upstream, model), value)

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        """Drop the values of forgotten tenants, and return those tenants."""
        tenants = {tenant for tenant, _, _ in (*self._slots, *self._unsaved) if forgotten(tenant)}
        for key in [key for key in self._slots if key[0] in tenants]:
            slot = self._slots.pop(key)
            if slot.reading is not None:
                slot.reading.cancel()
        for key in [key for key in self._unsaved if key[0] in tenants]:
            del self._unsaved[key]
        return tenants

    async def aclose(self) -> None:
        """Finish pending writes and cancel reads."""
        reads = [slot.reading for slot in self._slots.values() if slot.reading is not None]
        for read in reads:
            read.cancel()
        if reads:
            await asyncio.wait(reads)
        if self._writer is not None:
            done, _ = await asyncio.wait({self._writer}, timeout=CLOSING_SECONDS)
            if not done:
                self._writer.cancel()
                log.warning("shared.not_written", kind=self._kind, entries=len(self._unsaved))

    def _slot(self, key: Key) -> _Slot[V]:
        slot = self._slots.get(key)
        if slot is None:
            slot = self._slots[key] = _Slot()
        return slot

    async def _read(self, store: Store, key: Key, slot: _Slot[V]) -> None:
        try:
            stored = self._decoded(await self._raw(store, key), key)
            if slot.value is not None:
                ours = slot.value if stored is None else slot.value.merged(stored)
                if ours != stored and ours.until > self._clock():
                    self._save(key, ours)
                slot.value = ours
            else:
                slot.value = stored
        except StoreFailed as error:
            log.warning("shared.not_read", kind=self._kind, error=str(error))
        finally:
            slot.reading = None

    async def _raw(self, store: Store, key: Key) -> bytes | None:
        """Return the stored entry. Raises ``StoreFailed``."""
        tenant, upstream, model = key
        return await store.get(tenant, self._kind, name_of(upstream, model))

    def _decoded(self, raw: bytes | None, key: Key) -> V | None:
        """Return the value of an entry, ``None`` if there is none or it can't be read. The next write replaces it."""
        if raw is None:
            return None
        try:
            return msgspec.json.decode(raw, type=self._form)
        except UNREADABLE as error:  # written by another version, or damaged
            slot = self._slots.get(key)
            if slot is None or not slot.damaged:
                log.warning("shared.unreadable", kind=self._kind, error=type(error).__name__)
            if slot is not None:
                slot.damaged = True
            return None

    def _save(self, key: Key, value: V) -> None:
        if self._store is None:
            return
        self._unsaved[key] = value
        if self._writer is None:
            # The task writes the entries of many requests, so its log lines name none.
            self._writer = asyncio.get_running_loop().create_task(self._write(self._store), context=Context())

    async def _write(self, store: Store) -> None:
        try:
            while self._unsaved:
                key, value = self._unsaved.popitem()
                for _ in range(ATTEMPTS):
                    if await self._merge(store, key, value):
                        break
        except StoreFailed as error:
            self._unsaved.clear()
            log.warning("shared.not_written", kind=self._kind, error=str(error))
        finally:
            self._writer = None

    async def _merge(self, store: Store, key: Key, value: V) -> bool:
        """Merge a value into the stored one. Return false if another process changed that one meanwhile."""
        tenant, upstream, model = key
        name = name_of(upstream, model)
        raw = await self._raw(store, key)
        stored = self._decoded(raw, key)
        if stored is not None:
            value = value.merged(stored)
        new, seconds = msgspec.json.encode(value), value.until - self._clock()
        if seconds <= 0:
            return True
        if raw is None:
            return await store.add(tenant, self._kind, name, new, seconds) == new
        return await store.replace(tenant, self._kind, name, raw, new, seconds)


def name_of(upstream: str, model: str) -> str:
    """Return the store key for a model at an upstream."""
    return hashlib.sha256(msgspec.json.encode([upstream, model])).hexdigest()
