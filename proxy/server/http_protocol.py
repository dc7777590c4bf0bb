"""The HTTP/1.1 server: uvicorn's httptools protocol, with the bounds and checks that it lacks, and its workers.

Only this module uses parts of uvicorn that its documents don't name.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any, ClassVar

import httptools
import structlog
import uvicorn
from prometheus_client.multiprocess import mark_process_dead
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.supervisors import Multiprocess

from proxy.errors import Malformed

log = structlog.get_logger(__name__)

HEAD_BYTES = 262_144  # the largest request head, and the largest trailer section, in bytes
MOST_FIELDS = 1_000  # header fields of a request. nginx and Apache allow at most some hundreds.
HEAD_SECONDS = 20.0  # the time a client has to send a whole request head, in seconds. nginx and Apache allow 20 to 60.

GRACE_SECONDS = 1.0
"""The time a client has to send its request when the server stops before the request has arrived, in seconds."""

REUSE_SECONDS = 0.1
"""The same for an idle connection that has already served a request: enough to read bytes that have just arrived."""

_CODING = b"transfer-encoding"
_name_of = itemgetter(0)

INVALID = "The request isn't valid HTTP/1.1. Check the client, or a proxy in front of this one."
LONG = f"The request head is longer than {HEAD_BYTES:,} bytes. Send fewer or shorter headers."
MANY = f"The request head has more than {MOST_FIELDS:,} fields. Send fewer headers."
VERSION = "The request's HTTP version isn't supported. Use HTTP/1.1."
HOSTS = "The request has more than one Host header. Send exactly one."
NO_HOST = "The request doesn't have a Host header. Send exactly one."
CODING = "The request has a Transfer-Encoding other than 'chunked'. Use 'chunked' alone, or send a Content-Length."
OLD_CODING = "An HTTP/1.0 request can't have a Transfer-Encoding. Use HTTP/1.1, or send a Content-Length."
TUNNEL = "This server doesn't open tunnels. Send the request to its own address instead of using it as an HTTP proxy."


class BoundedProtocol(HttpToolsProtocol):
    """Bound heads in size and time, refuse ambiguous requests, and ignore ``Upgrade``.

    An idle connection is closed after uvicorn's ``timeout_keep_alive``. ``head_seconds`` bounds a new connection that
    sends nothing, a head that arrives too slowly, and the rest of a body that nobody reads anymore. A server that stops
    serves the requests that are already on their way. See ``shutdown``.
    """

    head_seconds: ClassVar[float] = HEAD_SECONDS

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self._unread = 0
        self._refused: str | None = None
        self._replayed: bytes | None = None
        self._upgrades: list[tuple[bytes, bytes]] = []
        self._running: RequestResponseCycle | None = None
        self._idle = False
        self._stopping = False
        self._since = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def since(self) -> float | None:
        """When the connection last began to wait for its client, in the loop's time. ``None`` during a request."""
        waiting = self.cycle is None or self.cycle.response_complete
        return self._since if waiting else None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = self.loop.time()
        self._timer = self.loop.call_later(self.head_seconds, self._look)
        if len(self.connections) > most_connections():
            close_idle(self, [other for other in self.connections if isinstance(other, BoundedProtocol)])

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        super().connection_lost(exc)
        running = self._running
        if running is not None and not running.response_complete:
            # uvicorn only tells the newest request, and others may be in front of it.
            running.disconnected = True
            running.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._refused is not None:
            return
        if self._idle:
            self._idle = False
            self._since = self.loop.time()
        self._unread += len(data)
        try:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                self._without_upgrades(memoryview(data)[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse(self._refused or INVALID)
            return
        if self._unread > HEAD_BYTES and not self.transport.is_closing():
            self._refuse(LONG)

    def _read_on(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def _without_upgrades(self, rest: memoryview) -> None:
        """Parse a head with ``Upgrade`` again without that header, then ``rest``, the bytes that followed it.

        RFC 9110, section 7.8, lets a server ignore ``Upgrade``. The parser doesn't: it expects such a request to have
        no body, and reads the body as the next request.
        """
        while self._replayed is not None:
            head, self._replayed = self._replayed, None
            self._read_on()
            self.parser.feed_data(head)
            try:
                self.parser.feed_data(rest)
            except httptools.HttpParserUpgrade as upgrade:
                rest = rest[upgrade.args[0] :]

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header. Unlike uvicorn's, this looks for ``Expect`` in ``_check_head``."""
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Check a whole request head, then start the request."""
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise self._refusal(TUNNEL)
            self._upgrades = [pair for pair in self.headers if pair[0] == b"upgrade"]
            self._replayed = self._without_upgrade()
            return
        self._check_head()
        self._unread = 0
        if self._upgrades:
            # The application still decides on them: it refuses WebSockets.
            self.headers += self._upgrades
            self._upgrades = []
        before = self.cycle
        super().on_headers_complete()
        if before is None or before.response_complete:
            self._running = self.cycle
        if self._stopping:
            self.cycle.keep_alive = False
        self.headers = []  # those of the request are in its scope; any that follow are trailers

    def _without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def _check_head(self) -> None:
        """Note ``Expect``, and refuse a head that two servers could read differently (RFC 9112, sections 3.2 and 6)."""
        if len(self.headers) > MOST_FIELDS:
            raise self._refusal(MANY)
        version = self.parser.get_http_version()
        names = [*map(_name_of, self.headers)]
        hosts = names.count(b"host")
        if b"expect" in names:
            expected = [value.lower() for name, value in self.headers if name == b"expect"]
            self.expect_100_continue = b"100-continue" in expected
        codings = [value for name, value in self.headers if name == _CODING] if _CODING in names else None
        if codings and (len(codings) > 1 or codings[0].strip().lower() != b"chunked"):
            raise self._refusal(CODING)
        if version != "1.1":
            if version != "1.0":
                raise self._refusal(VERSION)
            if codings:
                raise self._refusal(OLD_CODING)
        if hosts != 1 and (hosts or version == "1.1"):
            raise self._refusal(HOSTS if hosts else NO_HOST)

    def _refusal(self, message: str) -> Malformed:
        self._refused = message
        return Malformed(message)

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._replayed is None:
            self._unread = 0
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Start the next pipelined request, or wait for one. Unlike uvicorn's, this sets a timer only to stop."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            following, app = self.pipeline.pop()
            self._running = following
            self._start_asgi_task(following, app)
            return
        self._since = self.loop.time()
        self._idle = not self.cycle.more_body
        if self._stopping:
            self._wait_to_stop()

    def shutdown(self) -> None:
        """Close the connection after its next response, or after a short wait for a request. The server calls this.

        uvicorn closes a connection at once if it waits for a request, or right after a response that has begun without
        ``connection: close``. A request that is then on its way gets a reset instead of a response. Here it gets one,
        with ``connection: close``.
        """
        self._stopping = True
        if self.since is not None:
            self._wait_to_stop()
        elif not self.cycle.response_started:
            self.cycle.keep_alive = False

    def _wait_to_stop(self) -> None:
        """Give the client a short time to send a request."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(REUSE_SECONDS if self._idle else GRACE_SECONDS, self._stop_waiting)

    def _stop_waiting(self) -> None:
        """Close the connection unless a request has arrived. Its response closes the connection."""
        self._timer = None
        if self.since is not None:
            self.transport.close()

    def _look(self) -> None:
        """Close the connection if its client has kept it waiting for too long; else look again later."""
        wait = self.head_seconds
        if self.since is not None:
            limit = self.timeout_keep_alive if self._idle else self.head_seconds
            wait = min(wait, self._since + limit - self.loop.time())
            if wait <= 0:
                self._timer = None
                self.transport.close()
                return
        self._timer = self.loop.call_later(wait, self._look)

    def _refuse(self, message: str) -> None:
        """Answer bytes that aren't a request, and close the connection.

        Responses to earlier requests come first. If the response to this request has begun, it breaks off.
        """
        self._refused = message
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if not cycle.more_body:
                cycle.keep_alive = False
                return
            if cycle.response_started or self.pipeline:
                self.transport.close()
                return
        error = Malformed(message)
        body = error.body()
        head = (
            f"HTTP/1.1 {error.status} Bad Request\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        log.warning("request.refused", reason=message)
        self.transport.write(head.encode() + body)
        self.transport.close()


RESERVED = 64  # open files for everything other than requests: the store, the log, libraries, and listening sockets

LOG_SECONDS = 60.0

_logged = -LOG_SECONDS


@functools.cache
def most_connections() -> float:
    """Return how many clients may be connected: half of the open files, since a request also needs one upstream."""
    if sys.platform == "win32":
        return float("inf")
    import resource

    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return float("inf") if files == resource.RLIM_INFINITY else max(16, (files - RESERVED) // 2)


def close_idle(new: BoundedProtocol, connections: Iterable[BoundedProtocol]) -> None:
    """Close the quarter of the idle connections that has waited longest; without any, close the new one."""
    others = [client for client in connections if client is not new and not client.transport.is_closing()]
    idle = [(client.since, client) for client in others if client.since is not None]
    idle.sort(key=itemgetter(0))
    for _, client in idle[: len(idle) // 4 + 1] or [(0.0, new)]:
        client.transport.close()
    global _logged
    now = time.monotonic()
    if now - _logged >= LOG_SECONDS:  # at most once a minute
        _logged = now
        fix = "raise the open-file limit (ulimit -n)"
        log.warning("connections.limited", limit=most_connections(), idle=len(idle), fix=fix)


class WorkerPool(Multiprocess):
    """uvicorn's parent of the worker processes. Each worker reloads the configuration on its own.

    ``config.app`` makes the application of a worker, and its ``current`` returns the one for the next worker.
    ``ready`` is called once, when all workers take requests.
    """

    def __init__(self, config: uvicorn.Config, sockets: list[socket.socket], ready: Callable[[], None]) -> None:
        super().__init__(config, sockets)
        self._ready: Callable[[], None] | None = ready
        self._workers: set[int | None] = set()

    def keep_subprocess_alive(self) -> None:
        # A worker that replaces a dead one while the files are invalid needs the last valid configuration.
        self.config.app = self.config.app.current()  # type: ignore[union-attr]
        before = {process.pid: process for process in self.processes}
        super().keep_subprocess_alive()
        if self._ready is not None and all(process.is_ready(timeout=1) for process in self.processes):
            self._ready()
            self._ready = None
        alive = {process.pid for process in self.processes}
        for pid in before.keys() - alive:
            log.warning("worker.died", pid=pid, exit_status=before[pid].exitcode)
        for ended in self._workers - alive:
            mark_process_dead(ended)  # type: ignore[no-untyped-call]
        self._workers = alive

    def handle_hup(self) -> None:
        """Pass SIGHUP on. A worker that is still starting reads the configuration as it is now."""
        for process in self.processes:
            if process.pid is not None and process.is_ready(timeout=1):
                os.kill(process.pid, signal.SIGHUP)
