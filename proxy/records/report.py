"""Reports: sums of the ledger's rows by some of their labels as JSON or CSV, and response times from the records."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from proxy.constants import DAY
from proxy.records.model import SUMS, LedgerLabels, LedgerSums, RecordQuery, RecordStore
from proxy.telemetry.record import RequestRecord
from proxy.telemetry.record_json import dollars, iso_time

BY = ("team", "key", "policy", "model", "upstream", "api", "day")  # labels to group by

MONEY = frozenset({"cost", "summary_cost", "as_received", "forecast_cost"})

DERIVED = ("savings", "forecast_savings", "shadow_savings", "estimated_share")

COLUMNS = (*SUMS, *DERIVED)

Group = tuple[tuple[str | None, ...], LedgerSums]  # the values of the labels, and the sums


def grouped(rows: Iterable[tuple[LedgerLabels, LedgerSums]], by: Sequence[str]) -> list[Group]:
    """Return the sums for each combination of labels, sorted by them."""
    groups: dict[tuple[str | None, ...], LedgerSums] = {}
    for labels, sums in rows:
        groups.setdefault(tuple(_label(labels, name) for name in by), LedgerSums()).add(sums)
    return sorted(groups.items(), key=lambda group: [(value is not None, value or "") for value in group[0]])


def report(
    rows: Sequence[tuple[LedgerLabels, LedgerSums]], by: Sequence[str], since: int, until: int
) -> dict[str, Any]:
    groups = grouped(rows, by)
    total = LedgerSums()
    for _, sums in groups:
        total.add(sums)
    return {
        "object": "compaction.report",
        "currency": "USD",
        "since": day_text(since),
        "until": day_text(until),
        "by": list(by),
        "rows": [{**dict(zip(by, values, strict=True)), **sums_json(sums)} for values, sums in groups],
        "total": sums_json(total),
    }


def sums_json(sums: LedgerSums) -> dict[str, Any]:
    """Return the sums with money as decimal text, and the figures that follow from them."""
    spent = sums.cost + sums.summary_cost
    return {
        **{name: dollars(getattr(sums, name)) if name in MONEY else getattr(sums, name) for name in SUMS},
        "savings": dollars(sums.as_received - spent),
        "forecast_savings": dollars(sums.as_received - sums.forecast_cost - sums.summary_cost),
        # Requests outside shadow mode have the same cost in both sums.
        "shadow_savings": dollars(sums.cost - sums.forecast_cost),
        "estimated_share": round(sums.estimated / sums.requests, 4) if sums.requests else 0.0,
    }


def largest(
    rows: Iterable[tuple[LedgerLabels, LedgerSums]], name: str, most: int
) -> list[tuple[str | None, LedgerSums]]:
    """Return the sums for each value of a label. If it has more than ``most``, sum up those with fewer requests."""
    groups = [(values[0], sums) for values, sums in grouped(rows, (name,))]
    if len(groups) <= most:
        return groups
    groups.sort(key=lambda group: -group[1].requests)
    rest = LedgerSums()
    for _, sums in groups[most:]:
        rest.add(sums)
    return [*groups[:most], (f"{len(groups) - most:,} others", rest)]


def in_shadow(rows: Sequence[tuple[LedgerLabels, LedgerSums]]) -> list[str]:
    """Return each team with requests in shadow mode, their number, and the last day. No team has the name ``-``."""
    shadow = [(labels, sums) for labels, sums in rows if sums.shadow]
    last = {labels.team: day_text(labels.day) for labels, _ in sorted(shadow, key=lambda row: row[0].day)}
    return [
        f"{team or '-'} ({sums.shadow:,}, the last on {last[team]})" for (team,), sums in grouped(shadow, ("team",))
    ]


def money(row: Mapping[str, Any], name: str) -> str:
    """Return an amount of a report's row, or ``unknown`` if it's zero because prices are unknown."""
    counted = {"summary_cost": row["summaries"], "shadow_savings": row["shadow"]}.get(name, row["unpriced"])
    return "unknown" if row["unpriced"] and counted and not float(row[name]) else str(row[name])


def csv_text(found: dict[str, Any]) -> str:
    """Return the rows of a report as CSV, with a header."""
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*found["by"], *COLUMNS])
    for row in found["rows"]:
        writer.writerow([*(_cell(row[name]) for name in found["by"]), *(row[name] for name in COLUMNS)])
    return out.getvalue()


def day_of(seconds: float) -> int:
    return int(seconds // DAY)


def day_text(day: int) -> str:
    return datetime.fromtimestamp(day * DAY, UTC).date().isoformat()


def _label(labels: LedgerLabels, name: str) -> str | None:
    value: str | int | None = getattr(labels, name)
    return day_text(value) if isinstance(value, int) else value


def _cell(label: str | None) -> str:
    """Return a label that no spreadsheet reads as a formula. Clients choose the names of models."""
    text = label or ""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


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

SAMPLE = 1_000  # the newest requests of a slice that count, so that a report of many records takes less than a second
Times = dict[str, list[float]]  # milliseconds by part


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
