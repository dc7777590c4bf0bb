"""A bound on the clients' connections, so that the process doesn't run out of open files."""

from __future__ import annotations

import asyncio
import functools
import sys
import time
from collections.abc import Iterable
from operator import itemgetter
from typing import Protocol

import structlog

log = structlog.get_logger(__name__)

RESERVED = 64
"""Open files for everything other than requests: the store, the log, libraries, and listening sockets."""

TOLD_SECONDS = 60.0


class Guest(Protocol):
    """A client's connection. ``since`` is when it began to wait for its client; ``None`` during a request."""

    transport: asyncio.Transport

    @property
    def since(self) -> float | None: ...


@functools.cache
def most_connections() -> float:
    """Return how many clients may be connected: half of the open files, since a request also needs one upstream."""
    if sys.platform == "win32":
        return float("inf")
    import resource

    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return float("inf") if files == resource.RLIM_INFINITY else max(16, (files - RESERVED) // 2)


def make_room(new: Guest, connections: Iterable[Guest]) -> None:
    """Close the quarter of the idle connections that has waited longest; without any, close the new one."""
    others = [guest for guest in connections if guest is not new and not guest.transport.is_closing()]
    idle = [(guest.since, guest) for guest in others if guest.since is not None]
    idle.sort(key=itemgetter(0))
    for _, guest in idle[: len(idle) // 4 + 1] or [(0.0, new)]:
        guest.transport.close()
    _tell(len(idle))


_told = -TOLD_SECONDS


def _tell(idle: int) -> None:
    """Log that connections were closed, at most once a minute."""
    global _told
    now = time.monotonic()
    if now - _told < TOLD_SECONDS:
        return
    _told = now
    log.warning("connections.limited", limit=most_connections(), idle=idle, fix="raise the open-file limit (ulimit -n)")
