"""Sending an upstream's answer to the client."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import structlog
from starlette.types import Send

from proxy.errors import UpstreamInterrupted
from proxy.headers import encoded
from proxy.upstream.lane import Headers
from proxy.upstream.opening import Opening, readable
from proxy.upstream.sse import EventBuffer

log = structlog.get_logger(__name__)


async def send_answer(send: Send, opening: Opening, extra: Headers) -> None:
    """Send an answer on as it comes, with further headers. The upstream's request ends with this, however it ends."""
    answer = opening.answer
    headers = [pair for pair in answer.headers if not pair[0].startswith("x-compaction")]
    try:
        await send({"type": "http.response.start", "status": answer.status, "headers": encoded([*headers, *extra])})
        if opening.complete:
            await send({"type": "http.response.body", "body": opening.first})
        elif opening.is_stream:
            await _send_events(send, opening)
        else:
            await _send_bytes(send, opening)
    finally:
        await answer.close()


async def _send_bytes(send: Send, opening: Opening) -> None:
    if opening.first:
        await send({"type": "http.response.body", "body": opening.first, "more_body": True})
    try:
        async for chunk in opening.answer.body:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
    except UpstreamInterrupted as error:
        # Nothing that could still be sent would say so; the server closes the connection on an unfinished answer.
        log.warning("upstream.interrupted", reason=error.message)
        return
    await send({"type": "http.response.body", "body": b""})


async def _send_events(send: Send, opening: Opening) -> None:
    buffer = EventBuffer()
    feed = buffer.feed
    try:
        if opening.first and (whole := feed(opening.first)):
            await send({"type": "http.response.body", "body": whole, "more_body": True})
        async for chunk in opening.answer.body:
            if whole := feed(chunk):
                await send({"type": "http.response.body", "body": whole, "more_body": True})
        last = buffer.rest()
    except UpstreamInterrupted as error:
        # Half an event is not passed on; an error event says that the answer is not whole.
        log.warning("upstream.interrupted", reason=error.message)
        last = b"data: " + error.body() + b"\n\n"
    await send({"type": "http.response.body", "body": last})


def failed_answer(opening: Opening, parts: Mapping[str, int]) -> Opening:
    """The upstream's own refusal, with one sentence added that names what does not fit.

    Status, type and code stay. An answer of another shape than an error with a message stays as it is.
    """
    body = readable(opening.answer, opening.first)
    try:
        value = msgspec.json.decode(body)
        error = value["error"]
        error["message"] = f"{error['message']} {sentence(parts)}"
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        return opening
    opening.first = msgspec.json.encode(value)
    opening.answer.headers = [
        pair for pair in opening.answer.headers if pair[0] not in ("content-length", "content-encoding")
    ] + [("content-length", str(len(opening.first)))]
    return opening


def sentence(parts: Mapping[str, int]) -> str:
    """What of a request does not fit, in one sentence, with sizes in tokens."""
    sized = sorted(((tokens, name) for name, tokens in parts.items() if tokens), reverse=True)
    if not sized:
        return "(The compaction proxy found nothing in this request that it could shorten.)"
    listed = ", ".join(f"{name} {tokens:,}" for tokens, name in sized)
    return (
        f"(The compaction proxy could not make the request small enough; what is left, in tokens: {listed}. "
        f"Shorten the {sized[0][1]}, or use a model with a larger window.)"
    )
