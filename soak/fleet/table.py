"""The result of a run, its targets, and the table."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from soak.fleet.load import CALM_PHASE, Tally, Upstreams
from soak.fleet.team import CONCURRENT

KILLED = "replicas killed"
SLOW = "Redis slow"

LONGEST = 15.0
"""Seconds that a request may take while something fails."""

ADDED = 0.1
"""Seconds that a slow Redis may add to the median of all requests."""

MEMORY = 600e6
"""Bytes of a replica at most."""

TITLES = (
    "failure",
    "requests",
    "lost with a killed replica",
    "other errors",
    "median of the agents",
    "longest",
    "summaries made again",
    "team's concurrent",
    "recovered after",
)


@dataclass
class Found:
    """The result of a run.

    ``recovered`` has the longest recovery by failure, in seconds; ``None``: never. ``concurrent`` has the largest
    number of the limited team's concurrent requests, and ``refused`` the number of its rejected ones. ``probes`` are
    the keys whose prompts must be identical. ``alone`` has the numbers of the team's requests that a replica counted
    alone, because the server took too long.
    """

    tally: Tally
    upstreams: Upstreams
    phases: list[str]
    kills: int = 0
    crashes: list[str] = field(default_factory=list)
    memory: int = 0
    recovered: dict[str, float | None] = field(default_factory=dict)
    concurrent: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    probes: list[str] = field(default_factory=list)
    alone: Counter[str] = field(default_factory=Counter)


def report(found: Found, title: str) -> int:
    """Print the result. Return 1 if it misses a target, else 0."""
    console = Console(width=150)
    console.print(_table(found, title))
    checks = _checks(found)
    for name, figure, met in checks:
        console.print(f"{'met   ' if met else '[red]missed[/red]'}  {name}: {figure}")
    wrong = [f"{phase}: {line}" for phase, lines in found.tally.wrong.items() for line in lines]
    for line in [*wrong[:15], *found.upstreams.faults[:10], *found.crashes[:10]]:
        console.print(line, markup=False)
    return 0 if all(met for *_, met in checks) else 1


def _table(found: Found, title: str) -> Table:
    table = Table(title=title)
    for column in TITLES:
        table.add_column(column)
    for phase in found.phases:
        times, team = found.tally.times[phase] or [0.0], found.tally.team_times[phase]
        recovered = found.recovered.get(phase)
        table.add_row(
            phase,
            f"{len(times) + len(team):,}",
            str(found.tally.lost[phase]),
            str(len(found.tally.wrong[phase])),
            f"{statistics.median(times) * 1000:.0f} ms",
            f"{max(*times, *team, 0):.1f} s",
            str(found.upstreams.extra[phase]),
            str(found.concurrent[phase]),
            "" if phase == CALM_PHASE else "[red]never[/red]" if recovered is None else f"{recovered:.1f} s",
        )
    return table


def _checks(found: Found) -> list[tuple[str, str, bool]]:
    """Return the names of the targets, the figures, and whether the figures meet the targets."""
    tally, upstreams = found.tally, found.upstreams
    again = upstreams.extra[KILLED]
    wrong = sum(map(len, tally.wrong.values()))
    longest = max(itertools.chain(*tally.times.values(), *tally.team_times.values()), default=0.0)
    calm, slow = (statistics.median(tally.times[phase] or [0.0]) for phase in (CALM_PHASE, SLOW))
    different = sum(len(upstreams.probed[key]) != 1 for key in found.probes)
    # While Redis fails, each replica counts alone.
    healthy = [phase for phase in found.phases if "Redis" not in phase]
    over = {phase: found.concurrent[phase] for phase in healthy if found.concurrent[phase] > CONCURRENT}
    alone = sum(found.alone[phase] for phase in healthy)
    recovered = found.recovered.values()
    return [
        ("requests lost or wrong", str(wrong), not wrong),
        ("malformed requests upstream", str(len(upstreams.faults)), not upstreams.faults),
        ("sessions completed", str(tally.sessions), tally.sessions > 0),
        ("summaries made again, and kills", f"{again}, {found.kills}", again <= found.kills),
        ("without a failure", str(upstreams.extra[CALM_PHASE]), not upstreams.extra[CALM_PHASE]),
        ("prompts that differ between replicas", f"{different} of {len(found.probes)}", not different),
        (
            f"concurrent requests of the team over its limit of {CONCURRENT}",
            f"{max(over.values(), default=0)}; {alone} counted alone; {sum(found.refused.values()):,} rejected",
            all(found.alone[phase] for phase in over),
        ),
        (
            "time that a slow Redis adds to the median of the agents",
            f"{(slow - calm) * 1000:.0f} ms",
            slow - calm < ADDED,
        ),
        ("longest request", f"{longest:.1f} s", longest < LONGEST),
        ("crashes and warnings of leaks in the logs", str(len(found.crashes)), not found.crashes),
        ("most memory of a replica", f"{found.memory / 1e6:.0f} MB", found.memory < MEMORY),
        ("recovered from all failures", "no" if None in recovered else "yes", None not in recovered),
    ]
