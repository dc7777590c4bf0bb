"""Print the table of crossings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rich.console import Console
from rich.table import Table

from bench.crossings.turns import Crossing, Turn, crossings, others, usual
from bench.figures import MILLI
from bench.table import MARKS, digits
from proxy.config import Settings

SUMMARY = 5.0
"""Seconds that the summary model takes, before division by the speed."""

NO_WAIT = 1.0
"""Seconds, before division by the speed. A shorter delay doesn't count as a wait."""

LEAST_SHARE = 0.95
"""The target: the share of crossings without a wait."""

DEADLINE = Settings().server.deadline
"""Seconds, before division by the speed. The longest wait must be within them."""


@dataclass(frozen=True, slots=True)
class Side:
    """A proxy with the turns of each of its conversations."""

    name: str
    conversations: Sequence[Sequence[Turn]]

    @property
    def crossings(self) -> list[Crossing]:
        """The crossings of all conversations."""
        return crossings(self.conversations)

    def met(self, speed: float) -> bool | None:
        """Return whether the waits meet the targets, or ``None`` without any crossing."""
        found = self.crossings
        if not found:
            return None
        waited = max(crossing.wait for crossing in found)
        return share_without_wait(found, speed) >= LEAST_SHARE and waited <= DEADLINE / speed


def share_without_wait(found: Sequence[Crossing], speed: float) -> float:
    """Return the share of crossings without a wait."""
    return sum(crossing.wait < NO_WAIT / speed for crossing in found) / len(found)


def show(sides: Sequence[Side], speed: float, console: Console) -> None:
    """Print all rows."""
    table = Table(
        title=f"Turns whose prompt has a new summary (crossings). A summary takes {SUMMARY:g} s",
        caption=(
            f"Everything runs {speed:g} × faster than with people. A summary takes {SUMMARY / speed:g} s instead of "
            f"{SUMMARY:g} s, and the deadline is {DEADLINE / speed:g} s instead of {DEADLINE:g} s. A wait is the "
            "measured latency beyond the median of turns that aren't compacted. Less than "
            f"{NO_WAIT / speed:g} s ({NO_WAIT:g} s) doesn't count as a wait. Each proxy has "
            f"{len(sides[0].conversations)} conversations: agents grow by 0.5–2 % of the window every 3–8 s, and chats "
            f"by 1 % every 10–20 s. Target: at least {LEAST_SHARE:.0%} without a wait, and the longest within the "
            "deadline."
        ),
    )
    table.add_column("prepared")
    columns = ("crossings", "no wait", "median wait", "longest", "deadline", "summary was", "other turns, no wait",
               "not compacted")  # fmt: skip
    for name in columns:
        table.add_column(name, justify="right")
    table.add_column("met", justify="center")
    for side in sides:
        table.add_row(side.name, *_figures(side, speed), MARKS[side.met(speed)])
    console.print(table)


def _figures(side: Side, speed: float) -> list[str]:
    found, rest = side.crossings, others(side.conversations)
    calm = sum(wait < NO_WAIT / speed for wait in rest) / len(rest) if rest else 1.0
    ending = [f"{calm:.1%} of {len(rest):,}", f"{digits(MILLI * usual(side.conversations))} ms"]
    if not found:
        return ["0", "", "", "", "", "", *ending]
    waits = [MILLI * crossing.wait for crossing in found]
    origins = Counter(crossing.origin for crossing in found)
    return [
        f"{len(found)}",
        f"{share_without_wait(found, speed):.1%}",
        f"{digits(median(waits))} ms",
        f"{digits(max(waits))} ms",
        f"{DEADLINE / speed:g} s",
        ", ".join(f"{origin} {times}" for origin, times in origins.most_common()),
        *ending,
    ]


def raw(sides: Sequence[Side], speed: float) -> list[dict[str, object]]:
    """Return the rows with every crossing, for JSON. Waits are the measured seconds."""
    return [
        {
            "name": side.name,
            "speed": speed,
            "turns": sum(map(len, side.conversations)),
            "usual": usual(side.conversations),
            "crossings": [{"wait": crossing.wait, "summary": crossing.origin} for crossing in side.crossings],
            "met": side.met(speed),
        }
        for side in sides
    ]
