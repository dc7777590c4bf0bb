"""Send a conversation to its upstream, and read the start of the response."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from urllib.parse import quote

import structlog
from cachetools import TTLCache
from msgspec.structs import replace
from starlette.types import Scope

from proxy.access.spending import limit_of
from proxy.dialects.chat.alternation import alternating_messages
from proxy.dialects.chat.request import asks_usage, with_usage
from proxy.errors import ProxyError, UpstreamTimeout
from proxy.http.headers import VIA, for_other_request, for_upstream, with_beta
from proxy.pipeline.billing import BYTES_A_TOKEN, EXPECTED_OUTPUT
from proxy.pipeline.context import ConversationContext
from proxy.pipeline.description import describe_call, describe_failure
from proxy.pipeline.outcome import Outcome
from proxy.pipeline.request_mode import mode_of
from proxy.pipeline.response_start import Asked, ResponseStart, read_start
from proxy.pipeline.services import Services
from proxy.telemetry.record import CONTINUED, Usage
from proxy.telemetry.trace_context import with_trace
from proxy.upstream.connections import not_in_time
from proxy.upstream.transport import CHAT_PATH, Outgoing, Transport

log = structlog.get_logger(__name__)

DEADLINE = "The request's deadline has passed. Try again, or have server.deadline raised."
REFUSALS = frozenset({400, 404, 415, 422, 501})
"""Statuses with which servers refuse a field."""

CAUSE = "usage"
"""The cause of a retry without asking for the usage of a stream."""

REFUSED_SECONDS = 3_600.0
"""Seconds for which streams of a model aren't asked for their usage after its upstream refused that."""

MODELS = 10_000
"""Models of tenants that refused it and are remembered."""

STOPPED = "The upstream started its response and then stopped sending. Try again."


def outgoing(context: ConversationContext, outcome: Outcome) -> Outgoing:
    """Return the request to send for an outcome. Raises ``UpstreamTimeout`` if the deadline has passed."""
    body, route = context.body, context.route
    if outcome.messages is None and context.recall is not None:
        body = context.recall.body
    model = route.model if route.model != body.model and body.model is not None else None
    headers = for_upstream(context.scope["headers"])
    # The proxy reads the usage of all responses, and the beginning of a stream, so they must not be compressed.
    headers = [pair for pair in headers if pair[0] != "accept-encoding"]
    remaining = context.deadline - context.clock.now()
    if remaining <= 0:
        raise UpstreamTimeout(DEADLINE)
    trace = context.record.trace
    if outcome.messages is not None:
        headers = with_beta(headers, outcome.beta)
    headers = with_trace([*headers, (VIA, context.via)], trace, None if trace is None else trace.attempt())
    sent = body.rewritten(units=outcome.messages, model=model, max_output=outcome.output)
    if outcome.tool and context.recall is not None and context.dialect.hidden_tool is not None:
        sent = context.dialect.hidden_tool.with_tool(sent, context.recall.tool)
    if context.asks_usage:
        sent = with_usage(sent)
    return Outgoing(
        body=sent,
        model=route.model,
        stream=body.stream,
        headers=headers,
        credential=context.caller.credential,
        timeout=remaining,
        bounded=True,
        path=context.dialect.path,
        query=client_query(context.scope),
        expanded=partial(body.expanded, sent, outcome.messages) if body.references else None,
        alternated=alternating_messages if context.profile.strict_alternation else None,
    )


async def resend(
    context: ConversationContext, transport: Transport, request: Outgoing, body: bytes, deadline: float
) -> ResponseStart:
    """Continue a response with another body, before a deadline in the time of the clock. Raises ``ProxyError``."""
    began, remaining = perf_counter(), deadline - context.clock.now()
    before, tokens = context.bill.last, None
    if before is not None and before.tokens is not None:
        tokens = round(before.tokens * len(body) / max(1, before.sent))
    again = replace(request, body=body, headers=for_other_request(request.headers), timeout=remaining)
    try:
        if remaining <= 0:
            raise UpstreamTimeout(DEADLINE)
        asked = Asked(body, answers=context.dialect.answers)
        start = await _start(context, transport, again, asked, deadline, tokens)
    except ProxyError as error:
        describe_failure(context, error, began, None, CONTINUED)
        raise
    describe_call(context, start, began, CONTINUED, None)
    return start


async def send(
    context: ConversationContext, transport: Transport, request: Outgoing, outcome: Outcome
) -> ResponseStart:
    """Send a request, and read the start of its response before the request's deadline. Raises ``ProxyError``."""
    began = perf_counter()
    asked = Asked(context.body.raw, context.caller.policy.rate_limit_as_limit, context.dialect.answers)
    try:
        return await _start(context, transport, request, asked, context.deadline, outcome.after)
    except ProxyError as error:
        describe_failure(context, error, began, outcome.after)
        raise


async def _start(
    context: ConversationContext,
    transport: Transport,
    request: Outgoing,
    asked: Asked,
    deadline: float,
    tokens: int | None,
) -> ResponseStart:
    """Close the answer before, send a request, and read the start of its response. Raises ``ProxyError``.

    ``tokens`` is the proxy's count of the request, ``None`` if it hasn't counted it.
    """
    await context.close_answer()
    call = context.bill.call(asked.answers.tail(), len(request.body), tokens)
    try:
        with call as meter, context.clock.until(deadline):
            meter.place = len(context.record.calls)
            context.answer = await transport.send(request)
            meter.watch(context.answer)
            start = await read_start(context.answer, asked)
            meter.begun(start)
            return start
    except TimeoutError as error:
        raise not_in_time(request.timeout) if context.answer is None else UpstreamTimeout(STOPPED) from error


class UsageRequests:
    """Asks for the usage of streams, and remembers which upstreams refuse that."""

    def __init__(self) -> None:
        self._refusing: TTLCache[tuple[str, str, str], bool] = TTLCache(MODELS, REFUSED_SECONDS)

    def wanted(self, context: ConversationContext, *, priced: bool) -> bool:
        """Return whether to ask for the usage of a stream, because a budget or a price applies.

        Without a budget, a request that the proxy must not change stays as it is, and its usage is estimated.
        """
        body = context.body
        if not body.stream or context.dialect.path != CHAT_PATH or context.place in self._refusing:
            return False
        wanted = limit_of(context.caller) is not None
        wanted = wanted or (priced and mode_of(context.scope, context.caller) != "off")
        return wanted and bool(body.units) and body.model is not None and not asks_usage(body.raw)

    def refused(self, context: ConversationContext, start: ResponseStart) -> bool:
        """Return whether to send a request again without asking for the usage of its stream.

        If the upstream then answers, remember that it refuses.
        """
        status = start.answer.status
        if CAUSE in context.retries and status == 200 and context.place not in self._refusing:
            self._refusing[context.place] = True
            log.info("usage.refused")
        refused = context.asks_usage and status in REFUSALS
        if not refused or not any(name in start.first for name in (b"stream_options", b"include_usage")):
            return False
        context.asks_usage = False
        return True

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        """Drop the models of forgotten tenants, and return those tenants."""
        tenants = {place[2] for place in self._refusing if forgotten(place[2])}
        for place in [place for place in self._refusing if place[2] in tenants]:
            del self._refusing[place]
        return tenants


async def reserve(services: Services, context: ConversationContext, outcome: Outcome, factor: float) -> None:
    """Reserve what a request will probably cost in its team's budget. Raises ``BudgetExceeded``.

    ``factor`` is the upstream's tokens per counted token.
    """
    if limit_of(context.caller) is None:
        return
    counted = outcome.after or outcome.before or len(context.body.raw) // BYTES_A_TOKEN
    asked = outcome.output or context.body.max_output or EXPECTED_OUTPUT
    usage = Usage(round(counted * factor), min(asked, EXPECTED_OUTPUT))
    await services.spending.reserve(context.caller, context.record.id, context.bill.amount(usage))


def client_query(scope: Scope) -> str:
    """Return the query string to forward."""
    return quote(scope["query_string"], safe="/?:@!$&'()*+,;=%-._~")
