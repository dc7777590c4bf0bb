"""Fill in a request's record from its outcome and its response."""

from __future__ import annotations

from time import perf_counter

import structlog

from proxy.errors import ProxyError
from proxy.pipeline.context import ConversationContext
from proxy.pipeline.outcome import Outcome
from proxy.pipeline.response_start import ResponseStart
from proxy.telemetry.record import UpstreamCall

log = structlog.get_logger(__name__)


def milliseconds_since(start: float) -> float:
    """Return the milliseconds since a time of ``perf_counter``. The event loop's clock may be coarser."""
    return round((perf_counter() - start) * 1000, 3)


def describe(context: ConversationContext, outcome: Outcome) -> None:
    """Add the outcome to the record."""
    record = context.record
    record.verdict = outcome.verdict
    record.reason = record.reason or outcome.reason
    record.steps = outcome.steps
    record.checkpoints = outcome.checkpoints
    record.before, record.sent = outcome.before, outcome.after
    if outcome.forecast is not None:
        record.forecast, record.steps = outcome.forecast.after, outcome.forecast.steps
    record.summary = outcome.summary
    record.cause = outcome.summary_cause
    record.breaker_open = outcome.breaker_open
    record.output = outcome.output
    record.archive = list(outcome.archive)


def describe_call(
    context: ConversationContext, start: ResponseStart, began: float, result: str, sent: int | None
) -> None:
    """Add an attempt that got a response. ``began`` is when the proxy sent it, ``sent`` its tokens."""
    limit = None if start.overflow is None else start.overflow.limit
    call = UpstreamCall(result, start.answer.status, milliseconds_since(began), sent, limit, start.error)
    context.record.calls.append(call)
    log.debug("upstream.responded", result=result, status=call.status, ms=call.ms, tokens=sent, limit=limit)
    if start.overflow is not None:
        context.record.fits = False


def describe_failure(
    context: ConversationContext, error: ProxyError, began: float, sent: int | None, result: str | None = None
) -> None:
    """Add an attempt without a response. Default of ``result``: the error's code."""
    call = UpstreamCall(result or error.code, None, milliseconds_since(began), sent)
    context.record.calls.append(call)
    log.debug("upstream.not_responded", result=call.result, ms=call.ms, tokens=sent)
