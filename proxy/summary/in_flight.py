"""Single flight: concurrent callers for one checkpoint wait for the same summary.

The proxy continues to make a summary after the client that started it disconnects, within bounds.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

import structlog

log = structlog.get_logger(__name__)

V = TypeVar("V")

LEFT_OF_A_TENANT = 8
"""Maximum summaries per tenant that continue after their clients disconnect."""

LEFT = 32
"""Maximum summaries per process that continue. Each one holds its conversation in memory."""

Place = tuple[str, ...]
"""A tenant and the key of a checkpoint."""


class InFlight:
    """A summary in progress, and the number of callers that wait for it."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self.task = task
        self.waiting = 0


class SingleFlight(Generic[V]):
    """Run at most one task per place."""

    def __init__(self) -> None:
        self._flights: dict[Place, InFlight] = {}

    def __contains__(self, place: Place) -> bool:
        return place in self._flights

    @property
    def tasks(self) -> list[asyncio.Task[V]]:
        """Return the tasks in progress."""
        return [flight.task for flight in self._flights.values()]

    async def run(self, place: Place, make: Callable[[], Coroutine[Any, Any, V]]) -> V:
        """Return the result of the task for a place. Start the task if none is in progress."""
        flight = self._flights.get(place)
        if flight is None:
            flight = self._flights[place] = InFlight(asyncio.ensure_future(make()))
            flight.task.add_done_callback(lambda task: self._landed(place, task))
        flight.waiting += 1
        try:
            result: V = await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if flight.waiting == 0 and not flight.task.done():
                self._left(place)
        return result

    def _left(self, place: Place) -> None:
        """Let a task continue without callers, unless there are too many such tasks.

        If the tenant has too many, cancel this task. If the process has too many, cancel the newest task of the tenant
        with the most.
        """
        alone = [other for other, flight in self._flights.items() if flight.waiting == 0 and not flight.task.done()]
        of_tenants = Counter(tenant for tenant, _ in alone)
        if of_tenants[place[0]] > LEFT_OF_A_TENANT:
            self._cancel(place)
        elif len(alone) > LEFT:
            tenant, _ = of_tenants.most_common(1)[0]
            self._cancel(next(other for other in reversed(alone) if other[0] == tenant))
        else:
            log.info("summary.client_left", makings=len(alone))

    def _cancel(self, place: Place) -> None:
        # Remove the task now: a request that arrives while the task is still ending must start another one.
        self._flights.pop(place).task.cancel()

    def _landed(self, place: Place, task: asyncio.Task[V]) -> None:
        flight = self._flights.get(place)
        if flight is None or flight.task is not task:
            return
        del self._flights[place]
        if flight.waiting == 0 and not task.cancelled() and (error := task.exception()) is not None:
            log.error("summary.background_failed", error=type(error).__name__, exc_info=error)
