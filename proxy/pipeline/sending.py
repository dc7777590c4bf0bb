"""Send a conversation to its upstream, and read the start of the response."""

from __future__ import annotations

from functools import partial
from time import perf_counter

import structlog
from msgspec.structs import replace
from starlette.types import Scope

from proxy.dialects.chat.request import with_usage
from proxy.errors import ProxyError, UpstreamTimeout
from proxy.http.headers import VIA, client_query, for_other_request, for_upstream
from proxy.pipeline.attempt import Departure
from proxy.pipeline.exchange import DEADLINE, Exchange, TimeLeft
from proxy.pipeline.response_start import Asked, ResponseStart, read_start
from proxy.telemetry.record import ACCEPTED, CONTINUED, OVERFLOW, UpstreamCall, with_trace
from proxy.upstream.connections import not_in_time
from proxy.upstream.transport import Outgoing, Transport

log = structlog.get_logger(__name__)

REFUSALS = frozenset({400, 404, 415, 422, 501})
"""Statuses with which servers refuse a field."""

STOPPED = "The upstream started its response and then stopped sending. Try again."


def outgoing(exchange: Exchange, sent: Departure) -> Outgoing:
    """Return the request as it leaves. Raises ``UpstreamTimeout`` if the deadline has passed."""
    route, outcome = exchange.route, sent.outcome
    body = exchange.original if outcome.messages is None else exchange.body
    model = route.model if route.model != body.model and body.model is not None else None
    headers = forwarded_headers(exchange.scope)
    remaining = exchange.time.seconds
    if remaining <= 0:
        raise UpstreamTimeout(DEADLINE)
    trace = exchange.record.trace
    headers = [*headers, (VIA, exchange.via)]
    if trace is not None:
        headers = with_trace(headers, trace, trace.attempt())
    raw = body.rewritten(units=outcome.messages, model=model, max_output=sent.output)
    if sent.tool is not None and exchange.dialect.hidden_tool is not None:
        raw = exchange.dialect.hidden_tool.with_tool(raw, sent.tool.definition)
    if sent.asks_usage:
        raw = with_usage(raw)
    return Outgoing(
        body=raw,
        model=route.model,
        stream=body.stream,
        headers=headers,
        credential=exchange.caller.credential,
        timeout=remaining,
        bounded=True,
        path=exchange.dialect.path,
        query=client_query(exchange.scope),
        expanded=partial(body.expanded, raw, outcome.messages) if body.references else None,
        edits=sent.edits,
        family=exchange.profile.family,
        reasons=exchange.profile.reasons,
    )


def forwarded_headers(scope: Scope) -> list[tuple[str, str]]:
    """Return the client's headers for the upstream.

    The proxy reads the usage of all responses, and the beginning of a stream, so they must not be compressed.
    """
    return [pair for pair in for_upstream(scope["headers"]) if pair[0] != "accept-encoding"]


async def send(exchange: Exchange, transport: Transport, request: Outgoing, tokens: int | None) -> ResponseStart:
    """Send a request, and read the start of its response before the request's deadline. Raises ``ProxyError``.

    ``tokens`` is the proxy's count of the request, ``None`` if it hasn't counted it.
    """
    began = perf_counter()
    asked = Asked(exchange.body.raw, exchange.caller.policy.rate_limit_as_limit, exchange.dialect.answers)
    try:
        start = await _start(exchange, transport, request, asked, exchange.time, tokens)
    except ProxyError as error:
        _describe_failure(exchange, error, began, tokens)
        raise
    start.milliseconds = milliseconds_since(began)
    return start


async def resend(
    exchange: Exchange, transport: Transport, request: Outgoing, body: bytes, time: TimeLeft
) -> ResponseStart:
    """Send another body within a time, to continue a response or to do without the tool. Raises ``ProxyError``."""
    began, remaining = perf_counter(), time.seconds
    before, tokens = exchange.bill.last, None
    if before is not None and before.tokens is not None:
        tokens = round(before.tokens * len(body) / max(1, before.sent))
    again = replace(request, body=body, headers=for_other_request(request.headers), timeout=remaining)
    try:
        if remaining <= 0:
            raise UpstreamTimeout(DEADLINE)
        asked = Asked(body, answers=exchange.dialect.answers, seconds=remaining)  # the response has begun
        start = await _start(exchange, transport, again, asked, time, tokens)
    except ProxyError as error:
        _describe_failure(exchange, error, began, None, CONTINUED)
        raise
    start.milliseconds = milliseconds_since(began)
    describe_call(exchange, start, CONTINUED, None)
    return start


async def _start(
    exchange: Exchange, transport: Transport, request: Outgoing, asked: Asked, time: TimeLeft, tokens: int | None
) -> ResponseStart:
    """Close the answer before, send a request, and read the start of its response. Raises ``ProxyError``."""
    await exchange.bill.close()
    call, answer = exchange.bill.call(asked.answers.tail(), len(request.body), tokens), None
    try:
        with call as meter:
            async with time.limit():
                meter.place, request.watch = len(exchange.record.calls), meter.watch
                answer = await transport.send(request)
                exchange.bill.opened(answer, meter)
                exchange.record.edited = list(answer.edited)
                start = await read_start(answer, asked)
                meter.response_started(start)
                return start
    except TimeoutError as error:
        raise not_in_time(request.timeout) if answer is None else UpstreamTimeout(STOPPED) from error


def milliseconds_since(start: float) -> float:
    """Return the milliseconds since a time of ``perf_counter``. The event loop's clock may be coarser."""
    return round((perf_counter() - start) * 1000, 3)


def describe_call(exchange: Exchange, start: ResponseStart, result: str | None, sent: int | None) -> None:
    """Add an attempt of ``sent`` tokens that got a response to the record.

    ``result`` is the cause of the next attempt, or ``CONTINUED`` for a call after the first round of a response.
    ``None`` means that the client gets the response.
    """
    limit = None if start.overflow is None else start.overflow.limit
    result = result or _result(start)
    call = UpstreamCall(result, start.answer.status, start.milliseconds, sent, limit, start.error)
    exchange.record.calls.append(call)
    log.debug("upstream.responded", result=call.result, status=call.status, ms=call.ms, tokens=sent, limit=limit)
    if start.overflow is not None:
        exchange.record.fits = False


def _result(start: ResponseStart) -> str:
    if start.overflow is not None:
        return OVERFLOW
    return ACCEPTED if start.answer.status < 400 and start.error is None else "error"


def _describe_failure(
    exchange: Exchange, error: ProxyError, began: float, sent: int | None, result: str | None = None
) -> None:
    """Add an attempt without a response. Default of ``result``: the error's code."""
    call = UpstreamCall(result or error.code, None, milliseconds_since(began), sent)
    exchange.record.calls.append(call)
    log.debug("upstream.not_responded", result=call.result, ms=call.ms, tokens=sent)
