"""Frame server-sent events: find their ends, and write them. The dialects read their content.

See https://html.spec.whatwg.org/multipage/server-sent-events.html.

A ``Heartbeat`` sends comments to a streaming client while the proxy compacts its conversation. A summary can take
longer than the client, or a load balancer in between, waits for a first byte. So the response may start before the
upstream's. If the upstream's response isn't an event stream, it then becomes an error event.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from starlette.types import Send

from proxy.http.headers import Headers, encoded

LONGEST_EVENT = 1_000_000  # Hold back an unfinished event up to this many bytes. Forward a longer one as it arrives.

_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class EventSplitter:
    """Split a stream at the ends of events. Each byte is searched a constant number of times."""

    def __init__(self) -> None:
        self.unfinished = bytearray()

    def feed(self, chunk: bytes) -> bytes:
        """Add a chunk, and return the events that are complete now."""
        start = max(0, len(self.unfinished) - 3)
        self.unfinished += chunk
        return self.take(_end_of_events(self.unfinished, start))

    def take(self, size: int) -> bytes:
        taken = bytes(memoryview(self.unfinished)[:size])
        del self.unfinished[:size]
        return taken


class EventBuffer:
    """Forwards whole events, so that the client never gets part of an event from a stream that breaks.

    Each byte is searched and copied a constant number of times, however small the chunks are.
    """

    def __init__(self) -> None:
        self._splitter = EventSplitter()
        self.midway = False
        """True if the last forwarded bytes begin an event that is too long to hold back."""

    def feed(self, chunk: bytes) -> bytes:
        """Add a chunk, and return the bytes to forward now."""
        held = self._splitter.unfinished
        if not held:
            # Most chunks are whole events. Forward them without a copy.
            end = len(chunk) if chunk.endswith(b"\n\n") else _end_of_events(chunk)
            if end == len(chunk) or len(chunk) - end >= LONGEST_EVENT:
                self.midway = end < len(chunk)
                return chunk
        whole = self._splitter.feed(chunk)
        if len(held) >= LONGEST_EVENT:
            self.midway = True
            return whole + self._splitter.take(len(held))
        self.midway = self.midway and not whole
        return whole

    def rest(self) -> bytes:
        """Return the unfinished event when the stream has ended properly."""
        return bytes(self._splitter.unfinished)


def encode(data: bytes, name: str = "") -> bytes:
    """Return an event. ``data`` is a single line."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + data + b"\n\n"


def comment(text: str) -> bytes:
    """Return a comment, which clients ignore. ``text`` is a single line."""
    return f": {text}\n\n".encode()


def split_events(events: bytes) -> Iterator[list[bytes]]:
    whole = events[: _end_of_events(events)].removeprefix(_BYTE_ORDER_MARK)
    for event in whole.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n\n"):
        yield event.split(b"\n")


def data_of(lines: list[bytes]) -> bytes:
    """Return the data of an event, which may have several lines."""
    return b"\n".join(line[5:].lstrip(b" ") for line in lines if line.startswith(b"data:"))


def _end_of_events(chunk: bytes | bytearray, start: int = 0) -> int:
    return max(chunk.rfind(end, start) + len(end) if chunk.find(end, start) >= 0 else 0 for end in _ENDS)


COMMENT = comment("waiting for the model")

SILENT_SECONDS = 5.0  # send a comment after this much silence of a response that has begun

# nginx buffers responses by default, and comments wouldn't arrive.
_HEAD: Headers = [("content-type", "text/event-stream"), ("cache-control", "no-cache"), ("x-accel-buffering", "no")]


@dataclass(eq=False)
class Heartbeat:
    """The heartbeat of one streaming client. It's free until ``start_after_delay`` or ``follow`` is called."""

    _send: Send
    _every: float  # seconds of silence before each comment
    _since: float  # the start of the first silence, by the event loop's time
    _headers: Callable[[], Headers]  # those that are known when the response starts
    _beat: bytes = COMMENT  # the comment or event to send
    _longest: float = math.inf  # seconds without an event after which the client's own timeout may expire
    _last: float = field(init=False)
    _timer: asyncio.TimerHandle | None = None
    _sending: asyncio.Task[None] | None = None
    _busy: bool = False
    begun: bool = False
    """True if the response has started. Then its status is 200."""

    def __post_init__(self) -> None:
        self._last = self._since

    def start_after_delay(self) -> None:
        """Send comments once the client has waited long enough. Call this when a compaction starts."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(self._since + self._every, self._send_next)

    def cancel_start(self) -> None:
        """Stop, unless the response has started. Call this when the compaction has ended."""
        if not self.begun:
            self._cancel_timer()

    def follow(self) -> None:
        """Send a comment in each silence of a response whose head has been sent. Send its events with ``pass_on``."""
        self._cancel_timer()
        self.begun, self._every = True, min(self._every, SILENT_SECONDS)
        self._last = self._since = asyncio.get_running_loop().time()
        self.start_after_delay()

    async def pass_on(self, events: bytes, *, midway: bool) -> None:
        """Send a part of the response. No comment follows it if it ends ``midway`` in an event."""
        self._busy = True
        if self._sending is not None:
            await self._sending
        await self._send({"type": "http.response.body", "body": events, "more_body": True})
        self._busy, self._since = midway, asyncio.get_running_loop().time()
        self._last = self._since

    async def stop(self) -> None:
        """Stop sending comments, and wait for the last one. After this, the caller can send."""
        self._cancel_timer()
        if self._sending is not None:
            await self._sending

    def close(self) -> None:
        """Stop immediately, and drop all references to the request."""
        self._cancel_timer()
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None
        # The request refers to this object. A reference cycle would keep its body until the next garbage collection.
        self._headers = list

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _send_next(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        due = now >= self._since + self._every
        if due and not self._busy and (self._sending is None or self._sending.done()):
            first, self.begun, self._since = not self.begun, True, now
            self._sending = loop.create_task(self._send_comment(first=first))
        if now < self._last + self._longest:
            self._timer = loop.call_at((now if due else self._since) + self._every, self._send_next)

    async def _send_comment(self, *, first: bool) -> None:
        if first:
            headers = encoded([*_HEAD, *self._headers()])
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": self._beat, "more_body": True})
