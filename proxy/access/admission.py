"""Limit concurrent requests, the queue of waiting ones, and the memory of their bodies.

The proxy refuses a request over these limits before it reads the body. Refusing is cheap, while one request too many
slows down all others. Each process counts its own requests.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from proxy.config.settings import ServerSettings
from proxy.errors import Overloaded
from proxy.http.request_body import SMALL
from proxy.telemetry.metrics import refused

FULL = "The proxy is at its limit of concurrent requests. Try again in a moment, or send fewer requests at a time."
NO_MEMORY = "The proxy is at its memory limit for request bodies. Try again in a moment, or send fewer bytes at a time."


class Capacity:
    """A limited amount of a resource. Requests that wait get it in their order of arrival."""

    def __init__(self, most: Callable[[], float]) -> None:
        """``most`` returns the total amount."""
        self._most = most
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.used = 0

    @property
    def waiting(self) -> int:
        """The number of requests that wait."""
        return len(self._waiting)

    def take(self, amount: int, *, ahead: bool = False) -> bool:
        """Take an amount if it's free. Without ``ahead``, requests that wait go first. Return whether it was taken."""
        if (self._waiting and not ahead) or self.used + amount > self._most():
            return False
        self.used += amount
        return True

    async def wait(self, amount: int, seconds: float) -> bool:
        """Wait until an amount can be taken. Return whether it was taken in time. Cancellation takes nothing."""
        place = (amount, asyncio.get_running_loop().create_future())
        given = place[1]
        self._waiting.append(place)
        try:
            await asyncio.wait({given}, timeout=seconds)
        except asyncio.CancelledError:
            if given.done():
                self.give(amount)
            else:
                self._leave(place)
            raise
        if given.done():
            return True
        self._leave(place)
        return False

    def give(self, amount: int) -> None:
        """Give back an amount."""
        self.used -= amount
        self._serve()

    def _leave(self, place: tuple[int, asyncio.Future[None]]) -> None:
        self._waiting.remove(place)
        self._serve()  # the next one may want less

    def _serve(self) -> None:
        while self._waiting and self.used + self._waiting[0][0] <= self._most():
            amount, given = self._waiting.popleft()
            self.used += amount
            given.set_result(None)


class ConcurrencyLimit:
    """The limit on concurrent requests. ``server`` returns the current settings."""

    def __init__(self, server: Callable[[], ServerSettings]) -> None:
        self._server = server
        self.places = Capacity(lambda: server().max_concurrent)

    async def wait(self) -> None:
        """Wait for a place. Raises ``Overloaded`` if the queue is full, or the time is over."""
        server = self._server()
        if self.places.waiting >= server.max_queue or not await self.places.wait(1, server.queue_timeout):
            refused("overload").inc()
            raise Overloaded(FULL)


class BodyMemory:
    """The memory for bodies, in bytes. ``server`` returns the current settings."""

    def __init__(self, server: Callable[[], ServerSettings]) -> None:
        self._server = server
        self.bytes = Capacity(lambda: server().body_memory)

    def holding(self) -> BodyLease:
        """Return the lease of one request, a context manager that gives the memory back at its end."""
        return BodyLease(self)

    async def wait(self, amount: int) -> None:
        """Wait for memory. Raises ``Overloaded``."""
        if not await self.bytes.wait(amount, self._server().queue_timeout):
            refused("memory").inc()
            raise Overloaded(NO_MEMORY)


class BodyLease:
    """The memory that one request holds. ``size`` is in bytes."""

    def __init__(self, memory: BodyMemory) -> None:
        self._memory = memory
        self.size = 0

    def __enter__(self) -> BodyLease:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.shrink(0)

    def grown(self, amount: int) -> bool:
        """Take this many more bytes if they're free. Return whether they were taken."""
        if not self._memory.bytes.take(amount, ahead=amount <= SMALL):
            return False
        self.size += amount
        return True

    async def wait(self, amount: int) -> None:
        """Wait for this many more bytes. Raises ``Overloaded``."""
        await self._memory.wait(amount)
        self.size += amount

    async def more(self, amount: int) -> None:
        """Take this many bytes more; wait if they aren't free. Raises ``Overloaded``."""
        if not self.grown(amount):
            await self.wait(amount)

    def shrink(self, size: int) -> None:
        """Keep only this many bytes."""
        if size < self.size:
            self._memory.bytes.give(self.size - size)
            self.size = size
