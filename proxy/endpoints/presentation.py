"""Turn records, reports, and prompts into the texts of the dashboard's pages and of commands."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, get_args

from proxy.access.admin import AdminLink
from proxy.compaction.named_files import parsed
from proxy.compaction.summary_message import omitted_users, sections_of
from proxy.config import Policy, Settings
from proxy.constants import DAY
from proxy.dialects.apis import archived_text
from proxy.endpoints.queries import KEYLESS, Viewer
from proxy.pipeline.changes import ChangedPrompt, Fate, Message
from proxy.records.model import RECORD_LIMIT, LedgerLabels, LedgerSums
from proxy.records.report import in_shadow, largest, money, report, sums_json
from proxy.store.interface import UNSTORED_TENANT
from proxy.telemetry.record import RequestRecord
from proxy.telemetry.record_json import iso_time

SHOWN_ROWS = 50  # Rows of a table of savings. Further ones are summed up; the report as JSON or CSV has all.


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
    return shown, f"open the link in the file {link.file} on the proxy's machine. It works once"


def figure(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def milliseconds(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


START = 200  # characters of the start of a text


def policy_of(record: RequestRecord, settings: Settings) -> Policy | None:
    """Return the policy of a request as it's configured now; ``None`` if there is none of its name."""
    policy = settings.policies.get(record.policy or "")
    return None if policy is None else policy.for_model(record.model or "")


def window_parts(window: Mapping[str, int | None]) -> Iterator[tuple[str, int, int, int]]:
    """Yield the name and the tokens of each part of a record's window, and its place and width in thousandths."""
    parts = {name: size for name, size in window.items() if size and name != "size"}
    whole, before = sum(parts.values()), 0
    for name, size in parts.items():
        place, before = 1000 * before // whole, before + size
        yield name, size, place, 1000 * before // whole - place


def window_title(window: Mapping[str, int | None]) -> str:
    size = window["size"]
    used = sum(filter(None, window.values())) - (size or 0)
    if size is None:
        return f"The prompt had {used:,} tokens, as the proxy counts. It doesn't know the model's limits."
    over = f" The prompt and the room for the answer exceed it by {used - size:,}." if used > size else ""
    return f"The window has {size:,} tokens, as the proxy counts.{over}"


def left_prompt(prompt: ChangedPrompt, record: RequestRecord, policy: Policy | None) -> Iterator[str]:
    """Yield sentences about what left a request's prompt, and where it is."""
    fates = {fate: [one for one in prompt.messages if one.fate == fate] for fate in get_args(Fate)}
    if gone := fates["summarized"]:
        size = None if prompt.summary is None else prompt.summary.sent_size
        summary = "A summary replaces them." if size is None else f"A summary of {size:,} tokens replaces them."
        yield f"{_number_of(gone)} left the prompt. {summary}"
        if omitted := omitted_users(_summary(prompt)):
            yield f"Only the summary has {omitted:,} of the user's messages, so facts of them may be gone."
    if cut := fates["shortened"]:
        yield f"{_number_of(cut)} became shorter, and took {sum(one.sent_size or 0 for one in cut):,} tokens."
    if fates["left out"]:
        yield f"{_number_of(fates['left out'])} left the prompt without a replacement."
    missing = sum(one.received is None for one in [*gone, *cut])
    if missing:
        yield f"The archive no longer has {missing:,} of them."
    if missing == len(gone) + len(cut):
        return
    archive = None if policy is None else policy.archive
    until = "" if archive is None else f" at least until {iso_time(record.time + archive.days * DAY)[:10]}"
    yield f"The originals are in the archive{until}."
    if prompt.archived is not None:
        yield f"With its own key, the client gets them from /compaction/archive/{prompt.archived}"
    if policy is not None and policy.recall.tool == "auto":
        yield f"The model can read them with the recall tool. For this request it did so {record.recalls:,} times."


def why_unknown(record: RequestRecord, policy: Policy | None) -> str:
    """Return why there are no messages of a request to show, and how to change that."""
    if not record.calls:
        return "The proxy didn't send this request to an upstream."
    if record.verdict != "compacted":
        return "The proxy sent this request as it came. It stores only messages that it changes."
    archive = None if policy is None else policy.archive
    place = f"policies.{record.policy}.archive"
    if record.tenant == UNSTORED_TENANT:
        return "The proxy stores no messages of callers without a key. Send requests with a key to see them here."
    if policy is not None and archive is None:
        return f"The policy stores no messages ({place}: null). To see those of later requests, set {place}.days."
    if archive is not None and time.time() > record.time + archive.days * DAY:
        return f"The policy stores messages for {archive.days} days. To keep later ones longer, raise {place}.days."
    return (
        "The archive has no entry for this request. It's written a moment after the response, unless the store fails."
    )


def summary_sections(prompt: ChangedPrompt) -> list[tuple[str, str]]:
    """Return the titles and texts of the summary message; none if the prompt has none, or the archive lacks it."""
    text = _summary(prompt)
    return sections_of(text) if text else []


def _summary(prompt: ChangedPrompt) -> str:
    summary = prompt.summary
    return "" if summary is None or summary.sent is None else archived_text(summary.sent)[1]


def runs(prompt: ChangedPrompt) -> Iterator[tuple[str, str, list[Message]]]:
    """Yield the fate of neighboring messages, their number and size, and the messages."""
    for fate, group in groupby(prompt.messages, key=lambda one: one.fate):
        messages = list(group)
        yield fate, _number_of(messages), messages


def sizes(message: Message) -> str:
    return " → ".join(f"{size:,}" for size in (message.size, message.sent_size) if size is not None)


def start(message: Message) -> tuple[str, str]:
    """Return the role of a message, and the start of its text in one line."""
    raw = message.received or message.sent
    role, text = ("", "") if raw is None else archived_text(raw)
    role = "tool" if message.kind == "result" else message.kind or role
    return role, " ".join(text[: 2 * START].split())[:START]


def text_of(raw: bytes, message: Message, longest: int = sys.maxsize) -> str:
    """Return the text of a message as received or as sent, with a line for each argument of a call."""
    text = archived_text(raw)[1]
    if message.kind == "assistant":
        text = "\n".join(map(_plain, text.split("\n")))
    return text if len(text) <= longest else f"{text[:longest]}… ({len(text):,} characters)"


def _plain(line: str) -> str:
    """Return the arguments of a call with a line for each. Other lines stay as they are."""
    fields = parsed(line) if line.startswith("{") else None
    return "\n".join(f"  {name}: {value}" for name, value in fields.items()) if isinstance(fields, dict) else line


def _number_of(messages: Sequence[Message]) -> str:
    """Return the number, the places, and the tokens of messages."""
    places = [one.number for one in messages if one.number]
    sizes = [size for one in messages if (size := one.size or one.sent_size) is not None]
    about = [f"number {places[0]}" if len(places) == 1 else f"numbers {places[0]} to {places[-1]}"] if places else []
    about += [f"{sum(sizes):,} tokens"] if len(sizes) == len(messages) else []
    return f"{len(messages):,} message{'' if len(messages) == 1 else 's'}" + (f" ({', '.join(about)})" if about else "")


def text_lines(window: Mapping[str, int | None] | None, prompt: ChangedPrompt | None, *, texts: bool) -> Iterator[str]:
    """Yield the window and the messages for a terminal; with ``texts``, also the summary and the stored messages."""
    if window is not None:
        yield window_title(window)
        yield from (f"  {name:<14}{size:>12,}" for name, size, *_ in window_parts(window))
    if prompt is None:
        return
    for title, text in summary_sections(prompt) if texts else ():
        yield f"\n## {title or 'Introduction'}\n{text}"
    for fate, title, messages in runs(prompt):
        yield f"{fate:<12}{title}"
        for one in messages if texts else ():
            size = f"{sizes(one)} tokens" if sizes(one) else ""
            yield f"\n{one.number:>5} {', '.join(filter(None, (start(one)[0], size, fate)))}"
            for raw in filter(None, (one.received, one.sent)):
                yield textwrap.indent(text_of(raw, one), "      ")
