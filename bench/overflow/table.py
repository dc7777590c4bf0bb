"""The table that is printed, and the scores as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.overflow.scores import FIGURES, Score

NOTHING = "–"


def show(scores: Sequence[Score], console: Console) -> None:
    """Print one row for each recogniser, and which lines ours got wrong."""
    first = scores[0]
    table = Table(
        title=f"Overflow errors: {first.overflows} answers that are one, {first.others} that are not",
        caption="Figures: the share read right of those lines that have one and were recognised.",
    )
    table.add_column("recogniser")
    for name in ("recognised", "false alarms", "traps", *FIGURES):
        table.add_column(name, justify="right")
    for score in scores:
        found = f"{score.recall:.1%} ({score.found}/{score.overflows})"
        alarms = str(len(score.alarms)) if score.others else NOTHING
        table.add_row(
            score.name, found, alarms, str(len(score.trapped)), *(_share(score, figure) for figure in FIGURES)
        )
    console.print(table)
    wrong = {"missed": first.missed, "false alarm": first.alarms, "trap": first.trapped, **first.wrong}
    for name, ids in wrong.items():
        if ids:
            console.print(f"{first.name}, {name}: {', '.join(ids)}")


def _share(score: Score, figure: str) -> str:
    share = score.share(figure)
    return NOTHING if share is None or not score.reads_figures else f"{share:.1%}"


def raw(scores: Sequence[Score]) -> list[dict[str, Any]]:
    """All scores as plain values."""
    return [
        {
            "name": score.name,
            "overflows": score.overflows,
            "others": score.others,
            "found": score.found,
            "missed": score.missed,
            "false_alarms": score.alarms,
            "trapped": score.trapped,
            "wrong": score.wrong,
            "right": score.right,
        }
        for score in scores
    ]
