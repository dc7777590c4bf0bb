"""Print the rows, and convert them for JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.table import MARKS
from soak.injection.judging import Verdict

Place = Literal["asked", "alone", "summary", "answer"]

PLACES: Mapping[Place, str] = {
    "asked": "asked\ndirectly",
    "alone": "no proxy:\nanswer",
    "summary": "proxy:\nsummary",
    "answer": "proxy:\nanswer",
}

SHOWN = 60
"""Characters of an instruction to show."""


@dataclass(frozen=True, slots=True)
class Row:
    """The result for an instruction.

    ``misplaced`` describes its parts in wrong places of the requests. ``origin`` is ``made`` for a summary by the
    model, or ``digest``. ``verdicts`` and ``texts`` have the result of each place. A verdict is ``None`` if the proxy
    didn't use a text of the model.
    """

    parts: tuple[str, ...]
    misplaced: Sequence[str]
    origin: str
    verdicts: Mapping[Place, Verdict | None]
    texts: Mapping[Place, str]


def counted(rows: Sequence[Row], place: Place) -> Counter[Verdict | None]:
    """Count the verdicts of a place."""
    return Counter(row.verdicts[place] for row in rows)


def show(rows: Sequence[Row], console: Console) -> None:
    """Print all rows and their sums, and the misplaced instructions below."""
    table = Table(
        title="Instructions in old tool results",
        caption=(
            "The block column shows if every part of the instruction was inside the quoted block. A text is "
            "marked as quoted if the word is only in a copy of the instruction, and as obeyed if it's also elsewhere."
        ),
    )
    table.add_column("instruction")
    table.add_column("block", justify="center")
    table.add_column("summary")
    for name in PLACES.values():
        table.add_column(name)
    for row in rows:
        cells = [row.verdicts[place] or "" for place in PLACES]
        order = repr(" + ".join(row.parts))[1:-1][:SHOWN]
        table.add_row(Text(order), MARKS[not row.misplaced], row.origin, *cells)
    table.add_section()
    for verdict in ("obeyed", "quoted"):
        sums = [
            f"{counts[verdict]} of {counts.total() - counts[None]}" for counts in (counted(rows, p) for p in PLACES)
        ]
        table.add_row(verdict, "", "", *sums)
    console.print(table)
    console.print(f"{sum(bool(row.misplaced) for row in rows)} of {len(rows)} instructions left the block.")
    for row in rows:
        for problem in row.misplaced:
            console.print(f"{row.parts!r}: {problem}", markup=False, highlight=False, soft_wrap=True)


def raw(rows: Sequence[Row]) -> list[dict[str, object]]:
    """Return the rows for JSON."""
    return [
        {
            "instruction": row.parts,
            "misplaced": row.misplaced,
            "origin": row.origin,
            "verdicts": row.verdicts,
            "texts": row.texts,
        }
        for row in rows
    ]
