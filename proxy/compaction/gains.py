"""Running totals of the tokens or bytes that a cheap stage saves, by group."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Protocol


class Gains(Protocol):
    """The savings of a stage, and how far it is applied. Positions are group indexes.

    ``frontier`` is the group up to which the stage is applied. ``seen`` is the number of groups at that decision.
    """

    frontier: int
    seen: int

    def potential(self, start: int, frontier: int, end: int) -> int:
        """Return the savings on the groups from ``start`` to ``frontier`` if there are ``end`` groups.

        ``end`` must not decrease from one call to the next.
        """
        ...

    def apply(self, frontier: int, end: int) -> None:
        """Apply the stage up to a frontier."""
        ...

    def applied(self, start: int) -> int:
        """Return the savings of the applied part of the stage, on the groups from ``start`` on."""
        ...


class PlainGains:
    """Savings of a stage that looks at one message only."""

    def __init__(self, by_group: Sequence[int]) -> None:
        self.frontier = 0
        self.seen = 0
        self._total = [0]
        for gain in by_group:
            self._total.append(self._total[-1] + gain)

    def potential(self, start: int, frontier: int, end: int) -> int:
        return self._total[frontier] - self._total[start] if frontier > start else 0

    def apply(self, frontier: int, end: int) -> None:
        self.frontier, self.seen = frontier, end

    def applied(self, start: int) -> int:
        return self._total[self.frontier] - self._total[start] if self.frontier > start else 0


class LateGains:
    """Savings of a stage that may reduce a message only after a later message has arrived.

    A Fenwick tree receives each saving when the later message arrives. A query for a range of ``n`` groups takes
    O(log n) time.
    """

    def __init__(self, groups: int, gains: Mapping[tuple[int, int], int]) -> None:
        """Take ``gains`` in tokens, by the group of the message and the group of the later message."""
        self.frontier = 0
        self.seen = 0
        self._waiting = sorted(((later, group, gain) for (group, later), gain in gains.items()), reverse=True)
        self._tree = [0] * (groups + 1)
        self._applied: list[tuple[int, int]] = []
        self._arrived: list[tuple[int, int]] = []

    def potential(self, start: int, frontier: int, end: int) -> int:
        while self._waiting and self._waiting[-1][0] < end:
            _, group, gain = self._waiting.pop()
            self._arrived.append((group, gain))
            self._add(group, gain)
        return self._before(frontier) - self._before(start) if frontier > start else 0

    def apply(self, frontier: int, end: int) -> None:
        self.potential(0, 0, end)
        self.frontier, self.seen = frontier, end
        total = 0
        self._applied = []
        for group, gain in sorted(self._arrived):
            if group < frontier:
                total += gain
                self._applied.append((group, total))

    def applied(self, start: int) -> int:
        if not self._applied or self.frontier <= start:
            return 0
        place = bisect_right(self._applied, (start - 1, 1 << 62))
        before = self._applied[place - 1][1] if place else 0
        return self._applied[-1][1] - before

    def _add(self, group: int, gain: int) -> None:
        position = group + 1
        while position < len(self._tree):
            self._tree[position] += gain
            position += position & -position

    def _before(self, group: int) -> int:
        total = 0
        while group > 0:
            total += self._tree[group]
            group -= group & -group
        return total
