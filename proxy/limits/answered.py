"""The largest requests that upstreams answered recently. A guessed limit must not be below them."""

from __future__ import annotations

from collections.abc import Callable

from cachetools import LRUCache

PERIOD = 3_600.0
"""Seconds. An answer counts as recent for at least this time, and at most twice as long."""

PLACES = 10_000
"""Combinations of upstream, model, and tenant kept in memory, the most recently used ones."""

Place = tuple[str, str, str]


class Answered:
    """Track the largest recently answered size per upstream, model, and tenant, in tokens as counted here."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Use ``clock`` for seconds."""
        self._clock = clock
        self._largest: LRUCache[Place, tuple[float, int, int]] = LRUCache(PLACES)

    def note(self, place: Place, tokens: int) -> None:
        """Record that the upstream answered a request of this size."""
        began, now, before = self._periods(place)
        if tokens <= now:
            return
        self._largest[place] = (began, tokens, before)

    def forget(self, place: Place) -> None:
        """Forget the answers of this upstream, model, and tenant."""
        self._largest.pop(place, None)

    def largest(self, place: Place) -> int:
        """Return the largest recently answered size, or 0 if there is none."""
        return max(self._periods(place)[1:])

    def _periods(self, place: Place) -> tuple[float, int, int]:
        """Return when the current period began, and the largest sizes of this period and the one before."""
        time = self._clock()
        began, now, before = self._largest.get(place, (time, 0, 0))
        if time - began < PERIOD:
            return began, now, before
        return time, 0, (now if time - began < 2 * PERIOD else 0)
