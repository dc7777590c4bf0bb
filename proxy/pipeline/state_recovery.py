"""Shorten a history that the server keeps, if a request that continues it overflows or would."""

from __future__ import annotations

import re
from urllib.parse import quote

import msgspec
import structlog

from proxy.compaction.triggers import any_met
from proxy.dialects.responses.native import calls_in, compact_request, continued, open_calls, previous_response
from proxy.errors import ProxyError
from proxy.http.headers import VIA, for_other_request, for_upstream
from proxy.overflow.silent import Finished
from proxy.pipeline.billing import Bill
from proxy.pipeline.context import ConversationContext
from proxy.pipeline.job import CompactionInput
from proxy.pipeline.reasons import reason_for
from proxy.pipeline.response_start import ResponseStart
from proxy.pipeline.services import Services
from proxy.telemetry.record import Reason
from proxy.telemetry.trace_context import with_trace
from proxy.upstream.relay import RelayTransport
from proxy.upstream.transport import RESPONSES_PATH, Answer

log = structlog.get_logger(__name__)

# A response begins with its own id. Strings escape quotation marks, so this is a field.
_FIRST_ID = re.compile(rb'"id"\s*:\s*"([^"\\]{1,200})"')

_ADVICE = (
    "The upstream keeps this conversation, so the proxy can't shorten it{reason}. Send the whole conversation without "
    "'{field}', so that the proxy can compact it{example}."
)


class NotCompacted(Exception):
    """The upstream can't compact the history. The text is the reason, for the log and for the client."""


def advice(context: ConversationContext, reason: str = "") -> str:
    """Return the advice for a request that overflows with a history at the server, as an ASCII header value.

    ``reason`` says why the upstream couldn't compact it.
    """
    if context.dialect.path != RESPONSES_PATH:
        return _ADVICE.format(reason="", field="thread", example="")
    chain = previous_response(context.body.raw) is not None
    return _ADVICE.format(
        reason=f" (/responses/compact: {reason})" if reason and chain else "",
        field="previous_response_id" if chain else "conversation",
        example=", for example with store: false",
    )


def sized_response(context: ConversationContext, start: ResponseStart) -> str | None:
    """Return the id of a response whose size decides about the request that continues it; ``None`` if none does."""
    caller = context.caller
    if context.dialect.path != RESPONSES_PATH or caller.policy.responses.state != "compact" or not caller.kept:
        return None
    found = _FIRST_ID.search(start.first)
    return None if found is None else found[1].decode("utf-8", "replace")


def background_response(context: ConversationContext, start: ResponseStart) -> str | None:
    """Return the id of a response that the upstream makes in the background, or ``None``."""
    if context.dialect.path != RESPONSES_PATH or b'"background"' not in context.body.raw:
        return None
    found = _FIRST_ID.search(start.first)
    return None if found is None else found[1].decode("utf-8", "replace")


def note_size(services: Services, context: ConversationContext, id: str, end: Finished) -> None:
    """Remember the reported tokens of a response and its prompt. A request that continues it begins with these."""
    if end.prompt:
        services.items.note_size(context.caller.tenant, [id], end.prompt + (end.output or 0))


async def trigger_reached(
    services: Services, context: ConversationContext, case: CompactionInput, factor: float
) -> Reason | None:
    """Return the trigger that a continued conversation meets, if the policy compacts ahead of an overflow.

    The size is the reported one of the earlier response and the counted one of the new items. ``factor`` is the
    upstream's tokens per counted token.
    """
    if case.mode != "enforce" or case.policy.responses.state != "compact" or not context.caller.kept:
        return None
    previous = previous_response(context.body.raw)
    if previous is None:
        return None
    reported = services.items.sizes(context.caller.tenant, [previous]).get(previous)
    if reported is None:
        return None
    _, added = await services.compactor.sizes(case)
    size = int(reported / factor) + sum(added)
    return reason_for(case, size, 0) if any_met(case.rules.trigger, size, 0, case.budget) else None


async def recovered(context: ConversationContext, transport: RelayTransport) -> bytes:
    """Return the request's body with its history compacted by the upstream. Raises ``NotCompacted``.

    Asks the upstream once, with the caller's key. The upstream bills the compaction to the caller. The memory of the
    new body is charged to the request.
    """
    raw = context.body.raw
    previous = previous_response(raw)
    if previous is None:
        raise NotCompacted("only a chain of responses can be compacted")
    try:
        compact = compact_request(raw, context.route.model)
        output = _output(await _ask(context, transport, "POST", f"{RESPONSES_PATH}/compact", compact))
        calls: list[dict[str, object]] = []
        if wanted := open_calls(raw):
            stored = await _ask(context, transport, "GET", f"{RESPONSES_PATH}/{_segment(previous)}", None)
            calls = calls_in(_output(stored), wanted)
            if len(calls) < len(wanted):
                raise NotCompacted("the calls of the new outputs aren't in the earlier response")
        body = continued(raw, output, calls)
        await context.memory.more(len(body))
    except (NotCompacted, ProxyError) as error:
        reason = str(error) if isinstance(error, NotCompacted) else type(error).__name__
        log.warning("state.not_compacted", reason=reason)
        raise NotCompacted(reason) from error
    return body


def _segment(id: str) -> str:
    """Return an id as one segment of a path. Raises ``NotCompacted`` for a segment that means another path."""
    if id in (".", ".."):
        raise NotCompacted("the id of the earlier response isn't valid")
    return quote(id, safe="")


def _output(response: dict[str, object]) -> list[object]:
    output = response.get("output")
    if not isinstance(output, list) or not output:
        raise NotCompacted("no output")
    return output


async def _ask(
    context: ConversationContext, transport: RelayTransport, method: str, path: str, body: bytes | None
) -> dict[str, object]:
    """Return the JSON object that the upstream answers with, before the request's deadline.

    Raises ``NotCompacted``, and the errors of ``Connections.send``.
    """
    headers = for_other_request(for_upstream(context.scope["headers"]))
    headers = with_trace([*headers, (VIA, context.via)], context.record.trace)
    headers = transport.headers(headers, context.caller.credential)
    remaining = context.deadline - context.clock.now()
    bill = context.bill if method == "POST" else Bill()  # reading a stored response costs nothing
    try:
        with (
            context.clock.until(context.deadline),
            bill.call(context.dialect.answers.tail(), len(body or b"")) as meter,
        ):
            answer = await transport.request(method, transport.url(path), headers, body, remaining)
            meter.watch(answer)
            try:
                read = await _read(answer, context.configuration.settings.server.body_limit)
            finally:
                await answer.close()
    except TimeoutError:
        raise NotCompacted("the deadline has passed") from None
    if answer.status != 200:
        raise NotCompacted(f"status {answer.status}")
    try:
        value = msgspec.json.decode(read)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise NotCompacted("not JSON") from None
    if not isinstance(value, dict):
        raise NotCompacted("not an object")
    return value


async def _read(answer: Answer, most: int) -> bytes:
    read = bytearray()
    async for chunk in answer.body:
        read += chunk
        if len(read) > most:
            raise NotCompacted(f"longer than {most:,} bytes")
    return bytes(read)
