"""A store with timeouts and circuit breakers."""

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
"""Timeout of a read, in seconds. A request may wait for it."""

WRITE_SECONDS = 5.0
"""Timeout of a write, in seconds. No request waits for one."""

FAILURES = 3
"""Consecutive failures after which the proxy stops reads, or writes."""

FIRST_PAUSE = 5.0
"""Seconds of the first pause. The pause doubles each time the single attempt after it fails."""

LONGEST_PAUSE = 60.0
"""Upper bound of a pause, in seconds."""

CLOSING_SECONDS = 5.0
"""Timeout of closing the store, in seconds."""


class Guarded:
    """A store with a timeout and a circuit breaker for reads, and others for writes.

    Reads and writes fail independently: a full disk, for example, is still readable.
    """

    def __init__(self, store: ListingStore, clock: Callable[[], float] = time.monotonic) -> None:
        """Use ``clock`` for monotonic seconds."""
        self._store = store
        self._reads = _Gate("read", READ_SECONDS, clock)
        self._writes = _Gate("write", WRITE_SECONDS, clock)

    @property
    def left_alone(self) -> tuple[str, ...]:
        """Return the operations with an open breaker: ``read``, ``write``, both, or none."""
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
        """See ``ListingStore``. Has no timeout, because no request waits for it."""
        return await self._store.entries(kind)

    async def forget(self, tenant: str) -> Mapping[str, int]:
        """See ``ListingStore``. Has no timeout."""
        return await self._store.forget(tenant)

    async def remove(self, tenant: str) -> Mapping[str, int]:
        """See ``ListingStore``. Has no timeout."""
        return await self._store.remove(tenant)

    async def forgotten(self) -> Mapping[str, float]:
        """See ``ListingStore``. Has no timeout."""
        return await self._store.forgotten()

    async def unknown(self) -> int:
        """See ``ListingStore``. Has no timeout."""
        return await self._store.unknown()

    async def upkeep(self) -> None:
        """See ``ListingStore``. Has no timeout."""
        await self._store.upkeep()

    async def aclose(self) -> None:
        """Close the store. Log a warning if it doesn't close within ``CLOSING_SECONDS``."""
        try:
            async with asyncio.timeout(CLOSING_SECONDS):
                await self._store.aclose()
        except TimeoutError:
            log.warning("store.not_closed", seconds=CLOSING_SECONDS)


class _Gate:
    """The breaker for reads or writes."""

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
        """Return whether the breaker is open."""
        return self._until is not None

    async def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of the work. Raises ``StoreFailed``."""
        probe = self._until is not None
        if self._until is not None and (self._probing or self._clock() < self._until):
            raise StoreFailed("the store failed repeatedly; the proxy retries after a pause")
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
            return  # work that began before the pause adds no information
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
