"""What is measured, what it is measured against, and whether it is as asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

MILLI, MICRO = 1e3, 1e6


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured: rounds; requests per round and side, by kind; starts; large bodies of which nothing is
    known."""

    rounds: int
    small: int
    at_once: int
    slow: int
    large: int
    streams: int
    starts: int
    cold: int


FULL = Scale(rounds=9, small=400, at_once=800, slow=64, large=25, streams=5, starts=5, cold=10)
QUICK = Scale(rounds=3, small=200, at_once=400, slow=64, large=10, streams=3, starts=3, cold=4)
TINY = Scale(rounds=1, small=20, at_once=32, slow=16, large=2, streams=1, starts=1, cold=1)


@dataclass(frozen=True, slots=True)
class Target:
    """A figure asked for: the proxy's own in the row's unit, or its ratio to the pass-through's."""

    of: Literal["figure", "ratio"]
    at_most: float


@dataclass(slots=True)
class Row:
    """One line of the table. ``reference`` (the pass-through) and ``proxy`` hold one figure per round, in ``unit``; the
    rounds of the two are interleaved, so the ratios are of neighbours in time."""

    name: str
    unit: str
    target: Target | None = None
    proxy: list[float] = field(default_factory=list)
    reference: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """The proxy's figure by the pass-through's, round by round; empty where there is no pass-through."""
        return [ours / theirs for ours, theirs in zip(self.proxy, self.reference, strict=False)]

    @property
    def met(self) -> bool | None:
        """Whether the median is as asked for; ``None`` where nothing is."""
        if self.target is None:
            return None
        return median(self.proxy if self.target.of == "figure" else self.ratios) <= self.target.at_most


def raw(rows: Sequence[Row]) -> list[dict[str, object]]:
    """The rows with every round, as JSON takes them."""
    return [
        {
            "name": row.name,
            "unit": row.unit,
            "passthrough": row.reference,
            "proxy": row.proxy,
            "ratio": median(row.ratios) if row.reference else None,
            "target": None if row.target is None else {"of": row.target.of, "at_most": row.target.at_most},
            "met": row.met,
        }
        for row in rows
    ]
