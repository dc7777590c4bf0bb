"""Print tables, and add up shares."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

NOTHING = "–"


@dataclass
class Share:
    """A part of a whole, both added up."""

    part: float = 0
    whole: float = 0

    def add(self, part: float, whole: float) -> None:
        """Add to both."""
        self.part += part
        self.whole += whole

    @property
    def value(self) -> float | None:
        """The share, or ``None`` if nothing was counted."""
        return self.part / self.whole if self.whole else None


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, left: Collection[str] = ()) -> str:
    """Return a table in Markdown. The first column and those in ``left`` are aligned to the left."""
    lines = [list(columns), *([str(cell) for cell in row] for row in rows)]
    widths = [max(3, *map(len, cells)) for cells in zip(*lines, strict=True)]
    sides = ["<" if place == 0 or name in left else ">" for place, name in enumerate(columns)]
    ruled = [f"{'' if side == '<' else ':':->{width}}" for side, width in zip(sides, widths, strict=True)]
    forms = [f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True)]
    row = f"| {' | '.join(forms)} |"
    return "\n".join(row.format(*line) for line in (lines[0], ruled, *lines[1:]))


def percent(share: float | None, digits: int = 1) -> str:
    """Return a share in percent, or a dash if there is none."""
    return NOTHING if share is None else f"{share * 100:.{digits}f} %"
