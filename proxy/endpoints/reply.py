"""Send an upstream's response to the client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Awaitable, Callable

import structlog
from starlette.types import Send

from proxy.errors import ErrorShape, ProxyError, UpstreamInterrupted, anthropic_type, error_body
from proxy.http import sse
from proxy.http.headers import encoded
from proxy.http.request_body import Sent, note_complete, note_error
from proxy.overflow.errors import as_error
from proxy.pipeline.response_start import ResponseStart, readable
from proxy.pipeline.sending import Tap
from proxy.upstream.transport import Headers

log = structlog.get_logger(__name__)

LINGER_SECONDS = 2.0  # seconds to read the rest of a stream whose client has left, if a spending limit applies
QUOTED_BYTES = 500  # bytes of an error that isn't JSON to quote in an error event

_LAST = rb"(?:message_stop|response\.(?:completed|incomplete|failed))"
_ENDS = re.compile(rb"^(?:data: ?\[DONE\]|event: ?" + _LAST + rb'\r?$|data: ?{"type": ?"' + _LAST + rb'")', re.M)
"""The last event of a stream, in each API."""

_NUMBER = re.compile(rb'"sequence_number": ?(\d{1,15})')


Hide = Callable[[bytes], bytes]  # returns whole events without what the client didn't ask for


async def send_answer(
    send: Send,
    start: ResponseStart,
    extra: Headers,
    tap: Tap | None = None,
    *,
    shape: ErrorShape = "openai",
    hide: Hide | None = None,
    heartbeat: sse.Heartbeat | None = None,
    linger: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Forward an answer as it arrives, with further headers. Close the upstream's request at the end, or on an error.

    ``tap`` receives the bytes that arrive. ``shape`` is that of the error event which ends an interrupted stream.
    ``hide`` changes the events of a stream, and ``heartbeat`` fills its silences. ``linger`` reads the rest of the
    upstream's answer. It has ``LINGER_SECONDS`` after the client has left, because the usage comes last.

    If the heartbeat has sent the head of an event stream, a comment reports ``extra``, the headers that weren't known
    then. A response that isn't a stream becomes an error event.
    """
    answer, begun = start.answer, heartbeat is not None and heartbeat.begun
    headers = [pair for pair in answer.headers if not pair[0].startswith("x-compaction")]
    if start.is_stream and (hide is not None or not start.complete):
        # If the stream breaks, an error event replaces the missing part, so the length changes.
        headers = [pair for pair in headers if pair[0] != "content-length"]
    try:
        if begun:
            comment = sse.comment(", ".join(f"{name}: {value}" for name, value in extra))
            await send({"type": "http.response.body", "body": comment, "more_body": True})
        if tap is not None:
            await tap.begin(start.first)
        if not begun:
            await send({"type": "http.response.start", "status": answer.status, "headers": encoded([*headers, *extra])})
        if begun and (not start.is_stream or answer.status >= 400):
            await send({"type": "http.response.body", "body": _event(await _error_of(start, shape), shape)})
        elif start.complete:
            await send(
                {"type": "http.response.body", "body": hide(start.first) if hide and start.is_stream else start.first}
            )
        elif start.is_stream:
            await _send_events(send, start, tap, shape, hide, heartbeat)
        else:
            await _send_bytes(send, start, tap)
    except asyncio.CancelledError:
        if linger is not None and not (isinstance(send, Sent) and send.complete):
            with contextlib.suppress(TimeoutError, UpstreamInterrupted):
                async with asyncio.timeout(LINGER_SECONDS):
                    await linger()
        raise
    finally:
        await answer.close()


async def send_error_event(send: Send, error: ProxyError, shape: ErrorShape = "openai") -> None:
    """End an event stream with an error of the proxy."""
    note_error(send, error)
    await send({"type": "http.response.body", "body": _event(error.body(shape), shape)})


def _event(data: bytes, shape: ErrorShape, sent: bytes = b"") -> bytes:
    """Return the event for an error's body. ``sent`` are the last events before it, which may have numbers."""
    if shape == "responses":
        stated = json.loads(data)["error"]
        error = stated if isinstance(stated, dict) else {"message": stated}
        numbers = _NUMBER.findall(sent)
        # Documented are fields of the event. OpenAI sends an object, and its SDK raises an exception for it.
        fields = {name: error.get(name) for name in ("code", "message", "param")} | {"error": error}
        event = {"type": "error", "sequence_number": int(numbers[-1]) + 1 if numbers else 0, **fields}
        data = json.dumps(event, separators=(",", ":")).encode()
    return sse.encode(data, "" if shape == "openai" else "error")


async def _error_of(start: ResponseStart, shape: ErrorShape) -> bytes:
    """Return a response that isn't a stream as a one-line error, the upstream's own if it has one."""
    status = start.answer.status
    body = await readable(start.answer, start.first)
    error = as_error(status, body)
    if error and shape == "anthropic":
        error = error if error.get("type") == "error" else {"type": "error", "error": error.get("error")}
    if error:
        # Python's encoder accepts everything that its parser accepts, such as half of a surrogate pair.
        return json.dumps(error, separators=(",", ":")).encode()
    if status >= 400:
        text = body[:QUOTED_BYTES].decode("utf-8", "replace").strip()
        said = f"The upstream returned status {status}: {text}"
    else:
        status = UpstreamInterrupted.status
        said = f"The upstream returned status {start.answer.status} but no event stream. "
        said += "Send the request without 'stream', or try again."
    if shape == "anthropic":
        return json.dumps({"type": "error", "error": {"type": anthropic_type(status), "message": said}}).encode()
    kind = "invalid_request_error" if status < 500 else "server_error"
    return error_body(said, type=kind, code="upstream_error")


async def _send_bytes(send: Send, start: ResponseStart, tap: Tap | None) -> None:
    if start.first:
        await send({"type": "http.response.body", "body": start.first, "more_body": True})
    try:
        async for chunk in start.answer.body:
            if tap is not None:
                tap.add(chunk)
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
    except UpstreamInterrupted as error:
        # There is no way to report this in the body. The server closes the connection after an incomplete response.
        note_error(send, error)
        log.warning("upstream.interrupted", reason=error.message)
        return
    await send({"type": "http.response.body", "body": b""})


async def _send_events(
    send: Send,
    start: ResponseStart,
    tap: Tap | None,
    shape: ErrorShape,
    hide: Hide | None,
    heartbeat: sse.Heartbeat | None,
) -> None:
    buffer = sse.EventBuffer()
    feed = buffer.feed if hide is None else lambda chunk: hide(buffer.feed(chunk))
    if heartbeat is None:
        heartbeat = sse.Heartbeat(send, 0, 0, list)  # it never starts
    else:
        heartbeat.follow()
    whole = sent = b""
    try:
        if start.first and (whole := feed(start.first)):
            await heartbeat.pass_on(whole, midway=buffer.midway)
            sent = whole
        async for chunk in start.answer.body:
            if tap is not None:
                tap.add(chunk)
            if whole := feed(chunk):
                await heartbeat.pass_on(whole, midway=buffer.midway)
                sent = whole
        last = buffer.rest() if hide is None else hide(buffer.rest())
    except asyncio.CancelledError:
        heartbeat.close()
        # Some clients disconnect at the last event, although the upstream hasn't ended the stream yet.
        if _ENDS.search(sent):
            note_complete(send)
        raise
    except UpstreamInterrupted as error:
        # The proxy drops the incomplete event and sends an error event.
        note_error(send, error)
        log.warning("upstream.interrupted", reason=error.message)
        last = (b"\n\n" if buffer.midway else b"") + _event(error.body(shape), shape, sent)
    await heartbeat.stop()
    await send({"type": "http.response.body", "body": last})
