"""Send a conversation to its upstream, and read the start of the response."""

from __future__ import annotations

from functools import partial
from time import perf_counter
from urllib.parse import quote

from msgspec.structs import replace
from starlette.types import Scope

from proxy.errors import ProxyError, UpstreamTimeout
from proxy.http.headers import VIA, for_other_request, for_upstream, with_beta
from proxy.pipeline.context import ConversationContext
from proxy.pipeline.description import describe_call, describe_failure
from proxy.pipeline.outcome import Outcome
from proxy.pipeline.response_start import Asked, ResponseStart, read_start
from proxy.telemetry.record import CONTINUED
from proxy.telemetry.trace_context import with_trace
from proxy.upstream.connections import not_in_time
from proxy.upstream.transport import Outgoing, Transport

DEADLINE = "The request's deadline has passed. Try again, or have server.deadline raised."
STOPPED = "The upstream started its response and then stopped sending. Try again."


def outgoing(context: ConversationContext, outcome: Outcome) -> Outgoing:
    """Return the request to send for an outcome. Raises ``UpstreamTimeout`` if the deadline has passed."""
    body, route = context.body, context.route
    if outcome.messages is None and context.recall is not None:
        body = context.recall.body
    model = route.model if route.model != body.model and body.model is not None else None
    headers = for_upstream(context.scope["headers"])
    if body.stream or outcome.tool or context.caller.policy.responses.state == "compact":
        # The proxy reads the beginning of a stream, and whole responses, so they must not be compressed.
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
    )


async def resend(context: ConversationContext, transport: Transport, request: Outgoing, body: bytes) -> ResponseStart:
    """Continue a response with another body."""
    limit = context.configuration.settings.server.deadline
    began = perf_counter()
    again = replace(request, body=body, headers=for_other_request(request.headers), timeout=limit, bounded=False)
    answer = await transport.send(again)
    start = await read_start(answer, Asked(body, answers=context.dialect.answers))
    describe_call(context, start, began, CONTINUED, None)
    return start


async def send(
    context: ConversationContext, transport: Transport, request: Outgoing, outcome: Outcome
) -> ResponseStart:
    """Send a request, and read the start of its response before the deadline. Raises ``ProxyError``."""
    answer, remaining = None, request.timeout
    began = perf_counter()
    try:
        with context.clock.until(context.deadline):
            answer = await transport.send(request)
            return await read_start(
                answer, Asked(context.body.raw, context.caller.policy.rate_limit_as_limit, context.dialect.answers)
            )
    except TimeoutError as error:
        if answer is not None:
            await answer.close()
        late = not_in_time(remaining) if answer is None else UpstreamTimeout(STOPPED)
        describe_failure(context, late, began, outcome.after)
        try:
            raise late from error
        finally:
            del late  # avoid a reference cycle through its traceback
    except BaseException as error:
        if isinstance(error, ProxyError):
            describe_failure(context, error, began, outcome.after)
        if answer is not None:
            await answer.close()
        raise


def client_query(scope: Scope) -> str:
    """Return the query string to forward."""
    return quote(scope["query_string"], safe="/?:@!$&'()*+,;=%-._~")
