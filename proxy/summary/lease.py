"""A lease in the store, so that one of several workers makes a summary and the others wait for it.

A lease that isn't renewed ends after a few seconds, so a dead worker delays the others only that long. Its value is the
worker's token. So a worker that was paused can't renew or release the lease that another one has taken since then.
"""

from __future__ import annotations

import asyncio
import secrets

import structlog

from proxy.store import Store, StoreFailed
from proxy.store.tenant_cache import cancelled

log = structlog.get_logger(__name__)

KIND = "making"

SECONDS = 5.0
"""Lifetime of a lease after a worker takes or renews it, in seconds."""

RENEWED_SECONDS = SECONDS / 4
"""Interval between renewals, in seconds."""

TAKING_SECONDS = 1.0
"""Seconds to wait for the store before the worker starts without a lease."""


class Lease:
    """The right to make one summary. If the store doesn't respond, every worker has it."""

    def __init__(self, store: Store, tenant: str, key: str) -> None:
        self._store = store
        self._place = (tenant, KIND, key)
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
            holder = await self._store.add(*self._place, self._token, SECONDS)
        except StoreFailed as failure:
            log.warning("store.write_failed", reason=str(failure))
            return True
        if holder == self._token:
            self._renewing = asyncio.get_running_loop().create_task(self._renew())
        return self.held

    async def free(self) -> bool:
        """Return whether no worker has the lease, or the store fails."""
        try:
            return await self._store.get(*self._place) is None
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
            await self._store.replace(*self._place, self._token, b"", 0)  # another worker's lease stays
        except StoreFailed as failure:  # the lease expires without renewal
            log.warning("store.write_failed", reason=str(failure))

    def lapse(self) -> None:
        """Stop taking or renewing the lease. It ends within ``SECONDS`` unless it was released."""
        if self._taking is not None:
            self._taking.cancel()
        if self._renewing is not None:
            self._renewing.cancel()

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEWED_SECONDS)
            try:
                if await self._store.replace(*self._place, self._token, self._token, SECONDS):
                    continue
                # The lease ended because this process was paused. Take it again if no other worker has it.
                if await self._store.add(*self._place, self._token, SECONDS) != self._token:
                    log.warning("summary.lease_lost")
                    return
            except StoreFailed as failure:
                log.warning("store.write_failed", reason=str(failure))
