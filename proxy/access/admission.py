"""Limit concurrent requests, the queue of waiting ones, and the memory of their bodies.

The proxy refuses a request over these limits before it reads the body. Refusing is cheap, while one request too many
slows down all others. Each process counts its own requests.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from proxy.config.server import ServerSettings
from proxy.errors import Overloaded
from proxy.http.request_body import SMALL, MemoryLease
from proxy.telemetry.metrics import refused

FULL = "The proxy is at its limit of concurrent requests. Try again in a moment, or send fewer requests at a time."
NO_MEMORY = "The proxy is at its memory limit for request bodies. Try again in a moment, or send fewer bytes at a time."


class Resource:
    """A limited amount of a resource. Requests that wait get it in their order of arrival."""

    def __init__(self, total: Callable[[], float]) -> None:
        self._total = total
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.used = 0

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def take(self, amount: int, *, ahead: bool = False) -> bool:
        """Take an amount if it's free. Without ``ahead``, requests that wait go first. Return whether it was taken."""
        if (self._queue and not ahead) or self.used + amount > self._total():
            return False
        self.used += amount
        return True

    async def wait(self, amount: int, seconds: float) -> bool:
        """Wait until an amount can be taken. Return whether it was taken in time. Cancellation takes nothing."""
        entry = (amount, asyncio.get_running_loop().create_future())
        self._queue.append(entry)
        taken = entry[1]
        try:
            await asyncio.wait({taken}, timeout=seconds)
        except asyncio.CancelledError:
            if taken.done():
                self.used -= amount
            raise
        finally:
            if not taken.done():
                self._queue.remove(entry)
            self._serve()  # the next one may want less
        return taken.done()

    def give(self, amount: int) -> None:
        self.used -= amount
        if self._queue:
            self._serve()

    def _serve(self) -> None:
        while self._queue and self.used + self._queue[0][0] <= self._total():
            amount, taken = self._queue.popleft()
            self.used += amount
            taken.set_result(None)


class ConcurrencyLimit(Resource):
    """The limit on concurrent requests. ``server`` returns the current settings."""

    def __init__(self, server: Callable[[], ServerSettings]) -> None:
        super().__init__(lambda: server().max_concurrent)
        self._server = server

    async def wait_for_slot(self) -> None:
        """Wait for a slot. Raises ``Overloaded`` if the queue is full, or after ``server.queue_timeout``."""
        server = self._server()
        if self.waiting >= server.max_queue or not await self.wait(1, server.queue_timeout):
            refused("overload").inc()
            raise Overloaded(FULL)


class BodyMemory(Resource):
    """The memory for bodies, in bytes. ``server`` returns the current settings."""

    def __init__(self, server: Callable[[], ServerSettings]) -> None:
        super().__init__(lambda: server().body_memory)
        self._server = server
        self._stalled = False

    def lease(self) -> BodyLease:
        """Return the lease of one request, a context manager that gives the memory back at its end."""
        return BodyLease(self)

    async def wait_for_bytes(self, amount: int, held: int) -> None:
        """Wait for memory. Raises ``Overloaded``, at once if two bodies that hold some would wait for each other."""
        first, self._stalled = not self._stalled, self._stalled or held > 0
        try:
            if (held and not first) or not await self.wait(amount, self._server().queue_timeout):
                refused("memory").inc()
                raise Overloaded(NO_MEMORY)
        finally:
            self._stalled = self._stalled and not (held and first)


class BodyLease(MemoryLease):
    """The memory that one request holds."""

    def __init__(self, memory: BodyMemory) -> None:
        self._memory = memory

    def __enter__(self) -> BodyLease:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.shrink(0)

    def grown(self, amount: int) -> bool:
        if not self._memory.take(amount, ahead=amount <= SMALL):
            return False
        self.size += amount
        return True

    async def wait(self, amount: int) -> None:
        await self._memory.wait_for_bytes(amount, self.size)
        self.size += amount

    def shrink(self, size: int) -> None:
        if size < self.size:
            self._memory.give(self.size - size)
            self.size = size
