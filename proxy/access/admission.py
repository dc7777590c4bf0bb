"""How much is taken on at once: requests in work, those that wait for a place, and the memory of their bodies.

Whoever finds no room in time is told so before the body is read: a refusal costs next to nothing, while a request too
many makes all others slower. Each process counts for itself.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from proxy.config.settings import ServerSettings
from proxy.errors import Overloaded
from proxy.http.request_body import SMALL
from proxy.telemetry.metrics import refused

FULL = "This proxy has all the requests in work that it can take on. Try again in a moment, with fewer at a time."
NO_MEMORY = "This proxy holds as many bytes of requests as it can take on. Try again in a moment, with fewer at a time."


class Capacity:
    """Something of which there is only so much, given to those who wait in the order they came."""

    def __init__(self, most: Callable[[], float]) -> None:
        """``most`` says how much there is."""
        self._most = most
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.used = 0

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def take(self, amount: int, *, ahead: bool = False) -> bool:
        """Take an amount if it is there and nobody waits, or with ``ahead`` whoever waits; whether it was taken."""
        if (self._waiting and not ahead) or self.used + amount > self._most():
            return False
        self.used += amount
        return True

    async def wait(self, amount: int, seconds: float) -> bool:
        """Wait until an amount can be taken; whether it was, in time. Whoever is cancelled has taken nothing."""
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
        """Give back what was taken."""
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
    """The places for requests. ``server`` gives the settings in force."""

    def __init__(self, server: Callable[[], ServerSettings]) -> None:
        self._server = server
        self.places = Capacity(lambda: server().max_concurrent)

    async def wait(self) -> None:
        """Wait for a place. Raises ``Overloaded`` where the queue is full, or the time is up."""
        server = self._server()
        if self.places.waiting >= server.max_queue or not await self.places.wait(1, server.queue_timeout):
            refused("overload").inc()
            raise Overloaded(FULL)


class BodyMemory:
    """The memory for bodies, in bytes. ``server`` gives the settings in force."""

    def __init__(self, server: Callable[[], ServerSettings]) -> None:
        self._server = server
        self.bytes = Capacity(lambda: server().body_memory)

    def holding(self) -> BodyLease:
        """The part of one request, as a context: it is given back at the end."""
        return BodyLease(self)

    async def wait(self, amount: int) -> None:
        """Wait for memory. Raises ``Overloaded``."""
        if not await self.bytes.wait(amount, self._server().queue_timeout):
            refused("memory").inc()
            raise Overloaded(NO_MEMORY)


class BodyLease:
    """What one request holds of the memory; ``size`` is in bytes."""

    def __init__(self, memory: BodyMemory) -> None:
        self._memory = memory
        self.size = 0

    def __enter__(self) -> BodyLease:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.shrink(0)

    def grown(self, amount: int) -> bool:
        """Take so much more, if it is there; whether it was taken."""
        if not self._memory.bytes.take(amount, ahead=amount <= SMALL):
            return False
        self.size += amount
        return True

    async def wait(self, amount: int) -> None:
        """Wait for so much more. Raises ``Overloaded``."""
        await self._memory.wait(amount)
        self.size += amount

    async def more(self, amount: int) -> None:
        """Take this many bytes more; wait if they aren't free. Raises ``Overloaded``."""
        if not self.grown(amount):
            await self.wait(amount)

    def shrink(self, size: int) -> None:
        """Keep so much only."""
        if size < self.size:
            self._memory.bytes.give(self.size - size)
            self.size = size
