"""Comments that keep a streaming client connected while its conversation is being compacted.

A summary can take longer than the client, or a load balancer before it, waits for a first byte. So the response
begins before it is known how it ends, and what is not an event stream by then becomes an error event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Send

from proxy.http.headers import Headers, encoded

COMMENT = b": compacting the conversation\n\n"

_HEAD: Headers = [("content-type", "text/event-stream"), ("cache-control", "no-cache")]


class Keepalive:
    """The line to one streaming client. Costs nothing until ``watch`` is called.

    ``every`` is in seconds, from ``since`` (the event loop's time) and between comments. ``headers`` gives what is
    known of the outcome when the response begins.
    """

    def __init__(self, send: Send, every: float, since: float, headers: Callable[[], Headers]) -> None:
        self._send = send
        self._every = every
        self._since = since
        self._headers = headers
        self._timer: asyncio.TimerHandle | None = None
        self._sending: asyncio.Task[None] | None = None
        self._ended = False
        self.begun = False
        """Whether the response has begun: its status is 200, whatever comes."""

    def watch(self) -> None:
        """From now on the client is waiting for a compaction: it gets comments once it has waited long enough."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(self._since + self._every, self._speak)

    def unwatch(self) -> None:
        """The compaction has ended. A response that has begun goes on getting comments, another does not begin."""
        if not self.begun:
            self._cancel_timer()

    async def hush(self) -> None:
        """No more comments: somebody else sends from here on."""
        self._end()
        if self._sending is not None:
            await self._sending

    def close(self) -> None:
        """End everything at once, however far it is. Nothing of the request is held any more."""
        self._end()
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None
        # The request has this line; what knew each other would stay, body and all, until it is collected.
        self._headers = _none

    def _end(self) -> None:
        self._ended = True
        self._cancel_timer()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _speak(self) -> None:
        first, self.begun = not self.begun, True
        self._sending = asyncio.get_running_loop().create_task(self._say(first=first))

    async def _say(self, *, first: bool) -> None:
        if first:
            headers = encoded([*_HEAD, *self._headers()])
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": COMMENT, "more_body": True})
        if not self._ended:
            self._timer = asyncio.get_running_loop().call_later(self._every, self._speak)


def _none() -> Headers:
    return []
