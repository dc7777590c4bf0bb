"""Periodic background work: remove expired entries and forgotten tenants, and return free memory to the system.

The C library keeps freed memory in an arena per thread. Without a trim, the process keeps the memory of its busiest
moment, and each slightly busier moment adds to it.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import cache, partial

import structlog

from proxy.records.model import RecordStore
from proxy.store import ManagedStore, StoreFailed
from proxy.store.forgetting import Holder, digest, forgotten, remove
from proxy.store.tenant_cache import cancelled

log = structlog.get_logger(__name__)

EVERY = 30.0  # seconds from the end of one round to the beginning of the next


async def _nothing() -> None:
    """Do nothing."""


class Maintenance:
    """Run the rounds in the background of one process. A step that fails is logged, and the next round repeats it."""

    def __init__(
        self,
        store: ManagedStore,
        holders: Sequence[Holder],
        records: RecordStore | None = None,
        most: Callable[[], int] = lambda: 0,
        settled: Callable[[], Awaitable[None]] = _nothing,
    ) -> None:
        """``most`` returns the maximum number of ``records``.

        ``settled`` waits for the writes in progress when holders dropped entries.
        """
        self._store = store
        self._records = records
        self._most = most
        self._settled = settled
        self._holders = [*holders]
        self._began = time.time()
        self._seen: dict[str, float] | None = None
        """The marks of forgotten tenants as of the last round, ``None`` before the first."""
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
        if self._task is not None:
            await cancelled(self._task)

    async def once(self) -> None:
        """Run one round. Forgetting comes first, and no step depends on another."""
        await self._step("forget", self._notice)
        await self._step("remove", self._remove_leaving)
        await self._step("store", self._store.maintain)
        if (records := self._records) is not None:
            await self._step("records", lambda: records.maintain(self._most()))
        await self._step("unknown", self._report_unknown)
        await self._step("memory", lambda: asyncio.to_thread(malloc_trim))

    async def _step(self, step: str, work: Callable[[], Awaitable[object]]) -> bool:
        """Run one step of a round. Return whether it succeeded."""
        try:
            await work()
        except StoreFailed as failure:
            log.warning("store.upkeep_failed", step=step, reason=str(failure))
        except Exception as error:  # one error must not end the maintenance of a process that runs for months
            log.exception("store.upkeep_failed", step=step, reason=type(error).__name__)
        else:
            return True
        return False

    async def _run(self) -> None:
        while True:
            await self.once()
            await asyncio.sleep(EVERY)

    async def _report_unknown(self) -> None:
        """Log the number of entries that the store can't read, if it has grown."""
        unknown = await self._store.unknown()
        if unknown > self._unknown:
            log.warning("store.other_keys", entries=unknown)
        self._unknown = unknown

    async def _notice(self) -> None:
        """Drop tenants that another process has forgotten since the last round.

        The clock of that process may be wrong, so a mark is new if the last round didn't see it. Only in the first
        round the time decides, because this process has nothing of tenants that were forgotten before it started.
        """
        marks = await forgotten(self._store)
        if self._seen is None:
            new = {tenant for tenant, when in marks.items() if when >= self._began}
        else:
            new = {tenant for tenant, when in marks.items() if when != self._seen.get(tenant)}
        dropped: set[str] = set()
        complete = True
        for holder in self._holders if new else ():
            complete &= await self._step("forget", partial(_drop, holder, new, dropped))
        self._leaving |= dropped
        if complete:
            self._seen = marks
        if new:
            log.info("store.forgotten", tenants=len(new), remembered_here=len(dropped))

    async def _remove_leaving(self) -> None:
        """Remove the entries of tenants that holders dropped, everywhere. The next round repeats a failure."""
        again, self._once_more = self._once_more, set(self._leaving)
        self._leaving |= again
        if not self._leaving:
            return
        await self._settled()
        for tenant in sorted(self._leaving):
            done = await self._step("remove", partial(remove, self._store, tenant))
            if (records := self._records) is not None:
                done &= await self._step("remove", partial(records.remove, tenant))
            if done:
                self._leaving.discard(tenant)


async def _drop(holder: Holder, new: set[str], dropped: set[str]) -> None:
    dropped |= holder.forget(lambda tenant: digest(tenant) in new)


GENERATION_THRESHOLDS = (10_000, 20, 20)
"""Container objects allocated before the garbage collector runs, and its runs before it visits older objects."""


def exempt_from_collection() -> None:
    """Exempt everything that is loaded by now from garbage collection, and collect the rest less often.

    Modules, settings, and tables live as long as the process. With Python's defaults the collector visits all of their
    65,000 objects again and again, which takes up to a quarter of the CPU time when several requests are in flight.
    Requests don't rely on the collector: they form no reference cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GENERATION_THRESHOLDS)


def malloc_trim() -> None:
    """Make the C library return free memory to the system.

    This takes about 1 ms for 100 MB, and up to 100 ms if it returns 500 MB. Other threads run meanwhile, unless they
    allocate memory. On musl, macOS, and Windows, this does nothing.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    if sys.platform != "linux":
        return None
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return trim
