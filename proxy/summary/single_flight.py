"""Summaries by checkpoint: one task makes a summary for all requests that wait, in this process and in other workers.

A request waits for a slow model only so long. Then it gets a digest, which the summary replaces once it's made. The
task continues after the client that started it disconnects or stops waiting, within bounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import structlog
from cachetools import LRUCache
from msgspec import UNSET
from msgspec.structs import replace

from proxy.store import Store, StoreFailed
from proxy.store.forgetting import drop
from proxy.store.tenant_cache import CacheCapacity, Place
from proxy.summary import times
from proxy.summary.store import Checkpoint, Lease, Origin, StoredSummary, SummaryCache, now
from proxy.telemetry.metrics import GIVEN_UP

log = structlog.get_logger(__name__)

LEFT_OF_A_TENANT = 8  # maximum summaries per tenant that continue after no caller waits anymore
LEFT = 32  # Maximum summaries per process that continue. Each one holds its conversation in memory.
WORTH = 8  # Requests that pay for a summary of everything. A client that changes old messages makes each one useless.
FAILURES = 3  # failed attempts after which the proxy stops calling models for a conversation
FAILED = 5_000  # checkpoints whose failures are remembered


@dataclass
class SummaryOrder(ABC):
    """A summary that requests need: that of the last of a tenant's ``checkpoints``.

    A request waits ``seconds`` for one try to write it.
    """

    tenant: str
    checkpoints: Sequence[Checkpoint]
    seconds: float

    @property
    def place(self) -> Place:
        return self.tenant, self.checkpoints[-1].key

    @abstractmethod
    async def make(self, previous: StoredSummary | None, start: int, progress: Progress) -> StoredSummary:
        """Make the entry from the previous one, if any, and the position where that one ends. Report its tries.

        Raises ``NothingToAsk``.
        """

    @abstractmethod
    async def digest(self, previous: StoredSummary | None, start: int) -> StoredSummary:
        """Make a digest with the cause ``timeout``, for requests that have waited long enough."""


@dataclass(slots=True)
class Progress:
    """The tries of a summary in progress. ``began`` is when the current one began, in the event loop's time."""

    began: float = 0.0
    _limit: asyncio.Timeout | None = None

    @asynccontextmanager
    async def trying(self, seconds: float, *, last: bool) -> AsyncIterator[None]:
        """Limit one try to ``seconds``. Callers can't skip the ``last`` one. Raises ``TimeoutError``."""
        async with asyncio.timeout(seconds) as limit:
            self.began = now()
            self._limit = None if last else limit
            try:
                yield
            finally:
                self._limit = None

    def skip(self) -> bool:
        """End the current try if another one follows. Return whether one does."""
        if self._limit is None:
            return False
        self._limit.reschedule(now())
        self._limit = None
        self.began = now()  # the other callers wait for the next try
        return True


class NothingToAsk(Exception):
    """Ends a task ahead of need that would call no model. A digest is made quickly once a request needs it."""


@dataclass(eq=False)
class InFlight:
    """A summary in progress, and the number of callers that wait for it."""

    task: asyncio.Task[StoredSummary]
    progress: Progress
    waiting: int = 0


@dataclass(slots=True)
class Lineage:
    """How a conversation used its summaries, although its old messages change.

    ``keys`` are those of the newest two, and ``uses`` the requests that had one of them since the newest was made.
    ``wasted`` is the number of summaries in a row with too few uses. ``sighted`` is a key without a summary, and how
    many requests asked for it. ``last`` is the id and the newest mark of the last request.
    """

    keys: tuple[str, ...] = ()
    uses: int = 0
    wasted: int = 0
    sighted: tuple[str, int] = ("", 0)
    last: tuple[str, ...] = ()

    def see(self, key: str) -> None:
        """Count a request with the summary of a key."""
        if key in self.keys:
            self.uses += 1
        else:
            self.sighted = key, self.sighted[1] + 1 if self.sighted[0] == key else 1

    def wastes(self, keys: Sequence[str], *, grown: bool) -> bool:
        """Return whether a summary for the last of the keys would follow one that hardly any request had.

        It's no waste if the conversation has ``grown`` much since that one.
        """
        return bool(self.keys) and self.uses < ((0 if grown else 2) if self.keys[-1] in keys else WORTH)

    def worth(self, keys: Sequence[str], *, grown: bool) -> bool:
        """Return whether to make a summary for the last of the keys. After waste, enough requests must ask for it."""
        needed = 3**self.wasted if self.wasted and self.wastes(keys, grown=grown) else 1
        return needed == 1 or (self.sighted[0] == keys[-1] and self.sighted[1] >= needed)

    def made(self, keys: Sequence[str], *, grown: bool) -> None:
        """Remember that the summary for the last of the keys was made."""
        if keys[-1] not in self.keys:
            self.wasted = self.wasted + 1 if self.wastes(keys, grown=grown) else 0
            self.keys, self.uses = (*self.keys[-1:], keys[-1]), 0


class Summaries:
    """Provide the entry for a conversation's last checkpoint."""

    def __init__(self, store: Store, memory: int | None = None) -> None:
        """``memory`` is the bytes of the summaries in memory."""
        self._store = store
        self.cache = SummaryCache(store, memory or CacheCapacity().summaries)
        self._failures: LRUCache[Place, int] = LRUCache(FAILED)
        # The times until which no model is asked for these checkpoints ahead of need, because there was none to ask.
        self._unaskable: LRUCache[Place, float] = LRUCache(FAILED)
        # By tenant and mark of a conversation, see ``lineage``.
        self._lineages: LRUCache[Place, Lineage] = LRUCache(2 * FAILED)
        self._flights: dict[Place, InFlight] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._releasing: set[asyncio.Task[None]] = set()

    async def stored(self, place: Place) -> StoredSummary | None:
        """Return the entry of a tenant's checkpoint, or ``None``."""
        try:
            return await self.cache.find(place)
        except StoreFailed as failure:
            log.warning("store.read_failed", reason=str(failure))
            # Another caller may have made it during the read.
            return self.cache.get(*place)

    async def obtain(self, order: SummaryOrder) -> tuple[StoredSummary, Origin]:
        """Return the entry for the last checkpoint. If there is none, make it from the latest earlier one.

        Concurrent callers for one checkpoint share the same task. It continues after the last of them disconnects or
        has waited long enough, within its own times, so that the conversation's next request finds the summary.
        """
        entry = await self.stored(order.place)
        if entry is not None:
            return entry, "digest" if entry.digest else "stored"
        late = self.cache.peek(order.place)
        if late is not None and late.late:  # no request waits for this model again
            self.begin(order)
            return late, "digest"
        while True:
            try:
                made = await self._made(order, skips=True) or await self._late_digest(order)
            except NothingToAsk:  # this request joined a task ahead of need
                continue
            return made, "digest" if made.digest else "made"

    def begin(self, order: SummaryOrder) -> None:
        """Make an entry in the background, ahead of need or after the model was too slow.

        Once it takes longer than a request waits, it counts toward the summaries that nobody waits for.
        """
        place = order.place
        if place in self._flights or self.cache.get(*place) is not None or self._unaskable.get(place, 0) > now():
            return

        async def ahead() -> None:
            if await self.stored(place) is None:
                try:
                    await self._made(order, skips=False)
                except NothingToAsk:
                    self._unaskable[place] = now() + times.DIGEST

        task = asyncio.ensure_future(ahead())
        self._background.add(task)
        task.add_done_callback(self._ended)

    def given_up(self, order: SummaryOrder) -> bool:
        """Return whether summaries of a conversation failed so often that the proxy stops calling models for it.

        The count includes all checkpoints since the last one with a summary. An edited conversation has other
        checkpoints, so its count starts at zero.
        """
        failures = 0
        for checkpoint in reversed(order.checkpoints):
            entry = self.cache.peek((order.tenant, checkpoint.key))
            if entry is not None and not entry.digest:
                break
            failures += self._failures.get((order.tenant, checkpoint.key), 0)
        return failures >= FAILURES

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        """Drop the entries of forgotten tenants, and return those tenants. Cancel summaries that nobody waits for."""
        for place in [place for place, flight in self._flights.items() if not flight.waiting and forgotten(place[0])]:
            self._cancel(place)
        dropped = [drop(one, forgotten) for one in (self._failures, self._unaskable, self._lineages)]
        return self.cache.forget(forgotten).union(*dropped)

    def lineage(self, tenant: str, request: str, marks: Sequence[str]) -> Lineage:
        """Return the lineage of a conversation. It was seen with one of these marks before, or is new.

        The marks are ordered, the newest first. A request without a newer one isn't the conversation's next turn.
        """
        places = [(tenant, mark) for mark in marks]
        lineage = next((found for place in places if (found := self._lineages.get(place))), None) or Lineage()
        if places and lineage.last[1:] == places[0][1:] and lineage.last[0] != request:
            return Lineage()
        lineage.last = (request, *marks[:1])
        self._lineages.update(dict.fromkeys(places, lineage))
        return lineage

    async def settled(self) -> None:
        """Wait until the write in progress has ended."""
        await self.cache.settled()

    async def stop(self) -> None:
        """Cancel summaries in progress."""
        tasks = [*self._background, *(flight.task for flight in self._flights.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def aclose(self) -> None:
        """Cancel summaries in progress and store the finished ones, also those that a failing store didn't take."""
        await self.stop()
        await self.cache.aclose()
        if self._releasing:
            _, late = await asyncio.wait(self._releasing, timeout=times.RELEASING)
            for task in late:
                task.cancel()

    async def _made(self, order: SummaryOrder, *, skips: bool) -> StoredSummary | None:
        """Return the entry that one task makes for all its callers. Start the task if none is in progress.

        Return ``None`` if a try takes longer than a request waits. The task continues. With ``skips``, first skip each
        such try, except the last one.
        """
        place = order.place
        flight = self._flights.get(place)
        if flight is None or flight.task.done():  # a task that has just failed is removed in the next pass of the loop
            progress = Progress()
            flight = self._flights[place] = InFlight(asyncio.ensure_future(self._make(order, progress)), progress)
            flight.task.add_done_callback(partial(self._landed, place))
        flight.waiting += 1
        joined, disconnected = now(), True
        try:
            while not flight.task.done():
                left = max(joined, flight.progress.began if skips else 0) + order.seconds - now()
                if left > 0:
                    # Unlike wait_for and shield, this doesn't cancel the task, and adds no future that holds its error.
                    await asyncio.wait({flight.task}, timeout=left)
                elif not skips or not flight.progress.skip():
                    break
            disconnected = False
        finally:
            flight.waiting -= 1
            if flight.waiting == 0 and not flight.task.done():
                self._left(place, disconnected=disconnected)
        return flight.task.result() if flight.task.done() else None

    def _left(self, place: Place, *, disconnected: bool) -> None:
        """Let a task continue without callers, unless there are too many such tasks.

        If the tenant has too many, cancel this task. If the process has too many, cancel the newest task of the tenant
        with the most.
        """
        alone = [other for other, flight in self._flights.items() if flight.waiting == 0 and not flight.task.done()]
        of_tenants = Counter(tenant for tenant, _ in alone)
        if of_tenants[place[0]] > LEFT_OF_A_TENANT:
            self._cancel(place)
        elif len(alone) > LEFT:
            tenant, _ = of_tenants.most_common(1)[0]
            self._cancel(next(other for other in reversed(alone) if other[0] == tenant))
        elif disconnected:
            log.info("summary.client_left", makings=len(alone))

    def _cancel(self, place: Place) -> None:
        # Remove the task now: a request that arrives while the task is still ending must start another one.
        self._flights.pop(place).task.cancel()

    def _landed(self, place: Place, task: asyncio.Task[StoredSummary]) -> None:
        flight = self._flights.get(place)
        if flight is None or flight.task is not task:
            return
        del self._flights[place]
        error = None if task.cancelled() else task.exception()
        if flight.waiting == 0 and error is not None and not isinstance(error, NothingToAsk):
            log.error("summary.background_failed", error=type(error).__name__, exc_info=error)

    async def _make(self, order: SummaryOrder, progress: Progress) -> StoredSummary:
        """Make the entry, or wait for the worker that is making it."""
        place, checkpoints = order.place, order.checkpoints
        lease = Lease(self._store, *place)
        while not await lease.take():
            if (entry := await self._made_elsewhere(lease, place)) is not None:
                return entry
        try:
            # Another worker may have stored the entry just before this one took the lease.
            previous, position = await self._latest(order, checkpoints if lease.held else checkpoints[:-1])
            if previous is not None and position == checkpoints[-1].position:
                return previous
            entry = await order.make(previous, position, progress)
            if entry.digest:
                # Another worker may have taken over while this one was paused.
                if lease.held and (stored := await self.stored(place)) is not None and not stored.digest:
                    return stored
                return self._keep_digest(order, entry)
            self._failures.pop(place, None)
            if (shown := self.cache.peek(place)) is not None:
                entry = replace(entry, replaced=shown.cause or UNSET)
            self.cache.remember(place, entry)
            if not self.cache.save(place, entry, times.LIFETIME):
                log.warning("summary.not_stored", summaries=1)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(times.SAVING):
                    await self.cache.writes.written(place)
            return self.cache.peek(place) or entry
        except asyncio.CancelledError:  # because too many are being made, or the process ends
            if (shown := self.cache.peek(place)) is not None and shown.late:
                self._failures[place] = self._failures.get(place, 0) + 1
            raise
        finally:
            if lease.held or lease.pending:
                task = asyncio.get_running_loop().create_task(self._released(lease, place))
                self._releasing.add(task)
                task.add_done_callback(self._releasing.discard)

    async def _made_elsewhere(self, lease: Lease, place: Place) -> StoredSummary | None:
        """Return the entry that another worker is making; ``None`` if it ends without one.

        If requests have a digest by then, return their digest, so that the workers don't all try in turn.
        """
        while True:
            free = await lease.free()
            entry = await self.stored(place)
            if entry is not None and not entry.late:
                return entry
            shown = self.cache.peek(place)
            late = shown if shown is not None and shown.late else None
            if free:
                return entry if late is None else self._keep_late(place, late)
            await asyncio.sleep(times.POLL if late is None else times.SLOW_POLL)

    async def _released(self, lease: Lease, place: Place) -> None:
        """Release a lease after the summary is stored, so that a waiting worker finds the summary.

        If this task is cancelled, the lease expires.
        """
        try:
            await self.cache.writes.written(place)
            await lease.release()
        finally:
            lease.lapse()

    async def _latest(self, order: SummaryOrder, checkpoints: Sequence[Checkpoint]) -> tuple[StoredSummary | None, int]:
        """Return the latest summary and its position, only from memory if the store fails or is slow."""
        try:
            async with asyncio.timeout(times.LOOKING):
                for checkpoint in reversed(checkpoints):
                    entry = await self.cache.find((order.tenant, checkpoint.key))
                    if entry is not None and not entry.digest:
                        return entry, checkpoint.position
        except (StoreFailed, TimeoutError) as failure:
            log.warning("store.read_failed", reason=str(failure) or f"took over {times.LOOKING:g} s")
        for checkpoint in reversed(checkpoints):
            entry = self.cache.get(order.tenant, checkpoint.key)
            if entry is not None and not entry.digest:
                return entry, checkpoint.position
        return None, 0

    async def _late_digest(self, order: SummaryOrder) -> StoredSummary:
        """Return the digest for requests that have waited long enough, or the summary if it's just been made."""
        entry = await order.digest(*await self._latest(order, order.checkpoints[:-1]))
        if (shown := await self.stored(order.place)) is not None:  # also the digest of another request that waited
            return shown
        log.warning("summary.timed_out", seconds=order.seconds)
        return self._keep_late(order.place, entry)

    def _keep_late(self, place: Place, entry: StoredSummary) -> StoredSummary:
        """Keep a digest in place of a slow model's summary. After its lifetime, the proxy calls a model again."""
        entry = replace(entry, until=now() + times.DIGEST)
        self.cache.remember(place, entry)
        return entry

    def _keep_digest(self, order: SummaryOrder, entry: StoredSummary) -> StoredSummary:
        """Keep a digest in this process for its lifetime, or without limit after too many failures."""
        if entry.cause == "unused":
            return entry  # a later request may have it made
        place, known = order.place, self.given_up(order)
        if entry.cause in ("failed", "timeout"):
            self._failures[place] = self._failures.get(place, 0) + 1
        given_up = self.given_up(order)
        if given_up and not known:
            GIVEN_UP.inc()
            log.warning("summary.given_up", failures=FAILURES)
        shown = self.cache.peek(place)
        if shown is not None and shown.late:  # the conversation's prompts keep their bytes
            entry = replace(shown, cause=entry.cause)
        entry = replace(entry, until=math.inf if given_up else now() + times.DIGEST)
        self.cache.remember(place, entry)
        return entry

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("summary.background_failed", error=type(error).__name__, exc_info=error)
