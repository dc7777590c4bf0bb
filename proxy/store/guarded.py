"""Circuit breakers, and a store with timeouts and breakers.

A circuit breaker stops calls that fail repeatedly, and tries again with one call after a pause.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar

import structlog
from cachetools import LRUCache

from proxy.store.interface import Entry, ManagedStore, Refused, Store, StoreFailed
from proxy.telemetry.metrics import STORE_BREAKER, STORE_FAILURES

FAILURES = 3  # consecutive failures that open a breaker
REMEMBERED = 10_000  # failing keys that are remembered, the most recently used ones

Change = Literal["opened", "closed"]


@dataclass(slots=True)
class _State:
    """The failures of one key. ``until`` is the end of the pause, or ``None`` while the breaker is closed."""

    failures: int = 0
    pause: float = 0.0
    until: float | None = None
    probing: bool = False


class CircuitBreaker:
    """Count the failures of calls by key.

    The first pause doubles each time the single call after it fails. All times are in seconds. ``is_failure`` decides
    which exceptions count; by default ``StoreFailed`` does. ``report`` gets each change with the key and the length of
    the pause.
    """

    def __init__(
        self,
        first_pause: float,
        longest_pause: float,
        *,
        report: Callable[[Change, Hashable, float], None],
        is_failure: Callable[[BaseException], bool] = lambda error: isinstance(error, StoreFailed),
        clock: Callable[[], float] = time.monotonic,
        remembered: int = REMEMBERED,
    ) -> None:
        self._first_pause = first_pause
        self._longest_pause = longest_pause
        self._is_failure = is_failure
        self._report = report
        self._clock = clock
        self._states: LRUCache[Hashable, _State] = LRUCache(remembered)

    def __len__(self) -> int:
        return len(self._states)

    def is_failing(self, key: Hashable) -> bool:
        return key in self._states

    def attempt(self, key: Hashable) -> AbstractContextManager[None] | None:
        """Return a context manager for one call, or ``None`` while it must not be made."""
        state = self._states.get(key)
        if state is None or state.until is None:
            return self._attempt(key, probe=False)
        if state.probing or self._clock() < state.until:
            return None
        state.probing = True
        return self._attempt(key, probe=True)

    @contextmanager
    def _attempt(self, key: Hashable, *, probe: bool) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if self._is_failure(error):
                self._failed(key, probe=probe)
            elif probe and (state := self._states.get(key)) is not None:
                state.probing = False
            raise
        state = self._states.pop(key, None)
        if state is not None and state.until is not None:
            self._report("closed", key, 0.0)

    def _failed(self, key: Hashable, *, probe: bool) -> None:
        state = self._states.get(key)
        if state is None:
            state = self._states[key] = _State()
        state.failures += 1
        if probe:
            state.probing = False
        elif state.until is not None or state.failures < FAILURES:
            return  # a call that began before the pause adds no information
        state.pause = min(state.pause * 2 or self._first_pause, self._longest_pause)
        state.until = self._clock() + state.pause
        self._report("opened", key, state.pause)


log = structlog.get_logger(__name__)

T = TypeVar("T")

READ_SECONDS = 1.0  # Timeout of a read, in seconds. A request may wait for it.
WRITE_SECONDS = 5.0  # Timeout of a write, in seconds. No request waits for one.
FIRST_PAUSE = 5.0  # Seconds of the first pause. The pause doubles each time the single attempt after it fails.
LONGEST_PAUSE = 60.0  # upper bound of a pause, in seconds
CLOSING_SECONDS = 5.0  # timeout of closing the store, in seconds


class Guarded(Store):
    """A store with a timeout and a circuit breaker for reads, and others for writes.

    Reads and writes fail independently: a full disk, for example, is still readable.
    """

    def __init__(self, store: ManagedStore, clock: Callable[[], float] = time.monotonic) -> None:
        """Use ``clock`` for monotonic seconds."""
        self.unguarded = store
        """The store without timeouts, for commands and maintenance. No request waits for them."""
        self._breaker = CircuitBreaker(FIRST_PAUSE, LONGEST_PAUSE, is_failure=_is_failure, report=_report, clock=clock)

    @property
    def failing(self) -> tuple[str, ...]:
        """Return the operations whose last call failed: ``read``, ``write``, both, or none."""
        return tuple(what for what in ("read", "write") if self._breaker.is_failing(what))

    async def get_many(self, tenant: str, kind: str, keys: Sequence[str]) -> dict[str, bytes]:
        return await self._run("read", READ_SECONDS, lambda: self.unguarded.get_many(tenant, kind, keys))

    async def put_many(self, entries: Sequence[Entry]) -> None:
        await self._run("write", WRITE_SECONDS, lambda: self.unguarded.put_many(entries))

    async def add(self, tenant: str, kind: str, key: str, value: bytes, seconds: float) -> bytes:
        return await self._run("write", WRITE_SECONDS, lambda: self.unguarded.add(tenant, kind, key, value, seconds))

    async def replace(self, tenant: str, kind: str, key: str, old: bytes, new: bytes, seconds: float) -> bool:
        return await self._run(
            "write", WRITE_SECONDS, lambda: self.unguarded.replace(tenant, kind, key, old, new, seconds)
        )

    async def aclose(self) -> None:
        """Close the store. Log a warning if it doesn't close within ``CLOSING_SECONDS``."""
        try:
            async with asyncio.timeout(CLOSING_SECONDS):
                await self.unguarded.aclose()
        except TimeoutError:
            log.warning("store.not_closed", seconds=CLOSING_SECONDS)

    async def _run(self, what: str, seconds: float, work: Callable[[], Awaitable[T]]) -> T:
        attempt = self._breaker.attempt(what)
        if attempt is None:
            raise StoreFailed("the store failed repeatedly; the proxy retries after a pause")
        with attempt:
            try:
                async with asyncio.timeout(seconds):
                    return await work()
            except TimeoutError:
                STORE_FAILURES.labels(what=what).inc()
                raise StoreFailed(f"no answer within {seconds:g} s") from None
            except StoreFailed:
                STORE_FAILURES.labels(what=what).inc()
                raise


def _is_failure(error: BaseException) -> bool:
    return isinstance(error, StoreFailed) and not isinstance(error, Refused)


def _report(change: Change, what: Hashable, pause: float) -> None:
    STORE_BREAKER.labels(what=what, change=change).inc()
    log.warning(f"store.breaker_{change}", what=what, pause=pause)
