"""Turn records and reports into the texts of the dashboard's pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from proxy.access.admin import AdminLink
from proxy.endpoints.queries import KEYLESS, Viewer
from proxy.records.model import RECORD_LIMIT, LedgerLabels, LedgerSums
from proxy.records.report import in_shadow, largest, money, report, sums_json
from proxy.telemetry.record import RequestRecord

SHOWN_ROWS = 50
"""Rows of a table of savings. Further ones are summed up; the report as JSON or CSV has all."""


_PHASES = {
    "body": "body",
    "compaction": "compaction",
    "summary": "wait for a summary",
    "upstream": "upstream's start",
    "first_byte": "first byte",
    "total": "total",
}
"""The titles of a request's phases."""


def request_facts(record: RequestRecord, one: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the names and values to show of a request. ``one`` is the record as JSON."""
    usage = one["usage"] or {}
    cost = one["cost"]
    shown = [
        ("time (UTC)", one["time"]),
        ("team", record.team),
        ("key", record.key),
        ("client", record.client),
        ("user", record.user),
        ("policy", record.policy),
        ("API", record.api),
        ("model", record.model),
        ("upstream", record.upstream),
        ("status", str(record.status)),
        ("error", record.error),
        ("verdict", record.verdict),
        ("tokens received", figure(record.before)),
        ("tokens sent", figure(record.sent)),
        ("input reported", figure(usage.get("input"))),
        ("from the cache", figure(usage.get("cache_read"))),
        ("output reported", figure(usage.get("output"))),
        ("names kept", None if one["retention"] is None else f"{one['retention']['share']:.0%}"),
        ("cost, USD", None if cost is None else cost["sent"]),
        ("without the proxy, USD", None if cost is None else cost["as_received"]),
        *((f"{title}, ms", milliseconds(one["ms"][name])) for name, title in _PHASES.items() if one["ms"][name]),
    ]
    return [(name, value) for name, value in shown if value and value != "–"]


def conversation(found: Sequence[RequestRecord]) -> tuple[list[RequestRecord], str]:
    """Return the turns of a conversation, oldest first, and its sums in a sentence.

    ``found`` has the requests and the summary calls, newest first.
    """
    sums = LedgerSums()
    for record in found:
        sums.add_record(record)
    prices = sums_json(sums)
    cost = prices["cost"] if sums.cost or not sums.unpriced else "unknown"
    turns = [record for record in reversed(found) if record.kind == "request"]
    rest = max((turn.checkpoints for turn in turns), default=0)
    broken = sum(record.kind == "summary" and record.failed for record in found)
    failed = f" ({broken:,} failed)" if broken else ""
    most = f"; only the newest {RECORD_LIMIT:,} records" if len(found) >= RECORD_LIMIT else ""
    return turns, (
        f"{_counted(sums.requests, 'request')}, {sums.compacted:,} compacted, {sums.errors:,} failed; "
        f"{_counted(rest, 'checkpoint')}; {cost} USD, and "
        f"{_counted(sums.summaries, 'summary call')}{failed} for {prices['summary_cost']} USD{most}"
    )


def compaction_text(one: dict[str, Any]) -> str:
    """Return what a list says about a request's compaction and price; empty if there is nothing to say."""
    summary, kept, cost = one["summary"], one["retention"], one["cost"]
    waited = one["ms"]["summary"]
    after = f" after {waited:,.0f} ms" if waited and waited >= 1 else ""
    parts = [
        _counted(summary["checkpoints"], "checkpoint") if summary["checkpoints"] else "",
        f"summary {summary['origin']}{after}" if summary["origin"] else "",
        f"{kept['share']:.0%} of the names kept (identifiers, files, numbers; other facts may be gone)" if kept else "",
        f"{cost['sent']} USD" if cost else "",
    ]
    return ", ".join(filter(None, parts))


def error_text(one: dict[str, Any]) -> str:
    """Return the error that a client got, with the names in the upstream's error; empty if there was none."""
    names = next((call["error"] for call in reversed(one["attempts"]) if call["error"]), None) or {}
    shown = [f"{name} {value}" for name, value in names.items() if value]
    limit, upstream = one["refused_by"], f"upstream: {', '.join(shown)}" if shown else ""
    refused = f"the team's limit is {limit['size']}, and it used {limit['used']}" if limit and limit["used"] else ""
    return "; ".join(filter(None, [one["error"], refused, upstream]))


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def tiles(total: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the names and values of a report's total."""
    shown = [
        ("requests", figure(total["requests"])),
        ("compacted", figure(total["compacted"])),
        ("rescued: too large without the proxy", figure(total["avoided"])),
        ("tokens received", figure(total["received"])),
        ("tokens sent", figure(total["sent"])),
        ("USD saved, net", money(total, "savings")),
    ]
    if total["shadow"]:
        shown += [
            ("requests in shadow mode", figure(total["shadow"])),
            ("enforce would compact", figure(total["would_compact"])),
            ("of these, enforce would have rescued", figure(total["would_avoid"])),
            ("tokens that enforce would remove", figure(total["sent"] - total["forecast"])),
            ("USD that enforce would save in addition", money(total, "shadow_savings")),
        ]
    return shown


def savings(rows: Sequence[tuple[LedgerLabels, LedgerSums]], first: int, last: int) -> dict[str, Any]:
    """Return what the page of savings shows of a ledger. Many rows take long, so call it in a thread."""
    by_day = report(rows, ("day",), first, last)
    days = by_day["rows"]
    tables = [
        (f"By {name}", [{"name": value, **sums_json(sums)} for value, sums in largest(rows, name, SHOWN_ROWS)])
        for name in ("team", "key", "policy", "model")
    ]
    return {
        "tiles": tiles(by_day["total"]),
        "shadow": in_shadow(rows),
        "tables": [*tables, ("By day", [{"name": day["day"], **day} for day in days])],
    }


def keyless_hint(viewer: Viewer, link: AdminLink | None) -> tuple[str, str] | None:
    """Return what a page lists for a visitor without a key, and how to see all requests; ``None`` for others."""
    if viewer.name != KEYLESS:
        return None
    shown = "You see requests that came without a key." if viewer.tenants else "Requests without a key aren't kept."
    if link is None or not link.file.exists():  # the system may have cleaned up its folder
        return shown, "sign in with an admin key"
    return (
        shown,
        f"run compaction-proxy dashboard on the proxy's machine. It prints the link in {link.file}, which works once",
    )


def figure(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def milliseconds(value: float | None) -> str:
    """Return a duration in whole milliseconds."""
    return "–" if value is None else f"{value:,.0f}"
