"""Log finished requests, and name the current request in all log lines. Never content."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import structlog
from structlog.typing import EventDict, WrappedLogger

from proxy.constants import PICO
from proxy.telemetry.record import RequestRecord, current, shown_model

log = structlog.get_logger(__name__)

SLOW_MS = 1_000.0
"""A request is slow if the proxy takes longer than this, in addition to the body's arrival and the upstream's time."""

_CHANGED = frozenset({"refused", "failed", "compacted"})


def request_names(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Add the id, team, model, and upstream of the current request. Fields that the event has take precedence.

    Hide a model's name that doesn't look like one, because the client may send any text there.
    """
    record = current.get()
    if record is not None:
        for name, value in _names(record).items():
            event.setdefault(name, value)
    if (model := event.get("model")) is not None:
        event["model"] = shown_model(str(model))
    return event


class RequestLog:
    """Write a line for each finished request that is notable."""

    def __init__(self, requests: Callable[[], Literal["notable", "all", "none"]]) -> None:
        """``requests`` returns which requests get a line."""
        self._requests = requests

    def add(self, record: RequestRecord) -> None:
        """Log a finished request."""
        if record.kind != "request" or (which := self._requests()) == "none":
            return
        if which == "notable" and not is_notable(record):
            return
        if record.status >= 500 or record.error == "upstream_interrupted":
            log.warning("request.finished", **fields(record))
        else:
            log.info("request.finished", **fields(record))


def is_notable(record: RequestRecord) -> bool:
    """Return whether a request failed, or the proxy changed, retried, or delayed it, or would have compacted it."""
    return (
        record.status >= 400
        or record.error is not None
        or record.verdict in _CHANGED
        or record.forecast is not None
        or len(record.calls) > 1
        or is_slow(record)
    )


def is_slow(record: RequestRecord) -> bool:
    """Return whether the proxy delayed the start of the response. False if the upstream's time isn't known."""
    phases = record.phases
    begun = phases.get("first_byte")
    if begun is None or begun <= SLOW_MS or not record.calls:
        return False
    return begun - phases.get("body", 0.0) - sum(call.ms for call in record.calls) > SLOW_MS


def fields(record: RequestRecord) -> dict[str, Any]:
    """Return the fields of the line for a request. Fields without a value are left out."""
    reason, usage, cost = record.reason, record.usage, record.cost
    stated = {
        **_names(record),
        "policy": record.policy,
        "api": record.api,
        "verdict": record.verdict,
        "trigger": reason and reason.trigger,
        "level_reached": reason and reason.level,
        "size": reason and reason.size,
        "tokens_before": record.before,
        "tokens_sent": record.sent,
        "tokens_forecast": record.forecast,
        "tokens_reported": usage and usage.input,
        "summary": record.summary,
        "cause": record.cause,
        "retries": record.retries,
        "upstream_error": _upstream_error(record),
        "attempts": [call.status or call.result for call in record.calls] or None,
        "status": record.status,
        "error": record.error,
        "phases": record.phases,
        "slow": is_slow(record) or None,
        "cost_usd": cost and cost.sent / PICO,
    }
    return {name: value for name, value in stated.items() if value is not None}


def _upstream_error(record: RequestRecord) -> dict[str, str] | None:
    """Return the names in the upstream's last error."""
    error = next((call.error for call in reversed(record.calls) if call.error is not None), None)
    if error is None:
        return None
    names = {"code": error.code, "type": error.type, "param": error.param}
    return {field: name for field, name in names.items() if name is not None}


def _names(record: RequestRecord) -> dict[str, Any]:
    names = {
        "request": record.id,
        "team": record.team,
        "model": record.model,
        "upstream": record.upstream,
    }
    return {name: value for name, value in names.items() if value is not None}
