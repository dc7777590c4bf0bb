"""Give each new connection to the worker process with the fewest open ones.

Workers that share a listening socket race for its connections, and in a burst one of them gets nearly all. So a thread
of the parent accepts, and sends each connection to a worker over a pair of sockets. The worker reports how many it has.
The parent keeps both ends of the pair. If a worker stops, ends, or hangs, the parent takes back the connections that
the worker hasn't received, and sends them to another one.

If the parent ends or can't send connections, the workers accept from the listening sockets themselves.

After a rolling restart, workers run newer code than their parent. So the sockets and reports can't change their form.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import structlog
import uvicorn
from uvicorn.supervisors.multiprocess import Process

from proxy.server.http_protocol import BoundedProtocol

log = structlog.get_logger(__name__)

REPORT = struct.Struct("=QQ")
"""A worker's report: the messages that it has received so far, and its open connections."""

PATIENCE = 1.0
"""Seconds that a worker may take to receive a message. After that it gets no connections until it reports again."""

MOST_SENT = 64
"""Messages to a worker that it hasn't received. Buffers of socket pairs hold about 270."""

MOST_AT_ONCE = 64
"""Connections to accept before the parent reads reports again."""

PAUSE = 0.1
"""Seconds until the parent tries again after the system refused to accept, for example without a free file."""


class WorkerProcess(Process):
    """uvicorn's process of a worker, which gets its connections from an acceptor."""

    def __init__(self, acceptor: Acceptor, config: uvicorn.Config, sockets: list[socket.socket]) -> None:
        self._acceptor = acceptor
        self.here, self.there = socket.socketpair()
        self.here.setblocking(False)
        self.there.setblocking(False)
        # Reports have a pair of their own. If the parent ended and left some unread, the worker would get an error
        # for that pair, and uvloop reports it instead of calling the reader.
        self.reports, self._reporter = socket.socketpair()
        self.sent = self.received = self.open = 0
        self.since = 0.0
        """When the worker last reported, or was last sent a message after it had received all others."""
        self.hung = False
        super().__init__(config, [*sockets, self.there, self._reporter])

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for the worker. It must not have the parent's ends of the pairs."""
        own = ("_acceptor", "here", "there", "reports", "_reporter")
        return {name: value for name, value in vars(self).items() if name not in own}

    @property
    def unreceived(self) -> int:
        """Return the number of messages that the worker hasn't received."""
        return self.sent - self.received

    @property
    def free(self) -> bool:
        """Return whether the worker may get a connection."""
        return not self.hung and self.unreceived < MOST_SENT

    @property
    def server(self) -> uvicorn.Server:
        """See ``Process``."""
        if self._server is None:
            self._server = WorkerServer(self.config)
        return self._server

    def start(self) -> None:
        """See ``Process``."""
        super().start()
        self._reporter.close()  # only the worker has it now, so its end shows in the reports
        self._acceptor.add(self)

    def send(self, connection: socket.socket | None = None) -> None:
        """Send a connection, or else a message that only asks for a report."""
        if not self.unreceived:
            self.since = time.monotonic()
        socket.send_fds(self.here, [b"\0"], [] if connection is None else [connection.fileno()])
        self.sent += 1

    def take_back(self) -> list[socket.socket]:
        """Return the connections that the worker hasn't received, and won't receive anymore."""
        back: list[socket.socket] = []
        with contextlib.suppress(BlockingIOError):
            while True:
                _, files, *_ = socket.recv_fds(self.there, 1, 1)
                self.sent -= 1
                back += [socket.socket(fileno=file) for file in files]
        return back

    def close_pairs(self) -> None:
        """Send nothing anymore. A worker that still runs then listens on its own."""
        for end in (self.here, self.there, self.reports):
            end.close()


class Acceptor:
    """A thread that accepts connections while a worker is ready to get one."""

    def __init__(self, listeners: Sequence[socket.socket], backlog: int) -> None:
        self._listeners = listeners
        self._backlog = backlog
        self._selector = selectors.DefaultSelector()
        self._workers: list[WorkerProcess] = []
        """The workers that are ready. The one that got the latest connection is the last."""
        self._waiting: deque[socket.socket] = deque()
        self._accepting = False
        self._lock = threading.Lock()
        self._started: set[WorkerProcess] = set()
        """All workers that haven't stopped."""
        self._failed = False
        threading.Thread(target=self._run, name="acceptor", daemon=True).start()

    def add(self, worker: WorkerProcess) -> None:
        """Send connections to a worker from its first report until it stops or ends. Call this from any thread."""
        with self._lock:
            if self._failed:
                worker.close_pairs()
                return
            self._started.add(worker)
            # The selector notices this while the thread waits.
            self._selector.register(worker.reports, selectors.EVENT_READ, partial(self._read, worker))

    def _run(self) -> None:
        try:
            while True:
                self._step()
        except Exception as error:  # the workers can do without this thread
            log.exception("connections.acceptor_failed", error=type(error).__name__)
        with self._lock:
            self._failed = True
            for worker in self._started:
                worker.close_pairs()
        for connection in self._waiting:
            connection.close()

    def _step(self) -> None:
        expects = any(worker.unreceived and not worker.hung for worker in self._workers)
        for key, _ in self._selector.select(PATIENCE if expects else None):
            act: Callable[[], None] = key.data
            act()
        self._find_hung()
        while self._waiting and any(worker.free for worker in self._workers):
            self._send(self._waiting.popleft())
        self._accept_or_not()

    def _send(self, connection: socket.socket) -> None:
        """Send a connection to the worker with the fewest; of several, to the one that has got none for longest."""
        free = [worker for worker in self._workers if worker.free]
        worker = min(free, key=lambda each: each.open + each.unreceived)
        with connection:
            worker.send(connection)
        self._workers.remove(worker)
        self._workers.append(worker)

    def _accept_or_not(self) -> None:
        """Leave connections in the backlog of the system while no worker can get one."""
        accepting = not self._waiting and any(worker.free for worker in self._workers)
        if accepting == self._accepting:
            return
        self._accepting = accepting
        for listener in self._listeners:
            if accepting:
                listener.setblocking(False)
                listener.listen(self._backlog)
                self._selector.register(listener, selectors.EVENT_READ, partial(self._accept, listener))
            else:
                self._selector.unregister(listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(MOST_AT_ONCE):
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                log.warning("connections.not_accepted", reason=error.strerror)
                time.sleep(PAUSE)
                return
            self._waiting.append(connection)

    def _read(self, worker: WorkerProcess) -> None:
        reports = worker.reports.recv(4_096 * REPORT.size)
        if not reports:
            self._remove(worker)
            return
        worker.received, worker.open = REPORT.unpack(reports[-REPORT.size :])
        worker.since, worker.hung = time.monotonic(), False
        if worker not in self._workers:
            self._workers.append(worker)

    def _find_hung(self) -> None:
        now = time.monotonic()
        for worker in self._workers:
            if worker.unreceived and not worker.hung and now - worker.since > PATIENCE:
                worker.hung = True
                self._waiting += worker.take_back()
                worker.send()

    def _remove(self, worker: WorkerProcess) -> None:
        """Forget a worker that stops or has ended."""
        self._selector.unregister(worker.reports)
        with self._lock:
            self._started.remove(worker)
        if worker in self._workers:
            self._workers.remove(worker)
        self._waiting += worker.take_back()
        worker.close_pairs()


class WorkerServer(uvicorn.Server):
    """uvicorn's server for a worker, whose parent sends it connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._listeners: list[socket.socket] = []
        self._received = self._reported = self._open = 0
        self._arriving: set[asyncio.Task[None]] = set()
        self._reporting = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and receive connections. The last two of ``sockets`` are the worker's ends of the pairs."""
        *self._listeners, self._parent, self._reports = sockets or []
        self._parent.setblocking(False)
        self._reports.setblocking(False)
        await super().startup([])
        if self.started:
            asyncio.get_running_loop().add_reader(self._parent, self._receive)
            self._report()

    async def on_tick(self, counter: int) -> bool:
        """Report, every 0.1 seconds, that messages have arrived. Only the ends of connections are urgent."""
        if self._received > self._reported:
            self._report()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Receive the connections that the parent has sent, then stop. The parent takes back any later ones."""
        if self._parent.fileno() >= 0:
            self._receive()
        self._leave()
        if self._arriving:
            await asyncio.wait(self._arriving)  # uvicorn tells the open connections to stop
        await super().shutdown(sockets)

    def _leave(self) -> None:
        if self._parent.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._parent)
            self._parent.close()
            self._reports.close()

    def _receive(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                message, files, *_ = socket.recv_fds(self._parent, 1, 1)
                if not message:
                    self._leave()
                    self._start(self._listen())
                    return
                self._received += 1
                for file in files:
                    self._open += 1
                    self._start(self._serve_connection(socket.socket(fileno=file)))
        if self._received - self._reported >= MOST_SENT // 4:
            self._report_soon()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._arriving.add(task)
        task.add_done_callback(self._arriving.discard)

    async def _listen(self) -> None:
        """Accept connections like uvicorn's own workers."""
        for listener in self._listeners:
            loop = asyncio.get_running_loop()
            self.servers.append(await loop.create_server(self._protocol, sock=listener, backlog=self.config.backlog))

    async def _serve_connection(self, connection: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._protocol, connection)
        except OSError:  # the client has left
            connection.close()
            self._closed()

    def _protocol(self) -> Connection:
        return Connection(
            self._closed,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )

    def _closed(self) -> None:
        self._open -= 1
        self._report_soon()

    def _report_soon(self) -> None:
        """Report everything that happens in this iteration of the event loop at once."""
        if not self._reporting:
            self._reporting = True
            asyncio.get_running_loop().call_soon(self._report)

    def _report(self) -> None:
        self._reporting = False
        if self._parent.fileno() >= 0:
            # If the parent is far behind with reading, or has just ended, this report isn't needed.
            with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
                self._reports.send(REPORT.pack(self._received, self._open))
                self._reported = self._received


class Connection(BoundedProtocol):
    """A client's connection that calls ``closed`` at its end."""

    def __init__(self, closed: Callable[[], None], **given: Any) -> None:
        super().__init__(**given)
        self._closed = closed

    def connection_lost(self, exc: Exception | None) -> None:
        """See ``BoundedProtocol``."""
        super().connection_lost(exc)
        self._closed()
