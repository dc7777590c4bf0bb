"""The rows of the table, and the amount of work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

MILLI, MICRO = 1e3, 1e6
PASSTHROUGH = "pass-through"
COLUMNS = ("case", "compared with", "its figure", "proxy", "ratio")


@dataclass(frozen=True, slots=True)
class Scale:
    """The amount of work: rounds, and requests per round and server by kind.

    ``conversations`` are large ones whose turns alternate. ``compactions`` and ``beside`` have new conversations
    per round, of 110 KB and of 1.1 MB. ``translated`` are turns per round.
    """

    rounds: int
    small: int
    large: int
    conversations: int
    compactions: tuple[int, int]
    beside: tuple[int, int]
    translated: int


FULL = Scale(rounds=9, small=400, large=25, conversations=110, compactions=(4, 1), beside=(40, 8), translated=100)
TINY = Scale(rounds=1, small=20, large=2, conversations=3, compactions=(1, 1), beside=(8, 4), translated=2)


@dataclass(slots=True)
class Row:
    """One row of the table.

    ``reference`` and ``proxy`` have one figure per round, in ``unit``. The rounds of the two alternate, so each ratio
    compares two consecutive rounds. ``compared`` names the other side.
    """

    name: str
    unit: str
    proxy: list[float] = field(default_factory=list)
    reference: list[float] = field(default_factory=list)
    compared: str = PASSTHROUGH

    def add(self, figure: float, *, ours: bool) -> None:
        """Add the figure of a round, of the proxy or of the other side."""
        (self.proxy if ours else self.reference).append(figure)


def cells(row: Row) -> list[str]:
    """Return the cells of a row: medians, and the ratios of consecutive rounds with their range."""
    # Rounds without a measurable figure have no ratio.
    ratios = [ours / theirs for ours, theirs in zip(row.proxy, row.reference, strict=False) if theirs]
    ratio = f"{median(ratios):.2f} × ({min(ratios):.2f}–{max(ratios):.2f})" if ratios else ""
    return [row.name, row.compared, _figure(row.reference, row.unit), _figure(row.proxy, row.unit), ratio]


def _figure(figures: Sequence[float], unit: str) -> str:
    return f"{_digits(median(figures))} {unit}" if figures else ""


def _digits(figure: float) -> str:
    """Format a figure with about three digits. More would be noise."""
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.1f}" if figure >= 10 else f"{figure:.2f}"
