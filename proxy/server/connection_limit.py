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

LOG_SECONDS = 60.0


class ClientConnection(Protocol):
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


def close_idle(new: ClientConnection, connections: Iterable[ClientConnection]) -> None:
    """Close the quarter of the idle connections that has waited longest; without any, close the new one."""
    others = [client for client in connections if client is not new and not client.transport.is_closing()]
    idle = [(client.since, client) for client in others if client.since is not None]
    idle.sort(key=itemgetter(0))
    for _, client in idle[: len(idle) // 4 + 1] or [(0.0, new)]:
        client.transport.close()
    _log(len(idle))


_logged = -LOG_SECONDS


def _log(idle: int) -> None:
    """Log that connections were closed, at most once a minute."""
    global _logged
    now = time.monotonic()
    if now - _logged < LOG_SECONDS:
        return
    _logged = now
    log.warning("connections.limited", limit=most_connections(), idle=idle, fix="raise the open-file limit (ulimit -n)")
