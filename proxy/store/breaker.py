"""A circuit breaker: stop calls that fail repeatedly, and try again with one call after a pause."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal

from cachetools import LRUCache

from proxy.store.interface import StoreFailed

FAILURES = 3
"""Consecutive failures that open a breaker."""

REMEMBERED = 10_000
"""Failing keys that are remembered, the most recently used ones."""

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

    def is_open(self, key: Hashable) -> bool:
        """Return whether calls with this key failed repeatedly, and none has succeeded since."""
        state = self._states.get(key)
        return state is not None and state.until is not None

    def is_failing(self, key: Hashable) -> bool:
        """Return whether the last completed call with this key failed."""
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
