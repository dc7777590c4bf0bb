"""Clients that close only the sending side of their connection and still wait for the response (``nc -N``).

On the network this looks exactly like a client that has left: both send FIN. The two differ only in the reply when the
server sends something. A connection that its client has closed is reset; one that is half closed isn't. So the proxy
sends an interim response, which every HTTP/1.1 client must skip (RFC 9110, section 15.2), and looks for the reset.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Protocol

PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"

FIRST_SECONDS = 0.005
LONGEST_SECONDS = 1.0
"""The proxy looks for a reset after 5 ms, then after twice as long each time, and at least once a second.

It repeats the probe because a relay in between, such as Docker's, forwards the reset only when its second write fails.
"""


class Cycle(Protocol):
    """The fields of uvicorn's request that this module uses."""

    response_started: bool
    response_complete: bool


class HalfClosed:
    """Find out whether the client of a request in work has left, from now until its response is complete.

    Aborts the transport if it has. The transport's protocol then sees a lost connection.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, cycle: Cycle) -> None:
        self._loop = loop
        self._transport = transport
        self._cycle = cycle
        self._wait = FIRST_SECONDS
        self._timer: asyncio.TimerHandle | None = None
        self._probe()

    def close(self) -> None:
        """Stop looking."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _probe(self) -> None:
        if not self._cycle.response_started:
            self._transport.write(PROBE)
        self._timer = self._loop.call_later(self._wait, self._look)
        self._wait = min(2 * self._wait, LONGEST_SECONDS)

    def _look(self) -> None:
        self._timer = None
        if self._transport.is_closing() or self._cycle.response_complete:
            return
        connection: socket.socket = self._transport.get_extra_info("socket")
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._transport.abort()
            return
        self._probe()
