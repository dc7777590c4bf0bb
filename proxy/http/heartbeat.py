"""Send heartbeat comments to a streaming client while the proxy compacts its conversation.

A summary can take longer than the client, or a load balancer in between, waits for a first byte. So the response may
start before the upstream's. If the upstream's response isn't an event stream, it then becomes an error event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Send

from proxy.http import sse
from proxy.http.headers import Headers, encoded

COMMENT = sse.comment("compacting the conversation")

_HEAD: Headers = [("content-type", "text/event-stream"), ("cache-control", "no-cache")]


class Heartbeat:
    """The heartbeat of one streaming client. It's free until ``start_after_delay`` is called.

    ``every`` is the seconds between comments, and from ``since`` (the event loop's time) to the first one. ``headers``
    returns the headers that are known when the response starts. ``beat`` is the comment or event to send.
    """

    def __init__(
        self, send: Send, every: float, since: float, headers: Callable[[], Headers], beat: bytes = COMMENT
    ) -> None:
        self._send = send
        self._every = every
        self._since = since
        self._headers = headers
        self._beat = beat
        self._timer: asyncio.TimerHandle | None = None
        self._sending: asyncio.Task[None] | None = None
        self._ended = False
        self.begun = False
        """True if the response has started. Then its status is 200."""

    def start_after_delay(self) -> None:
        """Send comments once the client has waited long enough. Call this when a compaction starts."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(self._since + self._every, self._send_next)

    def cancel_start(self) -> None:
        """Stop, unless the response has started. Call this when the compaction has ended."""
        if not self.begun:
            self._cancel_timer()

    async def stop(self) -> None:
        """Stop sending comments, and wait for the last one. After this, the caller can send."""
        self._end()
        if self._sending is not None:
            await self._sending

    def close(self) -> None:
        """Stop immediately, and drop all references to the request."""
        self._end()
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None
        # The request refers to this object. A reference cycle would keep its body until the next garbage collection.
        self._headers = _none

    def _end(self) -> None:
        self._ended = True
        self._cancel_timer()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _send_next(self) -> None:
        first, self.begun = not self.begun, True
        self._sending = asyncio.get_running_loop().create_task(self._send_comment(first=first))

    async def _send_comment(self, *, first: bool) -> None:
        if first:
            headers = encoded([*_HEAD, *self._headers()])
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": self._beat, "more_body": True})
        if not self._ended:
            self._timer = asyncio.get_running_loop().call_later(self._every, self._send_next)


def _none() -> Headers:
    return []
