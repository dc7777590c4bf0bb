"""A circuit breaker for summary models that fail repeatedly."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from types import TracebackType

import structlog
from cachetools import LRUCache

from proxy.summary.chunking import SummaryUnasked
from proxy.telemetry.metrics import BREAKER

log = structlog.get_logger(__name__)

FAILURES = 3
"""Consecutive failures after which the proxy stops calling a model."""

FIRST_PAUSE = 60.0
"""Seconds of the first pause. The pause doubles each time the single attempt after it fails."""

LONGEST_PAUSE = 600.0
"""Upper bound of a pause, in seconds."""

REMEMBERED = 10_000
"""Failing models kept in memory. The breaker drops the oldest ones first."""


@dataclass(slots=True)
class _State:
    """Failures of one model.

    ``until`` is the end of the pause, or ``None`` while the breaker is closed. ``probing`` is true during the single
    attempt after a pause.
    """

    failures: int = 0
    pause: float = 0.0
    until: float | None = None
    probing: bool = False


class Breaker:
    """Count failures per key: a tenant, an upstream, and a model. ``clock`` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._states: LRUCache[Hashable, _State] = LRUCache(REMEMBERED)

    def attempt(self, key: Hashable) -> Attempt | None:
        """Return an attempt, or ``None`` while the breaker is open. After a pause it allows one attempt at a time."""
        state = self._states.get(key)
        if state is None or state.until is None:
            return Attempt(self, key, probe=False)
        if state.probing or self._clock() < state.until:
            return None
        state.probing = True
        return Attempt(self, key, probe=True)

    def _succeeded(self, key: Hashable) -> None:
        state = self._states.pop(key, None)
        if state is not None and state.until is not None:
            self._say("closed", key)

    def _failed(self, key: Hashable, *, probe: bool) -> None:
        state = self._states[key] = self._states.get(key) or _State()
        state.failures += 1
        if probe:
            state.probing = False
        elif state.until is not None or state.failures < FAILURES:
            return  # an attempt that began before the pause adds no information
        state.pause = min(state.pause * 2 or FIRST_PAUSE, LONGEST_PAUSE)
        state.until = self._clock() + state.pause
        self._say("opened", key, pause=state.pause)

    def _left(self, key: Hashable, *, probe: bool) -> None:
        state = self._states.get(key)
        if state is not None and probe:
            state.probing = False

    @staticmethod
    def _say(change: str, key: Hashable, **more: float) -> None:
        BREAKER.labels(change=change).inc()
        # Omit the tenant, because it may be the digest of a caller's key.
        log.warning(f"summary.breaker_{change}", model=key[1:] if isinstance(key, tuple) else key, **more)


class Attempt:
    """A context manager for one summary attempt with one model.

    Exceptions count as failures, except when the caller left or the proxy sent no request.
    """

    def __init__(self, breaker: Breaker, key: Hashable, *, probe: bool) -> None:
        self._breaker = breaker
        self._key = key
        self._probe = probe

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._breaker._succeeded(self._key)
        elif isinstance(error, Exception) and not isinstance(error, SummaryUnasked):
            self._breaker._failed(self._key, probe=self._probe)
        else:
            self._breaker._left(self._key, probe=self._probe)
