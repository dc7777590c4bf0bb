"""Periodic background work: remove expired entries and forgotten tenants, and return free memory to the system."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import structlog

from proxy.server.memory import malloc_trim
from proxy.store import ManagedStore, StoreFailed
from proxy.store.background import cancelled
from proxy.store.forgetting import digest, forgotten, remove
from proxy.store.records import RecordStore

log = structlog.get_logger(__name__)

EVERY = 30.0
"""Seconds from the end of one round to the beginning of the next."""


class Holder(Protocol):
    """Something that caches entries it stored for tenants."""

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        """Drop the cached entries of forgotten tenants. Return these tenants."""
        ...


async def _nothing() -> None:
    """Do nothing."""


class Maintenance:
    """Run the rounds in the background of one process. Log a round that fails; the next round repeats its work."""

    def __init__(
        self,
        store: ManagedStore,
        holders: Sequence[Holder],
        records: RecordStore | None = None,
        most: Callable[[], int] = lambda: 0,
        archive: ManagedStore | None = None,
        settled: Callable[[], Awaitable[None]] = _nothing,
    ) -> None:
        """``most`` returns the maximum number of ``records``; ``archive`` is a store for the archive alone.

        ``settled`` waits for the writes in progress when holders dropped entries.
        """
        self._store = store
        self._archive = archive
        self._records = records
        self._most = most
        self._settled = settled
        self._holders = holders
        self._began = time.time()
        self._seen: dict[str, float] = {}
        self._leaving: set[str] = set()
        """Forgotten tenants with entries of this process that are still to be removed."""
        self._once_more: set[str] = set()
        """Tenants whose entries were removed, but a write that was pending then may have added one."""
        self._unknown = 0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the rounds. Call this in the event loop."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def aclose(self) -> None:
        """Stop the rounds."""
        if self._task is not None:
            await cancelled(self._task)

    async def once(self) -> None:
        """Run one round. Raises ``StoreFailed``."""
        await self._store.maintain()
        if self._records is not None:
            await self._records.maintain(self._most())
        await self._report_unknown()
        await self._notice()
        if self._archive is not None:
            await self._archive.maintain()

    async def _run(self) -> None:
        while True:
            try:
                await self.once()
            except StoreFailed as failure:
                log.warning("store.upkeep_failed", reason=str(failure))
            except Exception as error:  # one error must not end the maintenance of a process that runs for months
                log.exception("store.upkeep_failed", reason=type(error).__name__)
            await asyncio.to_thread(malloc_trim)
            await asyncio.sleep(EVERY)

    async def _report_unknown(self) -> None:
        """Log the number of entries that the store can't read, if it has grown."""
        unknown = await self._store.unknown()
        if self._archive is not None:
            unknown += await self._archive.unknown()
        if unknown > self._unknown:
            log.warning("store.other_keys", entries=unknown)
        self._unknown = unknown

    async def _notice(self) -> None:
        """Drop tenants that another process forgot, and remove entries that this process stored for them since then."""
        marks = await forgotten(self._store)
        new = {tenant for tenant, when in marks.items() if when >= self._began and when != self._seen.get(tenant)}
        for holder in self._holders if new else ():
            self._leaving |= holder.forget(lambda tenant: digest(tenant) in new)
        self._seen.update((tenant, marks[tenant]) for tenant in new)
        removed = await self._remove_leaving()
        if new or removed:
            log.info("store.forgotten", tenants=len(new), remembered_here=removed)

    async def _remove_leaving(self) -> int:
        """Remove the entries of tenants that holders dropped. Return their number. The next round repeats a failure."""
        again, self._once_more = self._once_more, set(self._leaving)
        self._leaving |= again
        if not self._leaving:
            return 0
        await self._settled()
        leaving = sorted(self._leaving)
        for tenant in leaving:
            await remove(self._store, tenant)
            if self._records is not None:
                await self._records.remove(tenant)
            if self._archive is not None:
                await remove(self._archive, tenant, patience=0)
            self._leaving.discard(tenant)
        return len(self._once_more)
