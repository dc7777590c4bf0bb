"""Not asking a summary model that fails again and again: everybody who waits for it waits in vain."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from types import TracebackType

import structlog

from proxy.summary.chunking import SummaryUnasked
from proxy.telemetry.metrics import BREAKER

log = structlog.get_logger(__name__)

FAILURES = 3
"""Failures in a row after which a model is left alone."""

FIRST_PAUSE = 60.0
"""Seconds for which it is. The pause doubles whenever the one attempt after it fails too."""

LONGEST_PAUSE = 600.0
"""Seconds."""

REMEMBERED = 10_000
"""Models in trouble that are kept in mind, the newest ones."""


@dataclass(slots=True)
class _State:
    """``until`` is when the pause ends; ``None`` as long as the model is asked. ``probing``: one attempt is made."""

    failures: int = 0
    pause: float = 0.0
    until: float | None = None
    probing: bool = False


class Breaker:
    """Counts failures per key: a tenant, an upstream and a model. ``clock`` gives seconds that never go back."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._states: dict[Hashable, _State] = {}

    def attempt(self, key: Hashable) -> Attempt | None:
        """An attempt that may be made now; ``None`` if none may. After a pause a single one may, until it has ended."""
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
        state = self._states.pop(key, None) or _State()
        if len(self._states) >= REMEMBERED:
            del self._states[next(iter(self._states))]
        self._states[key] = state
        state.failures += 1
        if probe:
            state.probing = False
        elif state.until is not None or state.failures < FAILURES:
            return  # what began before the pause says nothing new
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
        # The tenant may be the digest of a caller's key: the rest says enough.
        log.warning(f"summary.breaker_{change}", model=key[1:] if isinstance(key, tuple) else key, **more)


class Attempt:
    """One summary tried with one model, as a context.

    An exception is a failure, unless it says nothing of the model: the caller left, or nothing was asked.
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
