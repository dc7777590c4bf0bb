"""Reports: sums of the ledger's rows by some of their labels, as JSON or CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from proxy.constants import DAY
from proxy.records.model import SUMS, LedgerLabels, LedgerSums
from proxy.telemetry.record_json import dollars

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
