"""Turn records and reports into the texts of the dashboard's pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from proxy.access.admin import AdminLink
from proxy.endpoints.queries import KEYLESS, Viewer
from proxy.pipeline.changes import Changed, Unchanged
from proxy.records.model import LedgerLabels, LedgerSums
from proxy.records.report import in_shadow, largest, report, sums_json
from proxy.telemetry.record import RequestRecord

SHOWN_MESSAGES = 20
"""Messages of one change on a page. The JSON endpoints have all of them."""

SHOWN_CHARACTERS = 6_000
"""Characters of one message on a page."""

SHOWN_ROWS = 50
"""Rows of a table of savings. Further ones are summed up; the report as JSON or CSV has all."""


def request_facts(record: RequestRecord, one: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the names and values to show of a request. ``one`` is the record as JSON."""
    usage = one["usage"] or {}
    cost = one["cost"]
    shown = [
        ("time (UTC)", one["time"]),
        ("team", record.team),
        ("policy", record.policy),
        ("API", record.api),
        ("model", record.model),
        ("upstream", record.upstream),
        ("status", str(record.status)),
        ("error", record.error),
        ("verdict", record.verdict),
        ("steps", ", ".join(record.steps)),
        ("tokens received", figure(record.before)),
        ("tokens sent", figure(record.sent)),
        ("enforce would send", None if record.forecast is None else figure(record.forecast)),
        ("input reported", figure(usage.get("input"))),
        ("from the cache", figure(usage.get("cache_read"))),
        ("output reported", figure(usage.get("output"))),
        ("cost, USD", None if cost is None else cost["sent"]),
        ("without the proxy, USD", None if cost is None else cost["as_received"]),
        ("total, ms", milliseconds(one["ms"]["total"])),
        ("first byte, ms", milliseconds(one["ms"]["first_byte"])),
    ]
    return [(name, value) for name, value in shown if value]


def shown_change(change: Changed | Unchanged) -> dict[str, Any]:
    """Return what a page shows of a change. Formatting long messages is slow, so call it in a thread."""
    if isinstance(change, Unchanged):
        return {"unchanged": change.count, "position": change.position}
    title = f"Message {change.position + 1}, shortened"
    if change.summary:
        title = f"Messages {change.position + 1} to {change.position + len(change.before)}, replaced by a summary"
    return {
        "title": title,
        "complete": change.complete,
        "before": [_shown(message) for message in change.before[:SHOWN_MESSAGES]],
        "received": len(change.before),
        "hidden": max(0, len(change.before) - SHOWN_MESSAGES),
        "after": [_shown(message) for message in change.after],
    }


def _shown(message: bytes) -> str:
    text = msgspec.json.format(message, indent=2).decode("utf-8", "replace")
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}… ({len(text):,} characters)"


def tiles(total: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the names and values of a report's total."""
    shown = [
        ("requests", figure(total["requests"])),
        ("compacted", figure(total["compacted"])),
        ("too large without the proxy", figure(total["avoided"])),
        ("tokens received", figure(total["received"])),
        ("tokens sent", figure(total["sent"])),
        ("USD saved, net", total["savings"]),
    ]
    if total["shadow"]:
        shown += [
            ("requests in shadow mode", figure(total["shadow"])),
            ("enforce would compact", figure(total["would_compact"])),
            ("of these, larger than the model accepts", figure(total["would_avoid"])),
            ("tokens that enforce would remove", figure(total["sent"] - total["forecast"])),
            ("USD that enforce would save in addition", total["shadow_savings"]),
        ]
    return shown


def savings(rows: Sequence[tuple[LedgerLabels, LedgerSums]], first: int, last: int) -> dict[str, Any]:
    """Return what the page of savings shows of a ledger. Many rows take long, so call it in a thread."""
    by_day = report(rows, ("day",), first, last)
    days = by_day["rows"]
    tables = [
        (f"By {name}", [{"name": value, **sums_json(sums)} for value, sums in largest(rows, name, SHOWN_ROWS)])
        for name in ("team", "policy", "model")
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
        f"open the link that the proxy printed when it started. Each works once, and the next is in {link.file}",
    )


def figure(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def milliseconds(value: float | None) -> str:
    """Return a duration in whole milliseconds."""
    return "–" if value is None else f"{value:,.0f}"
