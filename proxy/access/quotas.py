"""Limit a team's requests per minute and its concurrent requests. Each process counts its own requests.

The rate limit is a token bucket: up to the limit in a burst, refilled evenly over a minute.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext

from aiolimiter import AsyncLimiter

from proxy.access.admission import Capacity
from proxy.access.authenticator import Caller
from proxy.config.teams import LimitSettings
from proxy.errors import TooManyRequests
from proxy.telemetry.metrics import refused

MINUTE = 60.0

WAIT_SECONDS = 1.0
"""Seconds that a request over the concurrency limit waits for another to end. A response's last byte often reaches the
client slightly before the proxy records its end. At most as many wait as may run, so that no team fills the proxy."""

_UNLIMITED: AbstractAsyncContextManager[None] = nullcontext()


class Quotas:
    """The current usage of teams. It outlives changes of their limits."""

    def __init__(self) -> None:
        self._teams: defaultdict[str, TeamUsage] = defaultdict(TeamUsage)

    def admit(self, caller: Caller) -> AbstractAsyncContextManager[None]:
        """Return a context manager that counts one request. Entering it raises ``TooManyRequests``."""
        if caller.team is None or caller.limits is None:
            return _UNLIMITED
        return self._teams[caller.team].admit(caller.limits)


class TeamUsage:
    """The usage of one team."""

    def __init__(self) -> None:
        self._limit = math.inf
        self._concurrent = Capacity(lambda: self._limit)
        self._bucket: AsyncLimiter | None = None

    @asynccontextmanager
    async def admit(self, limits: LimitSettings) -> AsyncIterator[None]:
        """Count one request. Raises ``TooManyRequests``."""
        self._limit = limits.concurrent or math.inf
        if not self._concurrent.take(1):
            await self._wait()
        try:
            if limits.requests_per_minute is not None:
                await self._count(limits.requests_per_minute)
            yield
        finally:
            self._concurrent.give(1)

    async def _wait(self) -> None:
        if self._concurrent.waiting < self._limit and await self._concurrent.wait(1, WAIT_SECONDS):
            return
        refused("concurrency").inc()
        raise TooManyRequests(
            f"Your team is at its limit of {self._limit} concurrent requests. Wait until one ends, or ask the "
            "operator of this proxy for a higher limit.",
            retry_after=1,
        )

    async def _count(self, rate: int) -> None:
        bucket = self._bucket
        if bucket is None or bucket.max_rate != rate:
            bucket = self._bucket = AsyncLimiter(rate, MINUTE)
        if not bucket.has_capacity():
            seconds = math.ceil(MINUTE / rate)
            refused("rate").inc()
            raise TooManyRequests(
                f"Your team is at its limit of {rate} requests per minute. Try again in {seconds} s, or ask the "
                "operator of this proxy for a higher limit.",
                retry_after=seconds,
            )
        await bucket.acquire()  # returns immediately, because there is capacity
