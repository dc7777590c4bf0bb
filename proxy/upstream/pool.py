"""The pool of connections to one upstream. It never hands out a connection that the upstream has already closed.

Upstreams close idle connections at any time, some after two seconds. So the pool checks each connection before it
reuses it. An upstream may still close one while the request is on its way. ``ClosedIdle`` tells this from other losses.
"""

from __future__ import annotations

import asyncio
import functools
import select
import sys
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler

KEEPALIVE_SECONDS = 50.0
"""Keep an idle connection this long. Load balancers often close theirs after 60 or 75 seconds."""


IDLE_SECONDS = 2.0
"""Seconds after a request in which a lost connection counts as one that was idle.

Later, the upstream has probably begun to work on the request, and may have crashed.
"""


class Pool(aiohttp.TCPConnector):
    """aiohttp's pool, with connections that are checked before they are used again."""

    def __init__(self, **options: Any) -> None:
        super().__init__(keepalive_timeout=KEEPALIVE_SECONDS, **options)
        self._factory = functools.partial(_Handler, loop=self._loop)  # type: ignore[assignment]


class ClosedIdle(aiohttp.ServerDisconnectedError):
    """The upstream closed a reused connection right after the request was sent, without a byte of a response.

    It had probably closed the connection before the request arrived. Browsers retry then, too, even a POST.
    """


class _Handler(ResponseHandler):
    _requests = 0
    _sent = 0.0
    _received = False

    def set_response_params(self, **options: Any) -> None:
        """Prepare for a response. aiohttp calls this before each request."""
        self._requests += 1
        self._sent, self._received = self._loop.time(), False
        super().set_response_params(**options)

    def data_received(self, data: bytes) -> None:
        """Read bytes of a response."""
        self._received = True
        super().data_received(data)

    def set_exception(self, exc: BaseException, *cause: BaseException) -> None:
        """Fail the response. aiohttp calls this with ``OSError`` or its own errors when the connection is lost."""
        lost = isinstance(exc, OSError | aiohttp.ClientConnectionError)
        early = self._loop.time() - self._sent < IDLE_SECONDS
        if lost and early and self._requests > 1 and not self._received:
            exc = ClosedIdle()
        super().set_exception(exc, *cause)

    def is_connected(self) -> bool:
        """Return whether the connection is usable. aiohttp calls this when it takes one from the pool."""
        return super().is_connected() and not (self.transport is None or _readable(self.transport))


def _readable(transport: asyncio.BaseTransport) -> bool:
    """Return whether an idle connection has something to read: its end, or unexpected bytes.

    The event loop would only notice in its next turn. The system call takes 1 to 2 microseconds.
    """
    connection = transport.get_extra_info("socket")
    if sys.platform == "win32":
        return bool(select.select([connection.fileno()], [], [], 0)[0])
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return bool(poll.poll(0))
