"""Limit a team's requests per minute and its concurrent requests. Each process counts its own requests.

The rate limit is a token bucket: up to the limit in a burst, refilled evenly over a minute.
"""

from __future__ import annotations

import math
from contextlib import AbstractAsyncContextManager, nullcontext

from aiolimiter import AsyncLimiter

from proxy.access.admission import Capacity
from proxy.access.authenticator import Caller
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
        self._teams: dict[str, TeamUsage] = {}

    def admitted(self, caller: Caller) -> AbstractAsyncContextManager[None]:
        """Return a context manager that counts one request. Entering it raises ``TooManyRequests``."""
        if caller.team is None or caller.limits is None:
            return _UNLIMITED
        use = self._teams.get(caller.team)
        if use is None:
            use = self._teams[caller.team] = TeamUsage()
        use.concurrent = caller.limits.concurrent or math.inf
        return _Admitted(use, caller.limits.requests_per_minute)


class TeamUsage:
    """The usage of one team."""

    def __init__(self) -> None:
        self.concurrent = math.inf
        self._inside = Capacity(lambda: self.concurrent)
        self._bucket: AsyncLimiter | None = None

    async def enter(self, rate: int | None) -> None:
        """Count a request in. Raises ``TooManyRequests``."""
        if not self._inside.take(1):
            await self._wait()
        try:
            if rate is not None:
                await self._count(rate)
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Count a request out."""
        self._inside.give(1)

    async def _wait(self) -> None:
        if self._inside.waiting < self.concurrent and await self._inside.wait(1, WAIT_SECONDS):
            return
        refused("concurrency").inc()
        raise TooManyRequests(
            f"Your team is at its limit of {self.concurrent} concurrent requests. Wait until one ends, or ask the "
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


class _Admitted(AbstractAsyncContextManager[None]):
    def __init__(self, use: TeamUsage, rate: int | None) -> None:
        self._use = use
        self._rate = rate

    async def __aenter__(self) -> None:
        await self._use.enter(self._rate)

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        self._use.leave()
