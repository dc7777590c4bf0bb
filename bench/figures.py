"""The rows of the table, with their targets, and the amount of work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

MILLI, MICRO = 1e3, 1e6
PASSTHROUGH = "pass-through"


@dataclass(frozen=True, slots=True)
class Scale:
    """The amount of work: rounds, requests per round and server by kind, process starts, and uncached large bodies.

    ``conversations`` are large ones whose turns alternate. ``compactions`` and ``beside`` have new conversations
    per round, of 110 KB and of 1.1 MB.
    """

    rounds: int
    small: int
    at_once: int
    slow: int
    large: int
    streams: int
    starts: int
    cold: int
    conversations: int
    compactions: tuple[int, int]
    beside: tuple[int, int]


FULL = Scale(
    rounds=9, small=400, at_once=800, slow=64, large=25, streams=5, starts=5, cold=10, conversations=110,
    compactions=(4, 1), beside=(40, 8),
)  # fmt: skip
QUICK = Scale(
    rounds=3, small=200, at_once=400, slow=64, large=10, streams=3, starts=3, cold=4, conversations=110,
    compactions=(3, 1), beside=(24, 8),
)  # fmt: skip
TINY = Scale(
    rounds=1, small=20, at_once=32, slow=16, large=2, streams=1, starts=1, cold=1, conversations=3,
    compactions=(1, 1), beside=(8, 4),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Target:
    """The highest value for the proxy's own figure, in the row's unit, or for its ratio to the pass-through's."""

    of: Literal["figure", "ratio"]
    at_most: float


@dataclass(slots=True)
class Row:
    """One row of the table.

    ``reference`` and ``proxy`` have one figure per round, in ``unit``. The rounds of the two alternate, so each ratio
    compares two consecutive rounds. ``compared`` names the other side.
    """

    name: str
    unit: str
    target: Target | None = None
    proxy: list[float] = field(default_factory=list)
    reference: list[float] = field(default_factory=list)
    compared: str = PASSTHROUGH

    @property
    def ratios(self) -> list[float]:
        """Divide the proxy's figure of each round by the pass-through's. Empty for rows of the proxy alone."""
        return [ours / theirs for ours, theirs in zip(self.proxy, self.reference, strict=False)]

    @property
    def met(self) -> bool | None:
        """Return whether the median meets the target. ``None`` without a target."""
        if self.target is None:
            return None
        return median(self.proxy if self.target.of == "figure" else self.ratios) <= self.target.at_most


def raw(rows: Sequence[Row]) -> list[dict[str, object]]:
    """Return the rows with the figures of every round, for JSON."""
    return [
        {
            "name": row.name,
            "unit": row.unit,
            "compared": row.compared,
            "passthrough": row.reference,
            "proxy": row.proxy,
            "ratio": median(row.ratios) if row.reference else None,
            "target": None if row.target is None else {"of": row.target.of, "at_most": row.target.at_most},
            "met": row.met,
        }
        for row in rows
    ]
