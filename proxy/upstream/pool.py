"""The pool of connections to one upstream. It never hands out a connection that the upstream has already closed.

A POST must not run twice, so the proxy doesn't retry it after its connection failed. Upstreams close idle connections
at any time, some after two seconds. So the pool checks each connection before it reuses it.
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


class Pool(aiohttp.TCPConnector):
    """aiohttp's pool, with connections that are checked before they are used again."""

    def __init__(self, **options: Any) -> None:
        super().__init__(keepalive_timeout=KEEPALIVE_SECONDS, **options)
        self._factory = functools.partial(_Handler, loop=self._loop)  # type: ignore[assignment]


class _Handler(ResponseHandler):
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
