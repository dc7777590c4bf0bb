"""Print the scores, and convert them for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.overflow.scores import FIGURES, Score

NOTHING = "–"


def show(scores: Sequence[Score], console: Console) -> None:
    """Print a row for each recognizer, and the lines that the proxy gets wrong."""
    first = scores[0]
    table = Table(
        title=f"Overflow errors: {first.overflows} responses are one, {first.others} aren't",
        caption="Figures: of the recognized lines with this figure, the share that was read correctly.",
    )
    table.add_column("recognizer")
    for name in ("recognized", "false alarms", "traps", *FIGURES):
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
    """Return all scores for JSON."""
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
