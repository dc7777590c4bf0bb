"""Shorten a history that the server keeps, if a request that continues it overflows."""

from __future__ import annotations

import msgspec
import structlog

from proxy.dialects.responses.state import calls_in, compact_request, continued, open_calls, previous_response
from proxy.errors import ProxyError
from proxy.http.headers import VIA, for_upstream
from proxy.pipeline.context import ConversationContext
from proxy.upstream.relay import RelayTransport

log = structlog.get_logger(__name__)

MOST_BYTES = 64_000_000
"""Bytes of a compacted history that the proxy reads."""


async def recovered(context: ConversationContext, transport: RelayTransport) -> bytes | None:
    """Return the request's body with its history compacted by the upstream; ``None`` if that isn't possible.

    Asks the upstream once, with the caller's key. The upstream bills the compaction to the caller.
    """
    raw = context.body.raw
    previous = previous_response(raw)
    if previous is None:
        return None
    model = context.route.model
    answer = await _ask(context, transport, "POST", "/responses/compact", compact_request(raw, model))
    output = answer.get("output")
    if not isinstance(output, list) or not output:
        return None
    calls: list[dict[str, object]] = []
    if wanted := open_calls(raw):
        response = await _ask(context, transport, "GET", f"/responses/{previous}", None)
        calls = calls_in(response.get("output"), wanted)
        if len(calls) < len(wanted):
            return None
    return continued(raw, output, calls)


async def _ask(
    context: ConversationContext, transport: RelayTransport, method: str, path: str, body: bytes | None
) -> dict[str, object]:
    """Return the JSON object that the upstream answers with; empty if it answers with anything else."""
    headers = [pair for pair in for_upstream(context.scope["headers"]) if pair[0] != "accept-encoding"]
    headers = transport.headers([*headers, (VIA, context.via)], context.caller.credential)
    remaining = context.deadline - context.clock.now()
    try:
        answer = await transport.request(method, transport.url(path), headers, body, remaining)
        try:
            read = bytearray()
            async for chunk in answer.body:
                read += chunk
                if len(read) > MOST_BYTES:
                    return {}
        finally:
            await answer.close()
        value = msgspec.json.decode(bytes(read)) if answer.status == 200 else None
    except (ProxyError, msgspec.DecodeError, UnicodeDecodeError) as error:
        log.warning("state.not_compacted", path=path.split("/")[1], reason=type(error).__name__)
        return {}
    if not isinstance(value, dict):
        log.warning("state.not_compacted", path="responses", reason=f"status {answer.status}")
        return {}
    return value
