"""Single flight: concurrent callers for one checkpoint wait for the same summary, in one process and across workers.

The proxy continues to make a summary after the client that started it disconnects or stops waiting, within bounds.

A lease in the store lets one of several workers make a summary while the others wait for it. A lease that isn't renewed
ends after a few seconds, so a dead worker delays the others only that long. Its value is the worker's token. So a
worker that was paused can't renew or release the lease that another one has taken since then.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

import structlog

from proxy.store import Store, StoreFailed
from proxy.store.tenant_cache import cancelled

log = structlog.get_logger(__name__)

V = TypeVar("V")

LEFT_OF_A_TENANT = 8  # maximum summaries per tenant that continue after no caller waits anymore
LEFT = 32  # Maximum summaries per process that continue. Each one holds its conversation in memory.
CheckpointKey = tuple[str, ...]  # a tenant and the key of a checkpoint


class Progress:
    """The tries of a summary in progress. ``began`` is when the current one began, in the event loop's time."""

    def __init__(self) -> None:
        self.began = 0.0
        self._limit: asyncio.Timeout | None = None

    @asynccontextmanager
    async def trying(self, seconds: float, *, last: bool) -> AsyncIterator[None]:
        """Limit one try to ``seconds``. Callers can't skip the ``last`` one. Raises ``TimeoutError``."""
        async with asyncio.timeout(seconds) as limit:
            self.began = _now()
            self._limit = None if last else limit
            try:
                yield
            finally:
                self._limit = None

    def skip(self) -> bool:
        """End the current try if another one follows. Return whether one does."""
        if self._limit is None:
            return False
        self._limit.reschedule(_now())
        self._limit = None
        self.began = _now()  # the other callers wait for the next try
        return True


class NothingToAsk(Exception):
    """Ends a task ahead of need that would call no model. A digest is made quickly once a request needs it."""


class InFlight:
    """A summary in progress, and the number of callers that wait for it."""

    def __init__(self, task: asyncio.Task[Any], progress: Progress) -> None:
        self.task = task
        self.progress = progress
        self.waiting = 0


class SingleFlight(Generic[V]):
    """Run at most one task per key."""

    def __init__(self) -> None:
        self._flights: dict[CheckpointKey, InFlight] = {}

    def __contains__(self, key: CheckpointKey) -> bool:
        return key in self._flights

    @property
    def tasks(self) -> list[asyncio.Task[V]]:
        """Return the tasks in progress."""
        return [flight.task for flight in self._flights.values()]

    async def run(
        self,
        key: CheckpointKey,
        make: Callable[[Progress], Coroutine[Any, Any, V]],
        seconds: float | None = None,
        *,
        skips: bool = True,
    ) -> V | None:
        """Return the result of the task for a key. Start the task if none is in progress.

        Return ``None`` if it isn't done after ``seconds``. The task continues. With ``skips``, first skip each try that
        takes so long, except the last one.
        """
        flight = self._flights.get(key)
        if flight is None or flight.task.done():  # a task that has just failed is removed in the next pass of the loop
            progress = Progress()
            flight = self._flights[key] = InFlight(asyncio.ensure_future(make(progress)), progress)
            flight.task.add_done_callback(lambda task: self._landed(key, task))
        flight.waiting += 1
        disconnected = True
        try:
            done = await _done(flight, seconds, skips=skips)
            disconnected = False
        finally:
            flight.waiting -= 1
            if flight.waiting == 0 and not flight.task.done():
                self._left(key, disconnected=disconnected)
        if not done:
            return None
        result: V = flight.task.result()
        return result

    def cancel(self, forgotten: Callable[[str], bool]) -> None:
        """Cancel the tasks of forgotten tenants that no caller waits for."""
        for key in [key for key, flight in self._flights.items() if not flight.waiting and forgotten(key[0])]:
            self._cancel(key)

    def _left(self, key: CheckpointKey, *, disconnected: bool) -> None:
        """Let a task continue without callers, unless there are too many such tasks.

        If the tenant has too many, cancel this task. If the process has too many, cancel the newest task of the tenant
        with the most.
        """
        alone = [other for other, flight in self._flights.items() if flight.waiting == 0 and not flight.task.done()]
        of_tenants = Counter(tenant for tenant, _ in alone)
        if of_tenants[key[0]] > LEFT_OF_A_TENANT:
            self._cancel(key)
        elif len(alone) > LEFT:
            tenant, _ = of_tenants.most_common(1)[0]
            self._cancel(next(other for other in reversed(alone) if other[0] == tenant))
        elif disconnected:
            log.info("summary.client_left", makings=len(alone))

    def _cancel(self, key: CheckpointKey) -> None:
        # Remove the task now: a request that arrives while the task is still ending must start another one.
        self._flights.pop(key).task.cancel()

    def _landed(self, key: CheckpointKey, task: asyncio.Task[V]) -> None:
        flight = self._flights.get(key)
        if flight is None or flight.task is not task:
            return
        del self._flights[key]
        error = None if task.cancelled() else task.exception()
        if flight.waiting == 0 and error is not None and not isinstance(error, NothingToAsk):
            log.error("summary.background_failed", error=type(error).__name__, exc_info=error)


async def _done(flight: InFlight, seconds: float | None, *, skips: bool) -> bool:
    """Wait until a task is done. Return false if a try takes more than ``seconds``. See ``SingleFlight.run``."""
    joined = _now()
    while not flight.task.done():
        left = None if seconds is None else max(joined, flight.progress.began if skips else 0) + seconds - _now()
        if left is None or left > 0:
            # Unlike wait_for and shield, this doesn't cancel the task, and adds no future that holds its error.
            await asyncio.wait({flight.task}, timeout=left)
        elif not skips or not flight.progress.skip():
            return False
    return True


def _now() -> float:
    return asyncio.get_running_loop().time()


KIND = "making"

LEASE_SECONDS = 5.0  # lifetime of a lease after a worker takes or renews it, in seconds
RENEWED_SECONDS = LEASE_SECONDS / 4  # interval between renewals, in seconds
TAKING_SECONDS = 1.0  # seconds to wait for the store before the worker starts without a lease


class Lease:
    """The right to make one summary. If the store doesn't respond, every worker has it."""

    def __init__(self, store: Store, tenant: str, key: str) -> None:
        self._store = store
        self._entry = (tenant, KIND, key)
        self._token = secrets.token_bytes(16)
        self._taking: asyncio.Task[bool] | None = None
        self._renewing: asyncio.Task[None] | None = None

    @property
    def held(self) -> bool:
        """Return whether this worker holds the lease in the store."""
        return self._renewing is not None

    @property
    def pending(self) -> bool:
        """Return whether the store may still give this worker the lease."""
        return self._taking is not None and not self._taking.done()

    async def take(self) -> bool:
        """Take the lease. Return whether this worker may make the summary now.

        A slow store may give the lease later. Then this worker renews it, so that others wait for its summary.
        """
        self._taking = asyncio.get_running_loop().create_task(self._take())
        try:
            done, _ = await asyncio.wait({self._taking}, timeout=TAKING_SECONDS)
        except asyncio.CancelledError:
            await cancelled(self._taking)
            self.lapse()
            raise
        if not done:
            log.warning("store.write_failed", reason=f"took over {TAKING_SECONDS:g} s")
        return not done or self._taking.result()

    async def _take(self) -> bool:
        try:
            holder = await self._store.add(*self._entry, self._token, LEASE_SECONDS)
        except StoreFailed as failure:
            log.warning("store.write_failed", reason=str(failure))
            return True
        if holder == self._token:
            self._renewing = asyncio.get_running_loop().create_task(self._renew())
        return self.held

    async def free(self) -> bool:
        """Return whether no worker has the lease, or the store fails."""
        try:
            return await self._store.get(*self._entry) is None
        except StoreFailed:
            return True

    async def release(self) -> None:
        """End the lease, if this worker holds it."""
        if self._taking is not None:
            await asyncio.wait({self._taking})
        if self._renewing is None:
            return
        await cancelled(self._renewing)
        self._renewing = None
        try:
            await self._store.replace(*self._entry, self._token, b"", 0)  # another worker's lease stays
        except StoreFailed as failure:  # the lease expires without renewal
            log.warning("store.write_failed", reason=str(failure))

    def lapse(self) -> None:
        """Stop taking or renewing the lease. It ends within ``LEASE_SECONDS`` unless it was released."""
        if self._taking is not None:
            self._taking.cancel()
        if self._renewing is not None:
            self._renewing.cancel()

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEWED_SECONDS)
            try:
                if await self._store.replace(*self._entry, self._token, self._token, LEASE_SECONDS):
                    continue
                # The lease ended because this process was paused. Take it again if no other worker has it.
                if await self._store.add(*self._entry, self._token, LEASE_SECONDS) != self._token:
                    log.warning("summary.lease_lost")
                    return
            except StoreFailed as failure:
                log.warning("store.write_failed", reason=str(failure))
