"""Limit a team's requests per minute and its concurrent requests.

With a store on Redis, all replicas count together. Otherwise, and while that store fails, each process counts its own
requests. The rate limit is a token bucket: up to the limit in a burst, refilled evenly over a minute.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Literal

from aiolimiter import AsyncLimiter

from proxy.access.admission import Capacity
from proxy.access.authenticator import Caller
from proxy.access.shared_quotas import SharedQuotas
from proxy.config.teams import LimitSettings
from proxy.errors import Overloaded, TooManyRequests
from proxy.telemetry.metrics import refused

MINUTE = 60.0

WAIT_SECONDS = 1.0
"""Seconds that a request over the concurrency limit waits for another to end. A response's last byte often reaches the
client slightly before the proxy records its end. At most as many wait as may run, so that no team fills the proxy."""

POLL_SECONDS = 0.05
"""Seconds between two tries meanwhile, where replicas count together."""

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
        """End the leases of requests in progress."""
        if self._shared is not None:
            await self._shared.aclose()

    @asynccontextmanager
    async def _together(self, shared: SharedQuotas, team: str, limits: LimitSettings) -> AsyncIterator[None]:
        usage = self._teams[team]
        async with usage.place(limits):
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
        self._concurrent = Capacity(lambda: self._limit)
        self._bucket: AsyncLimiter | None = None

    @asynccontextmanager
    async def admit(self, limits: LimitSettings) -> AsyncIterator[None]:
        """Count one request. Raises ``TooManyRequests``."""
        async with self.place(limits):
            await self.count(limits)
            yield

    @asynccontextmanager
    async def place(self, limits: LimitSettings) -> AsyncIterator[None]:
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
    )


def _over_rate(rate: int, seconds: int) -> TooManyRequests:
    refused("rate").inc()
    return TooManyRequests(
        f"Your team is at its limit of {rate} requests per minute. Try again in {seconds} s, or ask the "
        "operator of this proxy for a higher limit.",
        retry_after=seconds,
    )
