"""Shorten a history that the server keeps, if a request that continues it overflows."""

from __future__ import annotations

from urllib.parse import quote

import msgspec
import structlog

from proxy.dialects.responses.state import calls_in, compact_request, continued, open_calls, previous_response
from proxy.errors import ProxyError
from proxy.http.headers import VIA, for_upstream
from proxy.pipeline.context import ConversationContext
from proxy.upstream.relay import RelayTransport
from proxy.upstream.transport import Answer

log = structlog.get_logger(__name__)

RESPONSES_PATH = "/responses"


class NotCompacted(Exception):
    """The upstream can't compact the history. The text is the reason, for the log."""


async def recovered(context: ConversationContext, transport: RelayTransport) -> bytes | None:
    """Return the request's body with its history compacted by the upstream; ``None`` if that isn't possible.

    Asks the upstream once, with the caller's key. The upstream bills the compaction to the caller. The memory of the
    new body is charged to the request.
    """
    raw = context.body.raw
    previous = previous_response(raw)
    if previous is None:
        return None
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
        return None
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
    headers = [pair for pair in for_upstream(context.scope["headers"]) if pair[0] != "accept-encoding"]
    headers = transport.headers([*headers, (VIA, context.via)], context.caller.credential)
    remaining = context.deadline - context.clock.now()
    try:
        with context.clock.until(context.deadline):
            answer = await transport.request(method, transport.url(path), headers, body, remaining)
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
