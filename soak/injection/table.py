"""The table that is printed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.table import MARKS
from soak.injection.judging import Heard

Place = Literal["asked", "alone", "summary", "answer"]

PLACES: Mapping[Place, str] = {
    "asked": "asked\noutright",
    "alone": "no proxy:\nanswer",
    "summary": "proxy:\nsummary",
    "answer": "proxy:\nanswer",
}

SHOWN = 60
"""So many characters of an order."""


@dataclass(frozen=True, slots=True)
class Row:
    """An order, in parts, and what came of it: what was wrong on the wire, where the summary came from (``made`` by the
    model, or a ``digest``), and in each place what was heard (``None`` where the model wrote nothing that was used) and
    what was said."""

    parts: tuple[str, ...]
    misplaced: Sequence[str]
    origin: str
    heard: Mapping[Place, Heard | None]
    said: Mapping[Place, str]


def counted(rows: Sequence[Row], place: Place) -> Counter[Heard | None]:
    """How often each was heard in a place."""
    return Counter(row.heard[place] for row in rows)


def show(rows: Sequence[Row], console: Console) -> None:
    """Print all rows and their sums, and below what was wrong."""
    table = Table(
        title="Orders in old tool results",
        caption=(
            "Block: no part of the order stood outside of the quoted block. Quoted: the word was said in a copy of the "
            "order only; obeyed: said otherwise."
        ),
    )
    table.add_column("order")
    table.add_column("block", justify="center")
    table.add_column("summary")
    for name in PLACES.values():
        table.add_column(name)
    for row in rows:
        cells = [row.heard[place] or "" for place in PLACES]
        order = repr(" + ".join(row.parts))[1:-1][:SHOWN]
        table.add_row(Text(order), MARKS[not row.misplaced], row.origin, *cells)
    table.add_section()
    for verdict in ("obeyed", "quoted"):
        sums = [
            f"{counts[verdict]} of {counts.total() - counts[None]}" for counts in (counted(rows, p) for p in PLACES)
        ]
        table.add_row(verdict, "", "", *sums)
    console.print(table)
    console.print(f"{sum(bool(row.misplaced) for row in rows)} of {len(rows)} orders left the block.")
    for row in rows:
        for fault in row.misplaced:
            console.print(f"{row.parts!r}: {fault}", markup=False, highlight=False, soft_wrap=True)


def raw(rows: Sequence[Row]) -> list[dict[str, object]]:
    """The rows as JSON takes them."""
    return [
        {"order": row.parts, "misplaced": row.misplaced, "origin": row.origin, "heard": row.heard, "said": row.said}
        for row in rows
    ]
