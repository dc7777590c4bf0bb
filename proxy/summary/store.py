"""Summaries in memory and in the store, and the lease of the worker that makes one.

If several workers make a summary for one checkpoint, all of them use the first one stored. A lease in the store lets
one of them make it while the others wait. A lease that isn't renewed ends after a few seconds, so a dead worker delays
the others only that long. Its value is the worker's token. So a worker that was paused can't renew or release the lease
that another one has taken since then.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import structlog

from proxy.compaction.identifiers import Names
from proxy.store import Store, StoreFailed
from proxy.store.tenant_cache import Codec, Place, TenantCache, TenantMemory, Waiting, cancelled
from proxy.summary import times

log = structlog.get_logger(__name__)

KIND = "summary.2"
"""Incompatible formats of ``StoredSummary`` get kinds of their own, so versions of the proxy can share a store."""

LEASES = "making"  # the kind of leases
REMEMBERED = 500  # entries that each process keeps in memory
NAME = 230  # about the bytes of a name in memory with its mentions and the name of its file, without its characters

Origin = Literal["stored", "made", "digest"]

Cause = Literal[
    "waiting", "timeout", "failed", "breaker_open", "given_up", "over_budget", "no_model", "not_stored", "unused"
]
"""The reason for a digest. ``waiting``: the model writes the summary in the background. ``timeout``: the model was
slower than requests wait, so it goes on in the background, or is called there again. ``not_stored``: the proxy stores
nothing for this caller. ``unused``: the client changes old messages, so that earlier summaries were hardly used."""


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

    def __init__(self, store: Store, most: int) -> None:
        """``most`` is the bytes of the most recently used entries, and of those that wait to be stored."""
        super().__init__(store, KIND, CODEC, TenantMemory(most, _size_of, REMEMBERED), most)

    def get(self, *place: str) -> StoredSummary | None:
        """Return the entry in memory, unless it's an expired digest."""
        entry = super().get(*place)
        return None if entry is None or (entry.digest and now() >= entry.until) else entry

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


class Lease:
    """The right to make one summary. If the store doesn't respond, every worker has it."""

    def __init__(self, store: Store, tenant: str, key: str) -> None:
        self._store = store
        self._entry = (tenant, LEASES, key)
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
            done, _ = await asyncio.wait({self._taking}, timeout=times.TAKING)
        except asyncio.CancelledError:
            await cancelled(self._taking)
            self.lapse()
            raise
        if not done:
            log.warning("store.write_failed", reason=f"took over {times.TAKING:g} s")
        return not done or self._taking.result()

    async def _take(self) -> bool:
        try:
            holder = await self._store.add(*self._entry, self._token, times.LEASE)
        except StoreFailed as failure:
            log.warning("store.write_failed", reason=str(failure))
            return True
        if holder == self._token:
            self._renewing = asyncio.get_running_loop().create_task(self._renew())
        return self.held

    async def free(self) -> bool:
        """Return whether no worker has the lease, or the store fails."""
        try:
            return await self._store.get(*self._entry) is None
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
            await self._store.replace(*self._entry, self._token, b"", 0)  # another worker's lease stays
        except StoreFailed as failure:  # the lease expires without renewal
            log.warning("store.write_failed", reason=str(failure))

    def lapse(self) -> None:
        """Stop taking or renewing the lease. It ends within ``times.LEASE`` unless it was released."""
        if self._taking is not None:
            self._taking.cancel()
        if self._renewing is not None:
            self._renewing.cancel()

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(times.RENEWING)
            try:
                if await self._store.replace(*self._entry, self._token, self._token, times.LEASE):
                    continue
                # The lease ended because this process was paused. Take it again if no other worker has it.
                if await self._store.add(*self._entry, self._token, times.LEASE) != self._token:
                    log.warning("summary.lease_lost")
                    return
            except StoreFailed as failure:
                log.warning("store.write_failed", reason=str(failure))


def now() -> float:
    """Return the event loop's time."""
    return asyncio.get_running_loop().time()


def _size_of(entry: StoredSummary) -> int:
    """Return the approximate bytes of an entry in memory."""
    parts = sum(map(sys.getsizeof, (entry, entry.text, entry.message)))
    return parts + sum(map(len, entry.names)) + NAME * len(entry.names)
