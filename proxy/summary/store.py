"""Summaries by checkpoint: read from the store, made once for all callers that wait, or replaced by a digest.

A request waits for a slow model only so long. Then it gets a digest, which the summary replaces once it's made.

If several workers make a summary for one checkpoint, all of them use the first one stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import msgspec
import structlog
from cachetools import LRUCache

from proxy.compaction.identifiers import Names
from proxy.constants import DAY
from proxy.store import Store, StoreFailed
from proxy.store.forgetting import drop
from proxy.store.tenant_cache import CacheCapacity, Codec, Place, TenantCache, TenantMemory, Waiting
from proxy.summary.single_flight import Lease, NothingToAsk, Progress, SingleFlight
from proxy.telemetry.metrics import GIVEN_UP

log = structlog.get_logger(__name__)

KIND = "summary.2"
"""Incompatible formats of ``StoredSummary`` get kinds of their own, so versions of the proxy can share a store."""

LIFETIME = 30 * DAY  # lifetime of a model's summary in the store, in seconds
REMEMBERED = 500  # entries that each process keeps in memory
NAME = 230  # about the bytes of a name in memory with its mentions and the name of its file, without its characters
WORTH = 8  # Requests that pay for a summary of everything. A client that changes old messages makes each one useless.
FAILURES = 3  # failed attempts after which the proxy stops calling models for a conversation


@dataclass(frozen=True, slots=True)
class SummaryLimits:
    """The times, in seconds, and the sizes of ``Summaries``.

    After ``digest_lifetime`` the proxy calls a model again in place of a digest. Until then the prompt stays the same.
    A request waits ``saving`` until its summary is stored. Before, with the lease, it reads this summary and earlier
    ones for ``looking``. A worker looks for the summary of another one every ``poll``. When the process ends, it
    releases its leases for ``closing``. If nobody waits for the other one's summary, it looks only every ``slow_poll``.

    Memory keeps the most recently used ``entries`` of at most ``bytes``, but always the newest one. At most ``bytes``
    wait to be stored. Memory also keeps the failures of ``failed`` checkpoints.
    """

    digest_lifetime: float = 300.0
    saving: float = 0.5
    looking: float = 1.5
    closing: float = 5.0
    poll: float = 0.1
    slow_poll: float = 2.0
    entries: int = REMEMBERED
    bytes: int = CacheCapacity().summaries
    failed: int = 5_000


DEFAULT_LIMITS = SummaryLimits()

Origin = Literal["stored", "made", "digest"]


Cause = Literal[
    "waiting", "timeout", "failed", "breaker_open", "given_up", "over_budget", "no_model", "not_stored", "unused"
]
"""The reason for a digest. ``waiting``: the model writes the summary in the background. ``timeout``: the model was
slower than requests wait, so it goes on in the background, or is called there again. ``not_stored``: the proxy stores
nothing for this caller. ``unused``: the client changes old messages, so that earlier summaries were hardly used."""


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


class StoredSummary(msgspec.Struct, frozen=True):
    """The entry for a checkpoint: the text, and the message that replaces the turns before it, without its index.

    ``names`` contains the names in the turns. ``index_at`` is the place of their index in the text of the message; 0 if
    it gets none. A model's summary has no ``cause``. A digest has one, and is replaced at ``until``, in the event
    loop's time, or never (infinity) if the proxy has given up. ``replaced`` is the cause of the digest before.
    """

    text: str
    message: bytes
    names: Names = msgspec.field(name="found")
    index_at: int = 0
    cause: Cause | None = None
    until: float = 0.0
    replaced: str | msgspec.UnsetType = msgspec.UNSET

    @property
    def digest(self) -> bool:
        """Return whether no model wrote the text."""
        return self.cause is not None

    @property
    def given_up(self) -> bool:
        """Return whether this is a digest that stays, because the proxy calls no model again."""
        return self.until == math.inf

    @property
    def late(self) -> bool:
        """Return whether this is a digest that a summary of a slow model may replace without a request that waits."""
        return self.cause == "timeout" and not self.given_up

    @property
    def blocked(self) -> bool:
        """Return whether the proxy would have called a model, but failures or missing models keep it from that."""
        return self.given_up or self.cause in ("breaker_open", "given_up", "no_model")


SummaryFactory = Callable[[StoredSummary | None, int, Progress], Awaitable[StoredSummary]]
"""Makes an entry from the previous one, if any, and the position where that one ends. Reports its tries."""

DigestFactory = Callable[[StoredSummary | None, int], Awaitable[StoredSummary]]
"""Makes a digest with the cause ``timeout`` from the previous entry, if any, and the position where that one ends."""


class Patience(NamedTuple):
    """The seconds that a request waits for one model, and the digest that it gets then."""

    seconds: float
    digest: DigestFactory


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A place in a conversation: its position in the body, and the chained key of everything before it.

    ``content`` is a chained key of only the messages, independent of the sender. Archive ids are its first digits.
    """

    position: int
    key: str
    content: str = ""


CODEC = Codec(lambda entries: list(map(msgspec.msgpack.encode, entries)), msgspec.msgpack.Decoder(StoredSummary).decode)


class SummaryCache(TenantCache[StoredSummary]):
    """Entries in memory and in the store. Of several workers that store one, all use the first.

    Digests are in memory only.
    """

    def __init__(self, store: Store, limits: SummaryLimits) -> None:
        super().__init__(store, KIND, CODEC, TenantMemory(limits.bytes, _size_of, limits.entries), limits.bytes)

    def get(self, *place: str) -> StoredSummary | None:
        """Return the entry in memory, unless it's an expired digest."""
        entry = super().get(*place)
        return None if entry is None or (entry.digest and _now() >= entry.until) else entry

    def peek(self, place: Place) -> StoredSummary | None:
        """Return the entry in memory, also an expired digest."""
        entry: StoredSummary | None = self._memory.get(place)
        return entry

    async def find(self, place: Place) -> StoredSummary | None:
        """Return the entry, or ``None``. Raises ``StoreFailed``.

        A late digest in memory doesn't hide a summary that another worker has stored since.
        """
        entry = self.get(*place)
        if entry is not None and not entry.late:
            return entry
        stored = await self.read(*place)
        # Another caller may have made it during the read.
        entry = self.get(*place)
        if stored is not None and (entry is None or entry.late):
            self.remember(place, stored)
            return stored
        return entry

    async def _store_batch(self, batch: Sequence[tuple[Place, Waiting[StoredSummary]]]) -> None:
        """Store entries unless other workers have stored theirs first. Raises ``StoreFailed``."""
        for place, waiting in batch:
            first = await self._first(place, waiting)
            if first is not None and self.writes.get(place) is waiting.value:  # the tenant wasn't forgotten meanwhile
                self.remember(place, first)

    async def _first(self, place: Place, waiting: Waiting[StoredSummary]) -> StoredSummary | None:
        """Store an entry. Return the one that another worker stored first, or ``None``."""
        (value,) = self._codec.encode([waiting.value])
        entry = (place[0], KIND, place[1])
        while self._store is not None and (first := await self._store.add(*entry, value, waiting.seconds)) != value:
            winner, error = self._decode(first)
            if error is None:
                return winner
            self._unreadable(place, error)
            # Of several workers, one replaces the damaged entry and the others use the new one.
            await self._store.replace(*entry, first, value, waiting.seconds)
        return None

    def _size(self, value: StoredSummary) -> int:
        return _size_of(value)

    def _failed(self, entries: int, reason: str) -> None:
        log.warning("store.write_failed", reason=reason)

    def _given_up(self, entries: int) -> None:
        log.warning("summary.not_stored", summaries=entries)

    def _unreadable(self, place: Place, error: Exception) -> None:
        log.warning("store.entry_unreadable", reason=str(error))


class Summaries:
    """Provide the entry for a conversation's last checkpoint."""

    def __init__(self, store: Store, limits: SummaryLimits | None = None, memory: int | None = None) -> None:
        """``limits`` defaults to ``DEFAULT_LIMITS``. ``memory`` replaces its bytes."""
        limits = limits or DEFAULT_LIMITS
        self._limits = limits if memory is None else replace(limits, bytes=memory)
        self._store = store
        self.cache = SummaryCache(store, self._limits)
        self._failures: LRUCache[Place, int] = LRUCache(self._limits.failed)
        # The times until which no model is asked for these checkpoints ahead of need, because there was none to ask.
        self._unaskable: LRUCache[Place, float] = LRUCache(self._limits.failed)
        # By tenant and mark of a conversation, see ``lineage``.
        self._lineages: LRUCache[Place, Lineage] = LRUCache(4 * self._limits.failed)
        self._flights: SingleFlight[StoredSummary] = SingleFlight()
        self._background: set[asyncio.Task[None]] = set()
        self._releasing: set[asyncio.Task[None]] = set()

    async def stored(self, tenant: str, key: str) -> StoredSummary | None:
        """Return the entry, or ``None``."""
        try:
            return await self.cache.find((tenant, key))
        except StoreFailed as failure:
            log.warning("store.read_failed", reason=str(failure))
            # Another caller may have made it during the read.
            return self.cache.get(tenant, key)

    async def obtain(
        self, tenant: str, checkpoints: Sequence[Checkpoint], make: SummaryFactory, patience: Patience | None = None
    ) -> tuple[StoredSummary, Origin]:
        """Return the entry for the last checkpoint. If there is none, make it from the latest earlier one.

        Concurrent callers for one checkpoint share the same task. It continues after the last of them disconnects or
        has waited long enough, within its own timeouts, so that the conversation's next request finds the summary.
        """
        place = tenant, checkpoints[-1].key
        entry = await self.stored(*place)
        if entry is not None:
            return entry, "digest" if entry.digest else "stored"
        late = self.cache.peek(place)
        if late is not None and late.late:  # no request waits for this model again
            self.begin(tenant, checkpoints, make, patience)
            return late, "digest"
        seconds = None if patience is None else patience.seconds
        made = await self._made(place, partial(self._make, tenant, checkpoints, make), seconds)
        if made is None and patience is not None:
            made = await self._late_digest(tenant, checkpoints, patience)
        assert made is not None  # noqa: S101 - without patience, a caller waits until the task is done
        return made, "digest" if made.digest else "made"

    def begin(
        self, tenant: str, checkpoints: Sequence[Checkpoint], make: SummaryFactory, patience: Patience | None = None
    ) -> None:
        """Make an entry in the background, ahead of need or after the model was too slow.

        Once it takes longer than ``patience``, it counts toward the summaries that nobody waits for.
        """
        place = tenant, checkpoints[-1].key
        if place in self._flights or self.cache.get(*place) is not None or self._unaskable.get(place, 0) > _now():
            return
        seconds = None if patience is None else patience.seconds

        async def ahead() -> None:
            if await self.stored(*place) is None:
                try:
                    await self._flights.run(place, partial(self._make, tenant, checkpoints, make), seconds, skips=False)
                except NothingToAsk:
                    self._unaskable[place] = _now() + self._limits.digest_lifetime

        task = asyncio.ensure_future(ahead())
        self._background.add(task)
        task.add_done_callback(self._ended)

    def given_up(self, tenant: str, checkpoints: Sequence[Checkpoint]) -> bool:
        """Return whether summaries of a conversation failed so often that the proxy stops calling models for it.

        The count includes all checkpoints since the last one with a summary. An edited conversation has other
        checkpoints, so its count starts at zero.
        """
        failures = 0
        for checkpoint in reversed(checkpoints):
            entry = self.cache.peek((tenant, checkpoint.key))
            if entry is not None and not entry.digest:
                break
            failures += self._failures.get((tenant, checkpoint.key), 0)
        return failures >= FAILURES

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        """Drop the entries of forgotten tenants, and return those tenants. Cancel summaries that nobody waits for."""
        self._flights.cancel(forgotten)
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
        tasks = [*self._background, *self._flights.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def aclose(self) -> None:
        """Cancel summaries in progress and store the finished ones, also those that a failing store didn't take."""
        await self.stop()
        await self.cache.aclose()
        if self._releasing:
            _, late = await asyncio.wait(self._releasing, timeout=self._limits.closing)
            for task in late:
                task.cancel()

    async def _make(
        self, tenant: str, checkpoints: Sequence[Checkpoint], make: SummaryFactory, progress: Progress
    ) -> StoredSummary:
        """Make the entry, or wait for the worker that is making it."""
        place = tenant, checkpoints[-1].key
        lease = Lease(self._store, *place)
        while not await lease.take():
            if (entry := await self._made_elsewhere(lease, place)) is not None:
                return entry
        try:
            # Another worker may have stored the entry just before this one took the lease.
            previous, position = await self._latest(tenant, checkpoints if lease.held else checkpoints[:-1])
            if previous is not None and position == checkpoints[-1].position:
                return previous
            entry = await make(previous, position, progress)
            if entry.digest:
                # Another worker may have taken over while this one was paused.
                if lease.held and (stored := await self.stored(*place)) is not None and not stored.digest:
                    return stored
                return self._keep_digest(tenant, checkpoints, entry)
            self._failures.pop(place, None)
            if (shown := self.cache.peek(place)) is not None and shown.digest:
                entry = msgspec.structs.replace(entry, replaced=shown.cause or msgspec.UNSET)
            self.cache.remember(place, entry)
            if not self.cache.save(place, entry, LIFETIME):
                log.warning("summary.not_stored", summaries=1)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limits.saving):
                    await self.cache.writes.written(place)
            return self.cache.peek(place) or entry
        except asyncio.CancelledError:  # because too many are being made, or the process ends
            if (shown := self.cache.peek(place)) is not None and shown.late:
                self._count_failure(place)
            raise
        finally:
            if lease.held or lease.pending:
                self._later(self._released(lease, place))

    async def _made(
        self, place: Place, make: Callable[[Progress], Coroutine[Any, Any, StoredSummary]], seconds: float | None
    ) -> StoredSummary | None:
        """Return the entry that a task makes; ``None`` if that takes too long."""
        while True:
            try:
                return await self._flights.run(place, make, seconds)
            except NothingToAsk:  # this request joined a task ahead of need
                continue

    async def _made_elsewhere(self, lease: Lease, place: Place) -> StoredSummary | None:
        """Return the entry that another worker is making; ``None`` if it ends without one.

        If requests have a digest by then, return their digest, so that the workers don't all try in turn.
        """
        while True:
            free = await lease.free()
            entry = await self.stored(*place)
            if entry is not None and not entry.late:
                return entry
            shown = self.cache.peek(place)
            late = shown if shown is not None and shown.late else None
            if free and late is not None:
                return self._keep_late(place, late)
            if free:
                return entry
            await asyncio.sleep(self._limits.poll if late is None else self._limits.slow_poll)

    async def _released(self, lease: Lease, place: Place) -> None:
        """Release a lease after the summary is stored, so that a waiting worker finds the summary.

        If this task is cancelled, the lease expires.
        """
        try:
            await self.cache.writes.written(place)
            await lease.release()
        finally:
            lease.lapse()

    async def _latest(self, tenant: str, checkpoints: Sequence[Checkpoint]) -> tuple[StoredSummary | None, int]:
        """Return the latest summary and its position, only from memory if the store fails or is slow."""
        try:
            async with asyncio.timeout(self._limits.looking):
                for checkpoint in reversed(checkpoints):
                    entry = await self.cache.find((tenant, checkpoint.key))
                    if entry is not None and not entry.digest:
                        return entry, checkpoint.position
        except (StoreFailed, TimeoutError) as failure:
            log.warning("store.read_failed", reason=str(failure) or f"took over {self._limits.looking:g} s")
        for checkpoint in reversed(checkpoints):
            entry = self.cache.get(tenant, checkpoint.key)
            if entry is not None and not entry.digest:
                return entry, checkpoint.position
        return None, 0

    def _later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start background work that ``aclose`` waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)
        return task

    async def _late_digest(self, tenant: str, checkpoints: Sequence[Checkpoint], patience: Patience) -> StoredSummary:
        """Return the digest for requests that have waited long enough, or the summary if it's just been made."""
        place = tenant, checkpoints[-1].key
        entry = await patience.digest(*await self._latest(tenant, checkpoints[:-1]))
        if (shown := await self.stored(*place)) is not None:  # also the digest of another request that waited
            return shown
        log.warning("summary.timed_out", seconds=patience.seconds)
        return self._keep_late(place, entry)

    def _keep_late(self, place: Place, entry: StoredSummary) -> StoredSummary:
        """Keep a digest in place of a slow model's summary. After its lifetime, the proxy calls a model again."""
        entry = msgspec.structs.replace(entry, until=_now() + self._limits.digest_lifetime)
        self.cache.remember(place, entry)
        return entry

    def _keep_digest(self, tenant: str, checkpoints: Sequence[Checkpoint], entry: StoredSummary) -> StoredSummary:
        """Keep a digest in this process for its lifetime, or without limit after too many failures."""
        if entry.cause == "unused":
            return entry  # a later request may have it made
        place = tenant, checkpoints[-1].key
        known = self.given_up(tenant, checkpoints)
        if entry.cause in ("failed", "timeout"):
            self._count_failure(place)
        given_up = self.given_up(tenant, checkpoints)
        if given_up and not known:
            GIVEN_UP.inc()
            log.warning("summary.given_up", failures=FAILURES)
        until = math.inf if given_up else _now() + self._limits.digest_lifetime
        shown = self.cache.peek(place)
        if shown is not None and shown.late:  # the conversation's prompts keep their bytes
            entry = msgspec.structs.replace(shown, cause=entry.cause)
        entry = msgspec.structs.replace(entry, until=until)
        self.cache.remember(place, entry)
        return entry

    def _count_failure(self, place: Place) -> None:
        self._failures[place] = self._failures.get(place, 0) + 1

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("summary.background_failed", error=type(error).__name__, exc_info=error)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _size_of(entry: StoredSummary) -> int:
    """Return the approximate bytes of an entry in memory."""
    parts = sum(map(sys.getsizeof, (entry, entry.text, entry.message)))
    return parts + sum(map(len, entry.names)) + NAME * len(entry.names)
