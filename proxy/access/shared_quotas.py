"""Limits of teams that replicas count together. A store that fails or is slow delays a request only briefly."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import Collection, Coroutine, Mapping
from contextvars import Context
from typing import Protocol

import structlog

from proxy.config.teams import LimitSettings
from proxy.store import StoreFailed
from proxy.store.breaker import Change, CircuitBreaker
from proxy.store.tenant_cache import cancelled

log = structlog.get_logger(__name__)

ADMIT_SECONDS = 0.25
"""Seconds to wait for the store's decision on a request."""

STALL_SECONDS = 0.1
"""If a wait takes this much longer than it should, this process was busy. Then the store gets as much time again."""

RENEW_SECONDS = 15.0
"""Seconds between two renewals of the leases of requests in progress, a quarter of a lease."""

CLOSING_SECONDS = 2.0
"""Seconds to end leases when the process ends."""

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 15.0
"""Seconds without a call to the store after repeated failures. The pause doubles after each failed attempt."""


class Admission(Protocol):
    """A decision: ``admitted``, ``rate``, or ``concurrency``. ``seconds`` is when another try may succeed."""

    @property
    def decision(self) -> str: ...

    @property
    def seconds(self) -> int: ...


class SharedCounts(Protocol):
    """Counts of all replicas. The methods raise ``StoreFailed``."""

    async def admit(self, team: str, id: str, per_minute: int | None, concurrent: int | None) -> Admission:
        """Count a request unless it is over a limit."""
        ...

    async def release(self, team: str, ids: Collection[str]) -> None:
        """End the leases of requests."""
        ...

    async def renew(self, held: Mapping[str, Collection[str]]) -> None:
        """Extend the leases of requests, by team."""
        ...

    async def aclose(self) -> None:
        """Close the connections."""
        ...


class SharedQuotas:
    """Ask the store for each request of a team with a limit. Renews the leases of requests in progress."""

    def __init__(self, counts: SharedCounts) -> None:
        self._counts = counts
        self._held: defaultdict[str, set[str]] = defaultdict(set)
        self._renewing: asyncio.Task[None] | None = None
        self._releasing: set[asyncio.Task[None]] = set()
        self._breaker = CircuitBreaker(FIRST_PAUSE, LONGEST_PAUSE, is_failure=_is_failure, report=_report)

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
        """End the leases and close the connections."""
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
            for _ in range(2):
                began = time.monotonic()
                await asyncio.wait({call}, timeout=ADMIT_SECONDS)
                if call.done() or time.monotonic() - began < ADMIT_SECONDS + STALL_SECONDS:
                    break
        except asyncio.CancelledError:
            self._in_background(self._given_up(call, team, id))
            raise
        if not call.done():
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


def _is_failure(error: BaseException) -> bool:
    return isinstance(error, StoreFailed)


def _report(change: Change, key: object, pause: float) -> None:
    log.warning(f"quotas.breaker_{change}", pause=pause)
