"""A record as JSON and in sentences, for people and programs. docs/reference/records.md has the stable field names."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec

from proxy.constants import PICO
from proxy.telemetry.record import Cost, Reason, Refusal, RequestRecord, UpstreamCall, Usage

PHASES = ("body", "compaction", "summary", "upstream", "first_byte", "total")

NAME_KINDS = ("files", "identifiers", "numbers", "errors")
_FATES = ("kept", "archived", "lost")

_USUAL = ("input", "output", "cache_read", "cache_write")
_UNUSUAL = (
    *("cache_write_1h", "reasoning", "audio_input", "audio_output", "image_input", "image_output"),
    *("searches", "tier", "region"),
)


def record_json(record: RequestRecord) -> dict[str, Any]:
    """Return the fields of a record. A field without a value is ``None``."""
    reason, refusal, trace = record.reason, record.refused_by, record.trace
    return {
        **_part(record, "id", "kind", "parent"),
        "time": iso_time(record.time),
        "caller": caller_digest(record.tenant),
        **_part(record, "team", "key", "client", "conversation", "user", "policy", "api", "path", "stream"),
        **_part(record, "model", "upstream", "upstream_model", "status", "error"),
        "refused_by": refusal and {**_part(refusal, "limit", "size", "used"), "again": iso_time(refusal.again)},
        "verdict": record.verdict,
        "explanation": explanation(record),
        "reason": reason and {**_part(reason, "trigger", "level", "size", "share"), "text": reason_text(reason)},
        "steps": list(record.steps),
        "tokens": _part(record, "before", "sent", "forecast"),
        "window": _window(record),
        "fits": record.fits,
        "output": record.output,
        "summary": {"origin": record.summary, **_part(record, "cause", "replaced", "checkpoints", "breaker_open")},
        "attempts": [
            {
                **_part(one, "status", "result", "ms", "tokens", "limit"),
                "error": one.error and _part(one.error, "code", "type", "param"),
            }
            for one in record.calls
        ],
        "retries": record.retries,
        "edited": record.edited,
        "usage": record.usage and _usage(record.usage),
        "cost": record.cost and _cost(record.cost),
        "ms": {name: record.phases.get(name) for name in PHASES},
        "bytes": {"received": record.bytes_in, "sent": record.bytes_out},
        "archive": record.archive,
        "recalls": record.recalls,
        "retention": _retention(record),
        "state": {"tokens": record.state, "unloaded": record.unloaded},
        "trace": trace.id if trace is not None and trace.sampled else None,
    }


def _part(struct: msgspec.Struct, *names: str) -> dict[str, Any]:
    return {name: getattr(struct, name) for name in names}


def _window(record: RequestRecord) -> dict[str, Any] | None:
    window, sent = record.window, record.sent
    if window is None or sent is None:
        return None
    messages = max(0, sent - window.instructions - window.tools - window.summary)
    free = None if window.size is None else max(0, window.size - sent - window.answer)
    parts = {name: getattr(window, name) for name in ("size", "instructions", "tools", "summary")}
    return {**parts, "messages": messages, "answer": window.answer, "free": free}


def _retention(record: RequestRecord) -> dict[str, Any] | None:
    """Return the share of names that the prompt has, and the counts of each kind; ``None`` if none were counted."""
    share = record.share_kept
    if share is None:
        return None
    counts = {kind: record.retention.get(kind, (0, 0, 0)) for kind in NAME_KINDS}
    return {"share": round(share, 4), **{kind: dict(zip(_FATES, each, strict=True)) for kind, each in counts.items()}}


def _usage(usage: Usage) -> dict[str, Any]:
    """Return the counts. Those that few providers report are omitted without a value."""
    counts = _part(usage, *_USUAL)
    counts |= {name: value for name in _UNUSUAL if (value := getattr(usage, name)) is not None}
    if usage.compactions:
        counts["compaction_input"] = sum(one.input or 0 for one in usage.compactions)
        counts["compaction_output"] = sum(one.output or 0 for one in usage.compactions)
    counts["estimated"] = usage.estimated
    return counts


def iso_time(seconds: float) -> str:
    """Return a time in seconds since 1970 in ISO 8601, in UTC with milliseconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def caller_digest(tenant: str) -> str:
    """Return a short digest that distinguishes callers. It reveals no key."""
    return hashlib.sha256(tenant.encode()).hexdigest()[:12]


def team_of(tenant: str) -> str | None:
    """Return the name of the team that a tenant is, or ``None`` for other callers."""
    return tenant.removeprefix("team:") if tenant.startswith("team:") else None


def dollars(amount: int) -> str:
    return format((Decimal(amount) / PICO).normalize(), "f") if amount else "0"


def reason_text(reason: Reason) -> str:
    size, level = _number(reason.size), _number(reason.level)
    match reason.trigger:
        case "fraction":
            share = "" if reason.share is None else f" ({reason.share * 100:g} % of the input budget)"
            return f"The request had {size} tokens; the policy's trigger is {level}{share}."
        case "tokens":
            return f"The request had {size} tokens; the policy's trigger is {level}."
        case "messages" | "bytes" as unit:
            return f"The request had {size} {unit}; the proxy compacts at {level}, by the policy or the model's limit."
        case "media":
            return f"The request had {size} images or files; the upstream takes {level}."
        case "stage":
            return f"The request had {size} tokens; a stage of the policy starts at {level}."
        case "overflow":
            limit = "" if reason.level is None else f", with a limit of {level}"
            return f"The upstream refused the request of {size} tokens as too long{limit}."
        case "reasoning":
            return "The upstream refused the reasoning in the request, so the proxy sent the request without it."
        case "roles":
            return "The upstream refused the roles in the request, so the proxy sent it with alternating roles."
        case "empty":
            return f"The upstream ended its response to {size} tokens early, as if the prompt didn't fit."
        case "tool":
            return "The upstream compressed its response, so the proxy sent the request without the recall tool."
        case "added":
            return "The upstream refused words that the proxy had written, so the proxy sent the request with others."
        case "price_step":
            return f"The request had {size} tokens; the model's price rises after {level}."
    return f"The condition {reason.trigger} was met."


def explanation(record: RequestRecord) -> list[str]:
    story, attempts = [_verdict(record)], [_attempt(number, call) for number, call in enumerate(record.calls, 1)]
    if record.refused_by is not None:
        story.append(_refused(record.refused_by))
    if record.reason is not None:
        story.append(reason_text(record.reason))
    if record.summary is not None:
        cause = "" if record.cause is None else f" (cause: {record.cause})"
        story.append(f"{_SUMMARIES.get(record.summary, record.summary)}{cause}.")
        if record.replaced is not None:
            background = " in the background" if record.replaced == "timeout" else ""
            story.append(f"A model wrote it{background} after a digest (cause: {record.replaced}).")
    if (waited := record.phases.get("summary", 0.0)) >= 1:
        story.append(f"The request waited {waited:,.0f} ms for the summary.")
    if record.kind == "summary":
        story.append(f"The call took {record.phases.get('total', 0.0):,.0f} ms.")
    failed = _failure(record)
    if failed and record.kind == "request":  # the cause comes first
        story = [*failed, *attempts, *story]
    else:
        story += [*attempts, *failed]
    if record.cost is not None:
        estimated = " (estimated)" if record.cost.estimated else ""
        story.append(f"It cost {dollars(record.cost.sent)} USD{estimated}.")
    elif record.usage is not None:
        story.append("Its price is unknown.")
    return story


def _failure(record: RequestRecord) -> list[str]:
    if record.status == 0 and record.error is not None:
        unsure = "" if record.usage is None else " The upstream may bill the prompt."
        return [f"The call ended without a response ({record.error}).{unsure}"]
    if record.status >= 400:
        code = "" if record.error is None else f", {record.error}"
        return [f"The response had status {record.status}{code}."]
    if record.error is not None:
        return [f"The response had status {record.status} and ended with the error {record.error}."]
    return []


_SUMMARIES = {
    "stored": "The prompt has a stored summary",
    "made": "The prompt has a new summary",
    "digest": "The prompt has a digest instead of a summary",
}


def _verdict(record: RequestRecord) -> str:
    if record.kind == "summary":
        return f"The proxy called a summary model for request {record.parent}."
    match record.verdict:
        case "compacted":
            steps = f" ({', '.join(record.steps)})" if record.steps else ""
            return f"The proxy compacted {_number(record.before)} tokens to {_number(record.sent)}{steps}."
        case "shadow":
            would = (
                "" if record.forecast is None else f" With enforce, it would send {_number(record.forecast)} tokens."
            )
            return f"The policy is in shadow mode, so the proxy sent the request unchanged.{would}"
        case "off":
            return "Compaction was off for this request."
        case "failed":
            return "Compaction failed, so the proxy sent the request unchanged. The log has the error."
        case "unsupported":
            return "The proxy only forwards this path."
        case "refused":
            return "The proxy refused the request."
        case "none" if record.reason is None:
            return "The request needed no compaction."
        case "none":
            return "Compaction couldn't make the request smaller, so the proxy sent the request unchanged."


def _refused(refusal: Refusal) -> str:
    used = "" if refusal.used is None else f" It had used {refusal.used}."
    again = iso_time(refusal.again)[:19].replace("T", " ")
    return f"The team has a limit of {refusal.size} ({refusal.limit}).{used} It accepts requests again at {again} UTC."


def _attempt(number: int, call: UpstreamCall) -> str:
    got = "no response" if call.status is None else f"status {call.status}"
    stated = [] if call.error is None else [f"{field} {name}" for field, name in call.error.stated.items()]
    if call.limit is not None:
        stated.append(f"a limit of {_number(call.limit)} tokens")
    error = f", which states {', '.join(stated)}" if stated else ""
    return f"Attempt {number} got {got} ({call.result}) after {call.ms:.0f} ms{error}."


def _cost(cost: Cost) -> dict[str, Any]:
    return {
        "sent": dollars(cost.sent),
        "as_received": dollars(cost.as_received),
        "forecast": None if cost.forecast is None else dollars(cost.forecast),
        "estimated": cost.estimated,
    }


def _number(value: int | None) -> str:
    return "an unknown number of" if value is None else f"{value:,}"
