"""Limit the requests of this process, the memory of their bodies, and the requests of each team.

The proxy refuses a request over the limits of the process before it reads the body. Refusing is cheap, while one
request too many slows down all others.

With a store on Redis, all replicas count together. Otherwise, and while that store fails, each process counts its own
requests. A store that fails or is slow delays a request only briefly. The rate limit is a token bucket: up to the limit
in a burst, refilled evenly over a minute.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from contextvars import Context
from typing import TYPE_CHECKING, Literal

import structlog
from aiolimiter import AsyncLimiter

from proxy.access.authenticator import Caller
from proxy.config.server import ServerSettings
from proxy.config.teams import LimitSettings
from proxy.errors import Limit, Overloaded, TooManyRequests
from proxy.http.request_body import SMALL, MemoryLease
from proxy.store import StoreFailed
from proxy.store.guarded import Change, CircuitBreaker
from proxy.store.tenant_cache import answered, cancelled
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


if TYPE_CHECKING:
    from proxy.store.redis_store import Admission, RedisLimits

MINUTE = 60.0

WAIT_SECONDS = 1.0
"""Seconds that a request over the concurrency limit waits for another to end. A response's last byte often reaches the
client slightly before the proxy records its end. At most as many wait as may run, so that no team fills the proxy."""

POLL_SECONDS = 0.05  # seconds between two tries meanwhile, where replicas count together

STORE_FAILS = "The proxy can't count your team's requests because its store fails. Try again in a moment."

_UNLIMITED: AbstractAsyncContextManager[None] = nullcontext()


class Quotas:
    """The current usage of teams. It outlives changes of their limits."""

    def __init__(
        self,
        shared: SharedQuotas | None = None,
        on_store_failure: Callable[[], Literal["local", "refuse"]] = lambda: "local",
    ) -> None:
        """``shared`` are the counts of all replicas. ``on_store_failure`` returns what to do without them."""
        self._teams: defaultdict[str, TeamUsage] = defaultdict(TeamUsage)
        self._shared = shared
        self._on_store_failure = on_store_failure

    def admit(self, caller: Caller) -> AbstractAsyncContextManager[None]:
        """Return a context manager that counts one request. Entering it raises ``TooManyRequests``, ``Overloaded``."""
        team, limits = caller.team, caller.limits
        if team is None or limits is None or (limits.requests_per_minute is None and limits.concurrent is None):
            return _UNLIMITED
        if self._shared is None:
            return self._teams[team].admit(limits)
        return self._together(self._shared, team, limits)

    async def aclose(self) -> None:
        if self._shared is not None:
            await self._shared.aclose()

    @asynccontextmanager
    async def _together(self, shared: SharedQuotas, team: str, limits: LimitSettings) -> AsyncIterator[None]:
        usage = self._teams[team]
        async with usage.slot(limits):
            end = time.monotonic() + WAIT_SECONDS
            while True:
                admission, id = await shared.admit(team, limits)
                if admission is None or admission.decision != "concurrency" or time.monotonic() > end:
                    break
                await asyncio.sleep(POLL_SECONDS)
            if admission is None:
                if self._on_store_failure() == "refuse":
                    refused("store").inc()
                    raise Overloaded(STORE_FAILS)
                await usage.count(limits)
                yield
                return
            match admission.decision:
                case "rate":
                    raise _over_rate(limits.requests_per_minute or 0, admission.seconds)
                case "concurrency":
                    raise _over_concurrency(limits.concurrent or 0)
            try:
                yield
            finally:
                if limits.concurrent is not None:
                    shared.release(team, id)


class TeamUsage:
    """The usage of one team in this process."""

    def __init__(self) -> None:
        self._limit = math.inf
        self._concurrent = Resource(lambda: self._limit)
        self._bucket: AsyncLimiter | None = None

    @asynccontextmanager
    async def admit(self, limits: LimitSettings) -> AsyncIterator[None]:
        """Count one request. Raises ``TooManyRequests``."""
        async with self.slot(limits):
            await self.count(limits)
            yield

    @asynccontextmanager
    async def slot(self, limits: LimitSettings) -> AsyncIterator[None]:
        """Count one concurrent request. Raises ``TooManyRequests``."""
        self._limit = limits.concurrent or math.inf
        if not self._concurrent.take(1):
            await self._wait()
        try:
            yield
        finally:
            self._concurrent.give(1)

    async def count(self, limits: LimitSettings) -> None:
        """Count one request of this minute. Raises ``TooManyRequests``."""
        rate = limits.requests_per_minute
        if rate is None:
            return
        bucket = self._bucket
        if bucket is None or bucket.max_rate != rate:
            bucket = self._bucket = AsyncLimiter(rate, MINUTE)
        if not bucket.has_capacity():
            raise _over_rate(rate, math.ceil(MINUTE / rate))
        await bucket.acquire()  # returns immediately, because there is capacity

    async def _wait(self) -> None:
        if self._concurrent.waiting < self._limit and await self._concurrent.wait(1, WAIT_SECONDS):
            return
        raise _over_concurrency(self._limit)


def _over_concurrency(limit: float) -> TooManyRequests:
    refused("concurrency").inc()
    return TooManyRequests(
        f"Your team is at its limit of {limit} concurrent requests. Wait until one ends, or ask the "
        "operator of this proxy for a higher limit.",
        retry_after=1,
        limit=Limit("concurrent", f"{limit:g} concurrent requests"),
    )


def _over_rate(rate: int, seconds: int) -> TooManyRequests:
    refused("rate").inc()
    return TooManyRequests(
        f"Your team is at its limit of {rate} requests per minute. Try again in {seconds} s, or ask the "
        "operator of this proxy for a higher limit.",
        retry_after=seconds,
        limit=Limit("requests_per_minute", f"{rate} requests per minute"),
    )


log = structlog.get_logger(__name__)

ADMIT_SECONDS = 0.25  # seconds to wait for the store's decision on a request
RENEW_SECONDS = 15.0  # seconds between two renewals of the leases of requests in progress, a quarter of a lease
CLOSING_SECONDS = 2.0  # seconds to end leases when the process ends

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 15.0
"""Seconds without a call to the store after repeated failures. The pause doubles after each failed attempt."""


class SharedQuotas:
    """Ask the store for each request of a team with a limit. Renews the leases of requests in progress."""

    def __init__(self, counts: RedisLimits) -> None:
        self._counts = counts
        self._held: defaultdict[str, set[str]] = defaultdict(set)
        self._renewing: asyncio.Task[None] | None = None
        self._releasing: set[asyncio.Task[None]] = set()
        self._breaker = CircuitBreaker(FIRST_PAUSE, LONGEST_PAUSE, report=_report)

    async def admit(self, team: str, limits: LimitSettings) -> tuple[Admission | None, str]:
        """Return the decision on a request and the id to release; ``None`` if the store doesn't respond in time."""
        id = secrets.token_hex(8)
        attempt = self._breaker.attempt("quotas")
        if attempt is None:
            return None, id
        try:
            with attempt:
                return await self._asked(team, id, limits), id
        except StoreFailed as failure:
            log.warning("quotas.not_shared", reason=str(failure))
            return None, id

    def release(self, team: str, id: str) -> None:
        """End the lease of a request, in the background."""
        self._held[team].discard(id)
        self._in_background(self._released(team, id))

    async def aclose(self) -> None:
        if self._renewing is not None:
            await cancelled(self._renewing)
        if self._releasing:
            await asyncio.wait(self._releasing, timeout=CLOSING_SECONDS)
        for task in self._releasing:
            task.cancel()
        await self._counts.aclose()

    async def _asked(self, team: str, id: str, limits: LimitSettings) -> Admission:
        call = asyncio.ensure_future(self._counts.admit(team, id, limits.requests_per_minute, limits.concurrent))
        try:
            decided = await answered(call, ADMIT_SECONDS)
        except asyncio.CancelledError:
            self._in_background(self._given_up(call, team, id))
            raise
        if not decided:
            self._in_background(self._given_up(call, team, id))
            raise StoreFailed(f"no answer within {ADMIT_SECONDS:g} s")
        admission = call.result()
        if admission.decision == "admitted" and limits.concurrent is not None:
            self._held[team].add(id)
            if self._renewing is None:
                self._renewing = asyncio.get_running_loop().create_task(self._renew(), context=Context())
        return admission

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            held = {team: set(ids) for team, ids in self._held.items() if ids}
            try:
                async with asyncio.timeout(RENEW_SECONDS):
                    await self._counts.renew(held)
            except (StoreFailed, TimeoutError) as failure:
                log.warning("quotas.not_renewed", reason=str(failure) or "timeout")

    async def _given_up(self, call: asyncio.Future[Admission], team: str, id: str) -> None:
        """Wait for a late decision, which may have counted the request, and end the lease."""
        try:
            await asyncio.wait({call})
        finally:
            call.cancel()
        if call.exception() is None:
            await self._released(team, id)

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        # The task outlives the request, so its log lines name none.
        task = asyncio.get_running_loop().create_task(work, context=Context())
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    async def _released(self, team: str, id: str) -> None:
        try:
            async with asyncio.timeout(RENEW_SECONDS):
                await self._counts.release(team, [id])
        except (StoreFailed, TimeoutError) as failure:
            # The lease ends without renewal.
            log.debug("quotas.not_released", reason=str(failure) or "timeout")


def _report(change: Change, key: object, pause: float) -> None:
    log.warning(f"quotas.breaker_{change}", pause=pause)
