"""A store that nobody waits for too long: what is slow has failed, and what fails again and again is left alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import structlog

from proxy.store.interface import Entry, ListingStore, StoreFailed
from proxy.telemetry.metrics import STORE_BREAKER, STORE_FAILURES

log = structlog.get_logger(__name__)

T = TypeVar("T")

READ_SECONDS = 1.0
"""The most that a read may take; a request may wait for it."""

WRITE_SECONDS = 5.0
"""The most that a write may take; no request waits for one."""

FAILURES = 3
"""Failures in a row after which reads, or writes, are left alone."""

FIRST_PAUSE = 5.0
"""Seconds for which they are. The pause doubles whenever the one attempt after it fails too."""

LONGEST_PAUSE = 60.0
"""Seconds."""

CLOSING_SECONDS = 5.0
"""Seconds that closing may take."""


class Guarded:
    """A store with a bound in time and a breaker each for its reads and its writes.

    A full disk can still be read from, so the one says nothing of the other.
    """

    def __init__(self, store: ListingStore, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` gives seconds that never go back."""
        self._store = store
        self._reads = _Gate("read", READ_SECONDS, clock)
        self._writes = _Gate("write", WRITE_SECONDS, clock)

    @property
    def left_alone(self) -> tuple[str, ...]:
        """What the store is not asked for at the moment: ``read``, ``write``, both or nothing."""
        return tuple(gate.what for gate in (self._reads, self._writes) if gate.open)

    async def get(self, tenant: str, kind: str, key: str) -> bytes | None:
        """See ``Store``."""
        return await self._reads.run(lambda: self._store.get(tenant, kind, key))

    async def put(self, tenant: str, kind: str, key: str, value: bytes, seconds: float) -> None:
        """See ``Store``."""
        await self._writes.run(lambda: self._store.put(tenant, kind, key, value, seconds))

    async def add(self, tenant: str, kind: str, key: str, value: bytes, seconds: float) -> bytes:
        """See ``Store``."""
        return await self._writes.run(lambda: self._store.add(tenant, kind, key, value, seconds))

    async def discard(self, tenant: str, kind: str, key: str) -> None:
        """See ``Store``."""
        await self._writes.run(lambda: self._store.discard(tenant, kind, key))

    async def entries(self, kind: str) -> list[Entry]:
        """See ``ListingStore``. No request waits for it: it takes the time it takes."""
        return await self._store.entries(kind)

    async def forget(self, tenant: str) -> Mapping[str, int]:
        """See ``ListingStore``. Takes the time it takes."""
        return await self._store.forget(tenant)

    async def remove(self, tenant: str) -> Mapping[str, int]:
        """See ``ListingStore``. Takes the time it takes."""
        return await self._store.remove(tenant)

    async def forgotten(self) -> Mapping[str, float]:
        """See ``ListingStore``. Takes the time it takes."""
        return await self._store.forgotten()

    async def unknown(self) -> int:
        """See ``ListingStore``. Takes the time it takes."""
        return await self._store.unknown()

    async def upkeep(self) -> None:
        """See ``ListingStore``. Takes the time it takes."""
        await self._store.upkeep()

    async def aclose(self) -> None:
        """See ``Store``. A store that hangs is left as it is."""
        try:
            async with asyncio.timeout(CLOSING_SECONDS):
                await self._store.aclose()
        except TimeoutError:
            log.warning("store.not_closed", seconds=CLOSING_SECONDS)


class _Gate:
    """What goes to the store one way, and how it fared lately."""

    def __init__(self, what: str, seconds: float, clock: Callable[[], float]) -> None:
        self.what = what
        self._seconds = seconds
        self._clock = clock
        self._failures = 0
        self._pause = 0.0
        self._until: float | None = None
        self._probing = False

    @property
    def open(self) -> bool:
        """Whether nothing goes through."""
        return self._until is not None

    async def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """What the work gives. Raises ``StoreFailed``."""
        probe = self._until is not None
        if self._until is not None and (self._probing or self._clock() < self._until):
            raise StoreFailed("it failed again and again, and is left alone for a while")
        self._probing = probe
        try:
            async with asyncio.timeout(self._seconds):
                result = await work()
        except TimeoutError:
            self._failed(probe)
            raise StoreFailed(f"no answer within {self._seconds:g} s") from None
        except StoreFailed:
            self._failed(probe)
            raise
        finally:
            if probe:
                self._probing = False
        self._succeeded()
        return result

    def _failed(self, probe: bool) -> None:
        STORE_FAILURES.labels(what=self.what).inc()
        self._failures += 1
        if not probe and (self._until is not None or self._failures < FAILURES):
            return  # what began before the pause says nothing new
        self._pause = min(self._pause * 2 or FIRST_PAUSE, LONGEST_PAUSE)
        self._until = self._clock() + self._pause
        self._say("opened")

    def _succeeded(self) -> None:
        self._failures, self._pause = 0, 0.0
        if self._until is not None:
            self._until = None
            self._say("closed")

    def _say(self, change: str) -> None:
        STORE_BREAKER.labels(what=self.what, change=change).inc()
        log.warning(f"store.breaker_{change}", what=self.what, pause=self._pause)
