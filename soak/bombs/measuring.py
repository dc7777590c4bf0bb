"""Send a request to a server process and measure its cost: CPU, memory, and delays for other clients."""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import psutil

POLLED_EVERY = 0.01
"""Seconds between two requests of ``/livez``."""

SAMPLED_EVERY = 0.005
"""Seconds between two readings of the memory in use."""

REST = 0.05
"""Seconds between two readings of CPU time after a response."""

IDLE = 0.2
"""CPU seconds a second below which the server counts as idle. Polling takes up to 0.1."""

TIMEOUT = 60.0
"""Seconds until a request counts as unanswered."""


@dataclass(frozen=True)
class Cost:
    """The cost of a request.

    ``status`` is zero without a complete response. ``cpu`` is in seconds of all threads of the server, including
    polling and work after the response. ``wait`` is the longest time of ``/livez``, in seconds. ``grown`` is the peak
    of the server's resident memory in bytes, minus its memory before the request.
    """

    status: int
    cpu: float
    wait: float
    grown: int


def measured(port: int, pid: int, path: str, body: bytes, headers: Sequence[tuple[str, str]]) -> Cost:
    """Send a request to a server on loopback, and read the response."""
    process = psutil.Process(pid)
    before, begun = process.memory_info().rss, _cpu(pid)
    waits, memory = [0.0], [before]
    with _polling(port, waits), _sampling(process, memory):
        status = _status(port, path, body, headers)
        cpu = _settled(pid) - begun
    return Cost(status, cpu, max(waits), max(memory) - before)


def _cpu(pid: int) -> float:
    # This clock id is the one of clock_getcpuclockid(3) for another process. /proc has a lower resolution.
    return time.clock_gettime((~pid << 3) | 2)


def _settled(pid: int) -> float:
    """Wait until a process only responds to ``/livez``. Return its CPU time."""
    last = _cpu(pid)
    while True:
        time.sleep(REST)
        now = _cpu(pid)
        if now - last < IDLE * REST:
            return now
        last = now


def _status(port: int, path: str, body: bytes, headers: Sequence[tuple[str, str]]) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
    try:
        connection.request("POST", path, body, dict(headers))
        response = connection.getresponse()
        while response.read(1 << 20):
            pass
    except (OSError, http.client.HTTPException):
        return 0
    else:
        return response.status
    finally:
        connection.close()


@contextlib.contextmanager
def _polling(port: int, waits: list[float]) -> Iterator[None]:
    """Request ``/livez`` from a thread until the block ends. Append the seconds of each response to ``waits``."""
    over = threading.Event()

    def poll() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
        while not over.is_set():
            begun = time.perf_counter()
            try:
                connection.request("GET", "/livez")
                connection.getresponse().read()
            except (OSError, http.client.HTTPException):
                # A missing response counts with the timeout. The next request opens another connection.
                connection.close()
                waits.append(TIMEOUT)
            waits.append(time.perf_counter() - begun)
            over.wait(POLLED_EVERY)
        connection.close()

    with _thread(poll, over):
        yield


@contextlib.contextmanager
def _sampling(process: psutil.Process, memory: list[int]) -> Iterator[None]:
    """Add the resident memory of a process to ``memory`` until the block ends."""
    over = threading.Event()

    def sample() -> None:
        while not over.wait(SAMPLED_EVERY):
            memory.append(process.memory_info().rss)

    with _thread(sample, over):
        yield


@contextlib.contextmanager
def _thread(work: Callable[[], None], over: threading.Event) -> Iterator[None]:
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
