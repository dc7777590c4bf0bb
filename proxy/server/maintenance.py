"""What is done now and then, beside all requests.

In the store what is over is removed, and who was forgotten too. Memory that was freed goes back to the system.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from proxy.server.memory import malloc_trim
from proxy.store import ListingStore, StoreFailed

log = structlog.get_logger(__name__)

EVERY = 30.0
"""Seconds from the end of one round to the beginning of the next."""


class Holder(Protocol):
    """Something that remembers what it stored for tenants."""

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        """Drop what is remembered of tenants that were forgotten; says of which."""
        ...


class Maintenance:
    """Runs in the background of one process. A round that fails is logged, and the next round does its work."""

    def __init__(self, store: ListingStore, holders: Sequence[Holder]) -> None:
        self._store = store
        self._holders = holders
        self._began = time.time()
        self._seen: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin. Must be called in the event loop."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def aclose(self) -> None:
        """End."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def once(self) -> None:
        """One round. Raises ``StoreFailed``."""
        await self._store.upkeep()
        await self._notice()

    async def _run(self) -> None:
        while True:
            try:
                await self.once()
            except StoreFailed as failure:
                log.warning("store.upkeep_failed", reason=str(failure))
            except Exception as error:  # one fault must not end the upkeep of a process that runs for months
                log.exception("store.upkeep_failed", reason=type(error).__name__)
            await asyncio.to_thread(malloc_trim)
            await asyncio.sleep(EVERY)

    async def _notice(self) -> None:
        """Let go of tenants that another process forgot, and of what was stored for them until it was noticed here."""
        marks = await self._store.forgotten()
        new = {tenant for tenant, when in marks.items() if when >= self._began and when != self._seen.get(tenant)}
        if not new:
            return
        dropped: set[str] = set()
        for holder in self._holders:
            dropped |= holder.forget(lambda tenant: hashlib.sha256(tenant.encode()).hexdigest() in new)
        for tenant in dropped:
            await self._store.remove(tenant)
        self._seen.update((tenant, marks[tenant]) for tenant in new)
        log.info("store.forgotten", tenants=len(new), remembered_here=len(dropped))
