"""One thread for the CPU-bound work of all requests, which competes with the event loop for the interpreter.

Tenants take turns. A job pauses between two texts, and between the parts of a long one. Then a job of less than half
its size runs first, and a job whose client has left ends. So a job waits for one other job of each tenant at most, and
only for the next pause of a job of more than twice its size.

Python's lock gives the thread and the event loop turns of equal length, however many small requests wait for the loop.
So the thread sleeps at a pause while the loop is busy, for a multiple of its own time at most.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from proxy.compaction.pieces import begin_thread

T = TypeVar("T")

DEEPEST = 8
"""Jobs that wait within each other for a smaller one. Each needs some of the stack."""

BUSY_SECONDS = 0.0002
"""CPU seconds of the other threads between two looks, or during a sleep, that show that the event loop is busy."""

LOOKS_SECONDS = 0.0005
"""Seconds between two looks at these CPU seconds, because each takes some microseconds."""

SLEEP_SECONDS, LONGEST_SECONDS, SLEPT = 0.001, 0.005, 3
"""The seconds of a sleep, and of all sleeps at a pause. Those take at most so many times the thread's own CPU seconds
since the last ones."""


class _Job(Generic[T]):
    __slots__ = ("future", "left", "size", "work")

    def __init__(self, work: Callable[[], T], size: int) -> None:
        self.work = work
        self.size = size
        self.future: Future[T] = Future()
        self.left = False

    def run(self) -> None:
        if self.future.set_running_or_notify_cancel():
            try:
                self.future.set_result(self.work())
            except BaseException as error:  # noqa: BLE001 - the code that awaits the future gets it
                self.future.set_exception(error)
                del self  # the error's traceback would form a reference cycle with it


class CountingThread:
    """The thread, and the jobs that wait for it, by tenant."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[_Job[object]]] = {}
        self._running: list[_Job[object]] = []
        self._own = self._others = self._next_look = 0.0
        self._pool = ThreadPoolExecutor(
            1, thread_name_prefix="counting", initializer=begin_thread, initargs=(self._pause,)
        )

    async def run(self, work: Callable[[], T], tenant: str, size: int) -> T:
        """Do work in the thread. ``size`` is the bytes to process."""
        job = _Job(work, size)
        with self._lock:
            self._waiting.setdefault(tenant, deque()).append(job)  # type: ignore[arg-type]  # nothing reads results
        self._pool.submit(self._next)
        try:
            return await asyncio.wrap_future(job.future)
        finally:
            job.left = True
            del job  # see `_Job.run`

    def close(self) -> None:
        """End the thread at the next pause, and cancel the jobs that wait."""
        with self._lock:
            for job in [*self._running, *(job for jobs in self._waiting.values() for job in jobs)]:
                job.left = True
                job.future.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _next(self, below: float = float("inf")) -> None:
        """Run the first job with a size below a limit, unless an earlier call has run it."""
        with self._lock:
            found = next(
                ((tenant, job) for tenant, jobs in self._waiting.items() for job in jobs if job.size < below), None
            )
            if found is None:
                return
            tenant, job = found
            jobs = self._waiting.pop(tenant)  # its other jobs are after those of other tenants
            jobs.remove(job)
            if jobs:
                self._waiting[tenant] = jobs
        self._running.append(job)
        self._others, self._next_look = math.inf, time.perf_counter() + LOOKS_SECONDS  # short jobs don't look
        job.run()
        self._running.pop()

    def _pause(self) -> None:
        if self._running[-1].left:
            raise asyncio.CancelledError
        if self._waiting and len(self._running) < DEEPEST:
            self._next(below=self._running[-1].size / 2)
        if (now := time.perf_counter()) >= self._next_look:
            own, others = _cpu()
            latest = now + min(SLEPT * (own - self._own), LONGEST_SECONDS)
            while others - self._others > BUSY_SECONDS and now < latest:
                self._others = others
                time.sleep(SLEEP_SECONDS)
                own, others = _cpu()
                now = time.perf_counter()
            self._own, self._others, self._next_look = own, others, now + LOOKS_SECONDS


def _cpu() -> tuple[float, float]:
    """Return the CPU seconds of this thread, and of the other threads of the process."""
    own = time.thread_time()
    return own, time.process_time() - own
