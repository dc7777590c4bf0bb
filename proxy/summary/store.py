"""Summaries by checkpoint: stored, or made once for all who wait, or a digest in their place.

A summary belongs to the conversation and not to the client whose request began it, so a making goes on when that client
disconnects. Of the summaries that several workers make for one checkpoint, the first one stored is the one all use.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import structlog

from proxy.compaction.identifiers import Artefacts
from proxy.store import Store, StoreFailed
from proxy.summary.lease import Lease
from proxy.telemetry.metrics import GIVEN_UP

log = structlog.get_logger(__name__)

KIND = "summary"

LIFETIME = 30 * 24 * 3600.0
"""Seconds that a model's summary is kept after it was made."""

DIGEST_LIFETIME = 300.0
"""Seconds that a digest stands in before a model is asked again: until then the prompt stays the same."""

REMEMBERED = 500
"""Entries that each process keeps in memory."""

REMEMBERED_BYTES = 32_000_000
"""What they may take together; the newest one stays in any case."""

FAILURES = 3
"""Makings in vain after which no model is asked any more for a conversation."""

SAVING_SECONDS = 0.5
"""The most that a request waits until its summary is stored; that then goes on in the background."""

LOOKING_SECONDS = 2.0
"""The most that a request waits while the store is asked for earlier summaries to build upon."""

CLOSING_SECONDS = 5.0
"""Seconds that summaries have to be stored when the process ends."""

LEFT_OF_A_TENANT = 8
"""The most makings of a tenant that go on after their clients have disconnected, ..."""

LEFT = 32
"""... and the most of a process: each of them holds its conversation in memory."""

POLL_SECONDS = 0.1
"""Seconds between two looks for a summary that another worker is making."""

SAVED_AGAIN_SECONDS = 30.0
"""Seconds before a summary that couldn't be stored is offered to the store again."""

FAILED_REMEMBERED = 5_000
"""Checkpoints whose makings failed that are kept in mind, the newest ones."""

Origin = Literal["stored", "made", "digest"]


class StoredSummary(msgspec.Struct, frozen=True):
    """What is kept for a checkpoint: the text, and the whole message that stands for the turns before it.

    ``tokens`` is the size of the message, ``found`` what the turns mention of paths, URLs and identifiers.
    ``digest`` says that no model made the text; ``until`` when a digest is tried anew, in the event loop's time;
    ``unasked`` that no model failed either, because none was asked; ``given_up`` that none will be;
    ``over_budget`` that the team's budget for summaries was used up.
    """

    text: str
    message: bytes
    tokens: int
    found: Artefacts
    digest: bool = False
    until: float = 0.0
    unasked: bool = False
    given_up: bool = False
    over_budget: bool = False


SummaryFactory = Callable[[StoredSummary | None, int], Awaitable[StoredSummary]]
"""Makes an entry from the previous one, if there is any, and the position up to which that one reaches."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A place in a conversation: its position in the body, and the chained key of all before it.

    ``content`` is a chained key of the messages alone, whoever sent them; the archive has them under its beginning.
    """

    position: int
    key: str
    content: str = ""


Place = tuple[str, str]
"""A tenant and the key of a checkpoint."""


class InFlight:
    """One summary in the making, and how many wait for it."""

    def __init__(self, task: asyncio.Task[StoredSummary]) -> None:
        self.task = task
        self.waiting = 0


class Summaries:
    """Gives the entry for a conversation's last checkpoint."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._memory: dict[tuple[str, str], StoredSummary] = {}
        self._bytes = 0
        self._failures: dict[tuple[str, str], int] = {}
        self._flights: dict[Place, InFlight] = {}
        self._unsaved: dict[Place, float] = {}  # when to try again, in the event loop's time
        self._background: set[asyncio.Task[None]] = set()
        self._saving: set[asyncio.Task[None]] = set()

    async def stored(self, tenant: str, key: str) -> StoredSummary | None:
        """The entry, if there is one."""
        try:
            return await self._found(tenant, key)
        except StoreFailed as failure:
            log.warning("store.read_failed", reason=str(failure))
            # It may have been made while the store was asked.
            return self._in_memory(tenant, key)

    async def _found(self, tenant: str, key: str) -> StoredSummary | None:
        """The same. Raises ``StoreFailed``."""
        entry = self._in_memory(tenant, key)
        if entry is not None:
            due = self._unsaved.get((tenant, key))
            if due is not None and asyncio.get_running_loop().time() >= due:
                self._save(tenant, key, entry)
            return entry
        value = await self._store.get(tenant, KIND, key)
        # It may have been made while the store was asked.
        entry = self._in_memory(tenant, key) or (None if value is None else _decoded(value))
        if entry is not None:
            self._remember(tenant, key, entry)
        return entry

    async def obtain(
        self, tenant: str, checkpoints: Sequence[Checkpoint], make: SummaryFactory
    ) -> tuple[StoredSummary, Origin]:
        """The entry for the last checkpoint, made from the latest earlier one that is stored.

        Concurrent callers for one checkpoint wait for one making. It goes on when the last of them leaves, within its
        own limits in time, so that the client's next attempt finds the summary.
        """
        last = checkpoints[-1]
        entry = await self.stored(tenant, last.key)
        if entry is not None:
            return entry, "digest" if entry.digest else "stored"
        place = (tenant, last.key)
        flight = self._flights.get(place)
        if flight is None:
            flight = self._flights[place] = InFlight(asyncio.ensure_future(self._make(tenant, checkpoints, make)))
            flight.task.add_done_callback(lambda task: self._landed(place, task))
        flight.waiting += 1
        try:
            entry = await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if flight.waiting == 0 and not flight.task.done():
                self._left_alone(place)
        return entry, "digest" if entry.digest else "made"

    def begin(self, tenant: str, checkpoints: Sequence[Checkpoint], make: SummaryFactory) -> None:
        """Make an entry ahead of need, in the background."""
        key = checkpoints[-1].key
        if (tenant, key) in self._flights or self._in_memory(tenant, key) is not None:
            return

        async def ahead() -> None:
            await self.obtain(tenant, checkpoints, make)

        task = asyncio.ensure_future(ahead())
        self._background.add(task)
        task.add_done_callback(self._ended)

    def given_up(self, tenant: str, checkpoints: Sequence[Checkpoint]) -> bool:
        """Whether makings for a conversation failed so often that no model is to be asked for it again.

        Failures count over its checkpoints, back to the last one that has a summary. An edited conversation has other
        checkpoints and begins anew.
        """
        failures = 0
        for checkpoint in reversed(checkpoints):
            entry = self._memory.get((tenant, checkpoint.key))
            if entry is not None and not entry.digest:
                break
            failures += self._failures.get((tenant, checkpoint.key), 0)
        return failures >= FAILURES

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        """Drop what is remembered of tenants that were forgotten; says of which."""
        tenants = {tenant for tenant, _ in (*self._memory, *self._failures) if forgotten(tenant)}
        for tenant, key in [place for place in self._memory if place[0] in tenants]:
            self._forget(tenant, key)
        self._failures = {place: count for place, count in self._failures.items() if place[0] not in tenants}
        self._unsaved = {place: due for place, due in self._unsaved.items() if place[0] not in tenants}
        return tenants

    async def aclose(self) -> None:
        """End all making, and store what was made."""
        tasks = [*self._background, *(flight.task for flight in self._flights.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._saving:
            _, late = await asyncio.wait(self._saving, timeout=CLOSING_SECONDS)
            if late:
                log.warning("summary.not_stored", summaries=len(late))
            for task in late:
                task.cancel()

    async def _make(self, tenant: str, checkpoints: Sequence[Checkpoint], make: SummaryFactory) -> StoredSummary:
        """Make the entry, or wait for the worker that is making it."""
        key = checkpoints[-1].key
        lease = Lease(self._store, tenant, key)
        if not await lease.take() and (entry := await self._made_elsewhere(lease, tenant, key)) is not None:
            return entry
        saving = None
        try:
            previous, position = await self._earlier(tenant, checkpoints[:-1])
            entry = await make(previous, position)
            if entry.digest:
                return self._keep_digest(tenant, checkpoints, entry)
            self._failures.pop((tenant, key), None)
            self._remember(tenant, key, entry)
            saving = self._save(tenant, key, entry)
            await asyncio.wait({saving}, timeout=SAVING_SECONDS)
            return self._memory.get((tenant, key), entry)
        finally:
            if lease.held:
                self._later(self._released(lease, saving))

    async def _made_elsewhere(self, lease: Lease, tenant: str, key: str) -> StoredSummary | None:
        """Return the entry that another worker is making; ``None`` if it ends without one."""
        while True:
            free = await lease.free()
            entry = await self.stored(tenant, key)
            if entry is not None or free:
                return entry
            await asyncio.sleep(POLL_SECONDS)

    async def _released(self, lease: Lease, saving: asyncio.Task[None] | None) -> None:
        """Release a lease once the summary is stored, so that a worker that waits for it finds it.

        If that is cancelled, the lease isn't renewed any more, and ends on its own.
        """
        try:
            if saving is not None:
                await asyncio.wait({saving})
            await lease.release()
        finally:
            lease.lapse()

    def _left_alone(self, place: Place) -> None:
        """Let a making go on without anybody who waits for it, unless there are too many of these.

        Too many of a tenant: this one is cancelled. Too many altogether: the newest one of the tenant that has most.
        """
        alone = [other for other, flight in self._flights.items() if flight.waiting == 0 and not flight.task.done()]
        of_tenants = Counter(tenant for tenant, _ in alone)
        if of_tenants[place[0]] > LEFT_OF_A_TENANT:
            self._cancel(place)
        elif len(alone) > LEFT:
            tenant, _ = of_tenants.most_common(1)[0]
            self._cancel(next(other for other in reversed(alone) if other[0] == tenant))
        else:
            log.info("summary.client_left", makings=len(alone))

    def _cancel(self, place: Place) -> None:
        # A request that comes while the task is still ending must not join it, but begin another one.
        self._flights.pop(place).task.cancel()

    def _landed(self, place: Place, task: asyncio.Task[StoredSummary]) -> None:
        flight = self._flights.get(place)
        if flight is None or flight.task is not task:
            return
        del self._flights[place]
        if flight.waiting == 0 and not task.cancelled() and (error := task.exception()) is not None:
            log.error("summary.background_failed", error=type(error).__name__, exc_info=error)

    async def _earlier(self, tenant: str, checkpoints: Sequence[Checkpoint]) -> tuple[StoredSummary | None, int]:
        """The latest summary to build upon, and its position; none where the store fails or takes too long."""
        try:
            async with asyncio.timeout(LOOKING_SECONDS):
                for earlier in reversed(checkpoints):
                    entry = await self._found(tenant, earlier.key)
                    if entry is not None and not entry.digest:
                        return entry, earlier.position
        except (StoreFailed, TimeoutError) as failure:
            log.warning("store.read_failed", reason=str(failure) or f"took over {LOOKING_SECONDS:g} s")
        for earlier in reversed(checkpoints):
            entry = self._in_memory(tenant, earlier.key)
            if entry is not None and not entry.digest:
                return entry, earlier.position
        return None, 0

    def _save(self, tenant: str, key: str, entry: StoredSummary) -> asyncio.Task[None]:
        """Store an entry in the background, or take over the one that another worker has stored before."""
        self._unsaved.pop((tenant, key), None)
        return self._later(self._agree(tenant, key, entry))

    async def _agree(self, tenant: str, key: str, entry: StoredSummary) -> None:
        value = msgspec.msgpack.encode(entry)
        try:
            first = await self._store.add(tenant, KIND, key, value, LIFETIME)
            if first == value:
                return
            winner = _decoded(first)
            if winner is None:
                await self._store.put(tenant, KIND, key, value, LIFETIME)
            else:
                self._remember(tenant, key, winner)
        except StoreFailed as failure:
            log.warning("store.write_failed", reason=str(failure))
            if (tenant, key) in self._memory:
                self._unsaved[tenant, key] = asyncio.get_running_loop().time() + SAVED_AGAIN_SECONDS

    def _later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do something in the background that is finished before the process ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._saving.add(task)
        task.add_done_callback(self._saving.discard)
        return task

    def _keep_digest(self, tenant: str, checkpoints: Sequence[Checkpoint], entry: StoredSummary) -> StoredSummary:
        """Keep a digest for a while, in this process only; for good, if makings failed too often."""
        key = checkpoints[-1].key
        known = self.given_up(tenant, checkpoints)
        if not entry.unasked:
            failures = self._failures.pop((tenant, key), 0) + 1
            if len(self._failures) >= FAILED_REMEMBERED:
                del self._failures[next(iter(self._failures))]
            self._failures[tenant, key] = failures
        given_up = self.given_up(tenant, checkpoints)
        if given_up and not known:
            GIVEN_UP.inc()
            log.warning("summary.given_up", failures=FAILURES)
        until = math.inf if given_up else asyncio.get_running_loop().time() + DIGEST_LIFETIME
        entry = msgspec.structs.replace(entry, until=until, given_up=given_up)
        self._remember(tenant, key, entry)
        return entry

    def _in_memory(self, tenant: str, key: str) -> StoredSummary | None:
        """The entry as this process has it; a digest only until it is to be tried anew."""
        entry = self._memory.get((tenant, key))
        if entry is None or not entry.digest or asyncio.get_running_loop().time() < entry.until:
            return entry
        self._forget(tenant, key)
        return None

    def _remember(self, tenant: str, key: str, entry: StoredSummary) -> None:
        if (tenant, key) in self._memory:
            self._forget(tenant, key)
        self._memory[tenant, key] = entry
        self._bytes += _size(entry)
        while len(self._memory) > 1 and (len(self._memory) > REMEMBERED or self._bytes > REMEMBERED_BYTES):
            self._forget(*next(iter(self._memory)))

    def _forget(self, tenant: str, key: str) -> None:
        self._bytes -= _size(self._memory.pop((tenant, key)))
        self._unsaved.pop((tenant, key), None)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("summary.background_failed", error=type(error).__name__, exc_info=error)


def _decoded(value: bytes) -> StoredSummary | None:
    """Return a stored entry; ``None`` if it is damaged or of another version: then it is replaced."""
    try:
        return msgspec.msgpack.decode(value, type=StoredSummary)
    except (msgspec.DecodeError, UnicodeDecodeError) as failure:
        log.warning("store.entry_unreadable", reason=str(failure))
        return None


def _size(entry: StoredSummary) -> int:
    """Bytes that an entry takes in memory, about."""
    texts = (text for found in entry.found.values() for text in found)
    return sum(map(sys.getsizeof, (entry, entry.text, entry.message, *texts)))
