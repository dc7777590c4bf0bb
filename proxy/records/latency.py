"""Medians and 95th percentiles of response times, by team, part, and time, from the records."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from proxy.constants import DAY
from proxy.records.model import RecordQuery, RecordStore
from proxy.telemetry.record import RequestRecord
from proxy.telemetry.record_json import iso_time

PARTS: Mapping[str, Callable[[RequestRecord], float | None]] = {
    "own": lambda record: record.own_time,
    "summary": lambda record: record.phases.get("summary"),
    "upstream": lambda record: record.phases.get("upstream"),
    "total": lambda record: record.phases.get("total"),
}
"""The milliseconds of each part; ``None`` if a request has no such part. docs/api.md describes them."""

STEPS = (60, 300, 900, 3_600, 3 * 3_600, 6 * 3_600, DAY, 7 * DAY, 30 * DAY, 400 * DAY)
"""Seconds of a slice. A report takes the shortest that makes at most ``SLICES`` whole ones."""

SLICES = 8

SAMPLE = 1_000
"""The newest requests of a slice that count, so that a report of many records takes less than a second."""

Times = dict[str, list[float]]
"""Milliseconds by part."""


async def latency(
    records: RecordStore, since: float, until: float, tenants: tuple[str, ...] | None, team: str | None
) -> dict[str, Any]:
    """Return the figures of requests that reached an upstream, the slowest team first. Raises ``StoreFailed``."""
    step = next((step for step in STEPS if until // step - since // step <= SLICES), STEPS[-1])
    starts = [since, *(edge * step for edge in range(int(since // step) + 1, math.ceil(until / step)))]
    query = RecordQuery(tenants, team, kind="request", limit=SAMPLE)
    slices, sampled = list[dict[str | None, Times]](), False
    for first, last in zip(starts, [*starts[1:], until], strict=True):
        found = await records.select(dataclasses.replace(query, since=first, until=last))
        sampled = sampled or len(found) == SAMPLE
        slices.append(_times(found))
    return {
        "since": iso_time(since),
        "until": iso_time(until),
        "slices": [iso_time(start) for start in starts],
        "sampled": sampled,
        "rows": _rows(slices),
    }


def _times(records: Iterable[RequestRecord]) -> dict[str | None, Times]:
    teams: defaultdict[str | None, Times] = defaultdict(lambda: {part: [] for part in PARTS})
    for record in records:
        if record.calls:
            for part, taken in PARTS.items():
                if (spent := taken(record)) is not None:
                    teams[record.team][part].append(spent)
    return teams


def _rows(slices: list[dict[str | None, Times]]) -> list[dict[str, Any]]:
    teams: dict[str | None, list[dict[str, Any]]] = {}
    for team in {team for one in slices for team in one}:
        for part in PARTS:
            times = [one.get(team, {}).get(part, []) for one in slices]
            row = {
                "team": team,
                "part": part,
                **_figures([each for one in times for each in one]),
                "slices": list(map(_figures, times)),
            }
            if row["requests"]:
                teams.setdefault(team, []).append(row)
    slowest_first = sorted(teams.values(), key=lambda rows: -rows[-1]["p95"])
    return [row for rows in slowest_first for row in rows]


def _figures(times: list[float]) -> dict[str, Any]:
    ordered = sorted(times)
    p50, p95 = (ordered[math.ceil(share * len(ordered)) - 1] if ordered else None for share in (0.5, 0.95))
    return {"requests": len(ordered), "p50": p50, "p95": p95}


PART_TITLES = {"own": "proxy", "summary": "wait for summary", "upstream": "upstream's start", "total": "total"}


def seconds(milliseconds: float | None) -> str:
    """Return a time for a table, in seconds."""
    if milliseconds is None:
        return "–"
    digits = 3 if milliseconds < 100 else 2 if milliseconds < 10_000 else 1
    return f"{milliseconds / 1000:,.{digits}f}"


def slice_titles(found: Mapping[str, Any]) -> list[str]:
    """Return the start of each slice, with the time of day unless the slices are days."""
    return [start[5:16].replace("T", " ").removesuffix(" 00:00") for start in found["slices"]]
