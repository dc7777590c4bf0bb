"""Print the table."""

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
"""Seconds at a human pace that the summary model takes."""

NO_WAIT = 1.0
"""Seconds at a human pace that nobody calls a wait."""

LEAST_SHARE = 0.95
"""Of the crossings, to be without a wait."""

DEADLINE = Settings().server.deadline
"""Seconds at a human pace; nobody may wait longer."""


@dataclass(frozen=True, slots=True)
class Side:
    """One proxy: the turns of each of its conversations."""

    name: str
    conversations: Sequence[Sequence[Turn]]

    @property
    def crossings(self) -> list[Crossing]:
        """All of them."""
        return crossings(self.conversations)

    def met(self, speed: float) -> bool | None:
        """Whether so few wait as is asked for, and nobody too long; ``None`` without any crossing."""
        found = self.crossings
        if not found:
            return None
        waited = max(crossing.wait for crossing in found)
        return share_without_wait(found, speed) >= LEAST_SHARE and waited <= DEADLINE / speed


def share_without_wait(found: Sequence[Crossing], speed: float) -> float:
    """Of some crossings, the share whose wait nobody calls one."""
    return sum(crossing.wait < NO_WAIT / speed for crossing in found) / len(found)


def show(sides: Sequence[Side], speed: float, console: Console) -> None:
    """Print all lines."""
    table = Table(
        title=f"The turn from which on another summary stands in the prompt; a summary takes {SUMMARY:g} s",
        caption=(
            f"Everything runs {speed:g} × faster than people do: a summary takes {SUMMARY / speed:g} s for {SUMMARY:g} "
            f"s, deadline {DEADLINE / speed:g} s for {DEADLINE:g} s. Waits are as measured, beyond the median of turns "
            f"that need nothing; under {NO_WAIT / speed:g} s ({NO_WAIT:g} s) is none. {len(sides[0].conversations)} "
            "conversations for each proxy: agents, whose turns make them longer by 0.5–2 % of the window every 3–8 s, "
            "and chats, by 1 % every 10–20 s. "
            f"Target: ≥ {LEAST_SHARE:.0%} without a wait, the longest within the deadline."
        ),
    )
    table.add_column("prepared")
    columns = ("crossings", "no wait", "median wait", "longest", "deadline", "summary was", "other turns, no wait",
               "needs nothing")  # fmt: skip
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
    """The lines with every crossing, as JSON takes them; waits in seconds as measured."""
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
