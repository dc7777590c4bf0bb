"""Keep values by tenant in memory, and write them to the store in the background, many in one call.

All caches of stored values follow the same rules:

- Memory keeps the most recently used values. The values that wait to be written have a maximum size, and a value over
  it isn't written.
- After a failed write, the values wait, and the next write has half as many after a pause. So a value that the store
  refuses fails alone in the end, and only that one is dropped.
- A stored value that can't be decoded counts as missing.
- A forgotten tenant's values leave memory, and those that wait aren't written.
- A process that ends writes the values that wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from contextvars import Context
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import structlog

from proxy.constants import UNDECODABLE
from proxy.store.forgetting import drop
from proxy.store.interface import Entry, Refused, Store, StoreFailed
from proxy.telemetry.metrics import STORE_WAITING

log = structlog.get_logger(__name__)

V = TypeVar("V")

Place = tuple[str, ...]  # a tenant, and the names of one of its values, which is the key of its entry in most caches
ENTRIES = 500  # maximum entries per write
BYTES = 4_000_000  # bytes after which a write gets no further entry
INLINE_BYTES = 32_768  # Bytes of values that are encoded or decoded on the event loop. More are processed in a thread.
GATHER_SECONDS = 0.02  # seconds to wait for the values of further requests before a write, unless someone waits for it
LATE_SECONDS = 1.0  # age of the oldest waiting entry from which requests wait for the writer

ROOM_SECONDS, STUCK_SECONDS = 5.0, 2.0
"""Seconds after which a request stops waiting for the writer: in total, and without a completed write."""

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 5.0  # Seconds between failed writes. The pause doubles.
ATTEMPTS = 3  # Times that an entry may fail alone while the store takes other entries. Then it's dropped.
CLOSING_SECONDS = 5.0  # seconds without a completed write after which a process that ends drops what waits
LAST_ATTEMPTS = 4  # failed writes after which a process that ends drops what waits
AGAIN_SECONDS = 0.1  # seconds after which `cancelled` cancels a task again


STALL_SECONDS = 0.1  # if a wait takes this much longer than it should, this process was busy


async def cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel a task that uses the store, and wait until it has ended.

    redis-py loses a cancellation that arrives together with an answer, so cancel a task until it ends.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=AGAIN_SECONDS)


async def answered(call: asyncio.Future[Any], seconds: float) -> bool:
    """Wait for a call to the store. If this process was busy meanwhile, the store gets as much time again."""
    for _ in range(2):
        began = time.monotonic()
        await asyncio.wait({call}, timeout=seconds)
        if call.done() or time.monotonic() - began < seconds + STALL_SECONDS:
            break
    return call.done()


class Waiting(Generic[V]):
    """A value that waits to be written. ``since`` is in the event loop's time."""

    __slots__ = ("attempts", "seconds", "since", "size", "successes", "value")

    def __init__(self, value: V, size: int, seconds: float, since: float) -> None:
        self.value = value
        self.size = size
        self.seconds = seconds
        self.since = since
        self.attempts = 0
        """Times that the value failed alone, not counting those with no other write in between."""
        self.successes = -1
        """Writes that had succeeded when the value last failed alone."""


class WriteBehind(Generic[V]):
    """The values of one kind that wait to be written, and the task that writes them.

    One task writes up to ``ENTRIES`` at once, because each call waits for its turn on a busy event loop, and its thread
    for the interpreter lock.
    """

    def __init__(
        self,
        kind: str,
        write: Callable[[Sequence[tuple[Place, Waiting[V]]]], Awaitable[None]],
        most: int,
        failed: Callable[[int, str], None],
        ended: Callable[[Place, Waiting[V], bool], None],
        gather_seconds: float = GATHER_SECONDS,
    ) -> None:
        """``write`` stores values. It raises ``StoreFailed``, and ``Refused`` if one of them is at fault.

        ``most`` is the maximum size of what waits, in bytes. ``failed`` gets the number of values of a failed write,
        and the reason. ``ended`` gets each value that was written or dropped, and whether it was written.
        ``gather_seconds`` is the time to wait for further values before a write.
        """
        self._kind = kind
        self._store_batch = write
        self._most = most
        self._failed = failed
        self._ended = ended
        self._gather_seconds = gather_seconds
        self._gauge = STORE_WAITING.labels(kind=kind)
        self._waiting: dict[Place, Waiting[V]] = {}
        self._bytes = 0
        self._limit = ENTRIES
        self._pause = 0.0
        self._successes = 0
        self._last_attempts = LAST_ATTEMPTS
        self._task: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
        self._progress = asyncio.Event()
        """Set for a moment after each completed write, and when the task ends."""
        self._attempted = asyncio.Event()
        """Set for a moment after each write, completed or failed."""
        self._hurry = asyncio.Event()
        """Set when the process ends."""
        self._wanted = asyncio.Event()
        """Set when someone waits for a write, or many values wait."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def bytes(self) -> int:
        return self._bytes

    @property
    def failing(self) -> bool:
        return self._pause > 0

    def get(self, place: Place) -> V | None:
        found = self._waiting.get(place)
        return None if found is None else found.value

    def takes(self, size: int) -> bool:
        """Return whether there is room for a value. A single value may be larger than the maximum."""
        return not self._waiting or self._bytes + size <= self._most

    def put(self, place: Place, value: V, size: int, seconds: float) -> bool:
        """Write a value in the background, in place of an older one that waits. Return whether there was room.

        Call this in the event loop.
        """
        before = self._waiting.get(place)
        if not self.takes(size - (0 if before is None else before.size)):
            return False
        loop = asyncio.get_running_loop()
        self._waiting[place] = Waiting(value, size, seconds, loop.time() if before is None else before.since)
        self._bytes += size - (0 if before is None else before.size)
        if self._bytes >= BYTES or len(self._waiting) >= ENTRIES:
            self._wanted.set()
        if self._task is None:
            # The task writes the entries of many requests, so its log lines name none.
            self._task = loop.create_task(self._write_all(), context=Context())
        return True

    async def room(self) -> None:
        """Wait while the writer is behind, so that a process that is killed loses little.

        Don't wait for a store that fails. The values wait until it works again.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + ROOM_SECONDS
        while self._waiting and not self._pause and loop.time() < until:
            if loop.time() - next(iter(self._waiting.values())).since <= LATE_SECONDS:
                return
            if not await self._progressed(STUCK_SECONDS):
                return

    async def written(self, place: Place) -> bool:
        """Wait until a value is written or dropped, or the store fails. Return whether it no longer waits."""
        while place in self._waiting and self._task is not None and not self._pause:
            self._wanted.set()
            await self._attempted.wait()
        return place not in self._waiting

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        gone = [place for place in self._waiting if forgotten(place[0])]
        for place in gone:
            self._bytes -= self._waiting.pop(place).size
        return {place[0] for place in gone}

    async def settled(self) -> None:
        async with self._turn:
            return

    async def drained(self, seconds: float = CLOSING_SECONDS) -> bool:
        """Wait until nothing waits. Return false after ``seconds`` without a completed write."""
        while self._waiting and self._task is not None:
            self._wanted.set()
            if not await self._progressed(seconds):
                break
        return not self._waiting

    async def aclose(self) -> int:
        """Write what waits, and drop it if the store fails for too long. Return the number of dropped values."""
        self._hurry.set()
        self._wanted.set()
        await self.drained(CLOSING_SECONDS)
        if self._task is not None:
            await cancelled(self._task)
        return len(self._waiting)

    async def _progressed(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._progress.wait()
        except TimeoutError:
            return False
        return True

    async def _write_all(self) -> None:
        try:
            while self._waiting:
                # Wait a moment, because each write costs as much as some more values in it.
                if not (self._wanted.is_set() or self._hurry.is_set()):
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(self._gather_seconds):
                            await self._wanted.wait()
                self._wanted.clear()
                self._gauge.set(len(self._waiting))
                async with self._turn:
                    if batch := self._batch():  # unless all were forgotten meanwhile
                        await self._write(batch)
                self._attempted.set()
                self._attempted.clear()
                if not self._pause or not self._waiting:
                    self._tell()
                elif not await self._may_repeat():
                    break
        finally:
            self._gauge.set(len(self._waiting))
            self._task = None
            self._attempted.set()
            self._attempted.clear()
            self._tell()

    def _tell(self) -> None:
        self._progress.set()
        self._progress.clear()

    async def _may_repeat(self) -> bool:
        """Pause after a failed write. Return false after some of them if the process ends."""
        if self._hurry.is_set():
            self._last_attempts -= 1
            await asyncio.sleep(FIRST_PAUSE)
            return self._last_attempts > 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._pause):
                await self._hurry.wait()
        return True

    def _batch(self) -> list[tuple[Place, Waiting[V]]]:
        batch: list[tuple[Place, Waiting[V]]] = []
        size = 0
        for place, waiting in self._waiting.items():
            batch.append((place, waiting))
            size += waiting.size
            if len(batch) >= self._limit or size >= BYTES:
                break
        return batch

    async def _write(self, batch: Sequence[tuple[Place, Waiting[V]]]) -> None:
        """Write values. After a failure, the next write gets half as many. Drop a single one that is at fault."""
        refused, pause = False, False
        try:
            await self._store_batch(batch)
        except StoreFailed as failure:
            reason, refused = str(failure), isinstance(failure, Refused)
            pause = not refused
        except Exception as error:  # one value must not keep others from the store
            log.exception("store.write_failed", kind=self._kind, reason=type(error).__name__)
            reason, pause = type(error).__name__, len(batch) == 1
        else:
            self._pause = 0.0
            self._limit = min(2 * self._limit, ENTRIES)
            self._successes += 1
            for place, waiting in batch:
                self._settle(place, waiting, written=True)
            return
        self._limit = max(1, len(batch) // 2)
        if pause:
            self._pause = min(2 * self._pause or FIRST_PAUSE, LONGEST_PAUSE)
        if pause or len(batch) == 1:
            self._failed(len(batch), reason)
        if len(batch) == 1:
            ((place, waiting),) = batch
            if waiting.successes != self._successes:
                waiting.attempts, waiting.successes = waiting.attempts + 1, self._successes
            if refused or waiting.attempts >= ATTEMPTS:
                self._settle(place, waiting, written=False)
            elif self._waiting.get(place) is waiting:
                self._waiting[place] = self._waiting.pop(place)  # the others first

    def _settle(self, place: Place, waiting: Waiting[V], *, written: bool) -> None:
        """Remove a value that was written or dropped, unless its tenant was forgotten or a newer value waits."""
        if self._waiting.get(place) is waiting:
            del self._waiting[place]
            self._bytes -= waiting.size
            self._ended(place, waiting, written)


@dataclass(frozen=True, slots=True)
class Codec(Generic[V]):
    """The stored form of values. Both functions may run in a thread."""

    encode: Callable[[Sequence[V]], list[bytes]]
    """Encodes many values in one call, because each call waits for the interpreter lock."""
    decode: Callable[[bytes], V]
    damaged: tuple[type[Exception], ...] = UNDECODABLE
    """Errors of ``decode`` for a value that is damaged, or that another version wrote."""
    inline_bytes: int = INLINE_BYTES
    """Bytes that are decoded on the event loop."""


class TenantCache(ABC, Generic[V]):
    """Values of one kind, by tenant and key.

    Subclasses give these methods the names and the arguments that their callers need.
    """

    def __init__(
        self,
        store: Store | None,
        kind: str,
        codec: Codec[V],
        memory: MutableMapping[Any, Any],
        pending_bytes: int,
    ) -> None:
        """``memory`` keeps values, unless a subclass keeps something else there, such as the time of a write.

        Without a ``store``, values stay in memory. ``pending_bytes`` is the maximum size of those that wait.
        """
        self._store = store
        self._kind = kind
        self._codec = codec
        self._memory = memory
        self.writes: WriteBehind[V] = WriteBehind(kind, self._store_batch, pending_bytes, self._failed, self._ended)
        """The values that wait to be written."""

    def get(self, *place: str) -> V | None:
        """Return a value that is in memory or waits to be written."""
        value: V | None = self._memory.get(place)
        return self.writes.get(place) if value is None else value

    async def read(self, *place: str) -> V | None:
        """Return a value from the store, or ``None`` if there is none. Raises ``StoreFailed``."""
        return (await self.read_many(place[0], [place])).get(place)

    async def read_many(self, tenant: str, places: Sequence[Place], kind: str = "") -> dict[Place, V]:
        """Return values of a tenant from the store. Damaged ones are missing. Raises ``StoreFailed``.

        ``kind`` is another kind than that of the cache, if it isn't empty.
        """
        if self._store is None:
            return {}
        keys = {self._key(place): place for place in places}
        stored = await self._store.get_many(tenant, kind or self._kind, list(keys))
        if sum(map(len, stored.values())) <= self._codec.inline_bytes:
            decoded = self._decoded(stored)
        else:
            decoded = await asyncio.to_thread(self._decoded, stored)
        values: dict[Place, V] = {}
        for key, (value, error) in decoded.items():
            if error is not None:
                self._unreadable(keys[key], error)
            elif value is not None:
                values[keys[key]] = value
        return values

    def remember(self, place: Place, value: V) -> None:
        self._memory[place] = value

    def save(self, place: Place, value: V, seconds: float) -> bool:
        """Write a value in the background. Return false if too many wait. Call this in the event loop."""
        return self._store is None or self.writes.put(place, value, self._size(value), seconds)

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        return drop(self._memory, forgotten) | self.writes.forget(forgotten)

    async def settled(self) -> None:
        await self.writes.settled()

    async def aclose(self) -> None:
        """Write what waits, and give up if the store fails for too long. The store stays open."""
        if left := await self.writes.aclose():
            self._given_up(left)

    async def _store_batch(self, batch: Sequence[tuple[Place, Waiting[V]]]) -> None:
        """Store values. Raises ``StoreFailed``, and ``Refused`` if a value can't be encoded."""
        if self._store is None:
            return
        values = [waiting.value for _, waiting in batch]
        try:
            if sum(waiting.size for _, waiting in batch) <= INLINE_BYTES:
                encoded = self._codec.encode(values)
            else:
                encoded = await asyncio.to_thread(self._codec.encode, values)
        except Exception as error:
            log.exception("store.write_failed", kind=self._kind, reason=type(error).__name__)
            raise Refused(type(error).__name__) from error
        await self._store.put_many(
            [
                Entry(place[0], self._kind, self._key(place), value, waiting.seconds)
                for (place, waiting), value in zip(batch, encoded, strict=True)
            ]
        )

    def _decoded(self, stored: Mapping[str, bytes]) -> dict[str, tuple[V | None, Exception | None]]:
        return {key: self._decode(raw) for key, raw in stored.items()}

    def _decode(self, raw: bytes) -> tuple[V | None, Exception | None]:
        try:
            return self._codec.decode(raw), None
        except self._codec.damaged as error:
            return None, error

    def _key(self, place: Place) -> str:
        return place[1]

    @abstractmethod
    def _size(self, value: V) -> int:
        """Return the approximate bytes of a value in memory."""

    def _ended(self, place: Place, waiting: Waiting[V], written: bool) -> None:
        """Note that a value was written or dropped."""

    def _failed(self, entries: int, reason: str) -> None:
        log.warning("shared.not_written", kind=self._kind, error=reason, entries=entries)

    def _given_up(self, entries: int) -> None:
        """Report the values that were dropped when the process ended."""
        self._failed(entries, "the process ends")

    def _unreadable(self, place: Place, error: Exception) -> None:
        """Report a stored value that can't be decoded."""
        log.warning("shared.unreadable", kind=self._kind, error=type(error).__name__)


DEFAULT = 256_000_000  # bytes of `server.cache_memory`

SLACK = 50
"""A cache that is full is emptied by this part more, so that not every new value looks for the largest tenant."""


class CacheCapacity(NamedTuple):
    """The bytes that the caches of a process may take, as they estimate their values.

    Small maps, such as those of limits and of the sizes of conversations, have fixed bounds of their own.
    """

    total: int = DEFAULT

    @property
    def facts(self) -> int:
        return self.total // 2

    @property
    def items(self) -> int:
        return self.total // 4

    @property
    def summaries(self) -> int:
        return self.total // 4


class TenantMemory(MutableMapping[Place, V], Generic[V]):
    """Values by tenant and key. If they take too many bytes, the tenant with the most loses its least recently used.

    So one tenant may take all, but only while others don't need their equal parts.
    """

    def __init__(self, most: int, size: Callable[[V], int], entries: int = sys.maxsize) -> None:
        """``most`` is in bytes, and ``size`` returns those of a value. There are at most ``entries`` values."""
        self.most = most
        self._entries = entries
        self.bytes = 0
        self._count = 0
        self._size = size
        self._tenants: dict[str, dict[Place, tuple[V, int]]] = {}
        self._bytes: dict[str, int] = {}

    def __getitem__(self, place: Place) -> V:
        values = self._tenants[place[0]]
        found = values[place] = values.pop(place)
        return found[0]

    def __setitem__(self, place: Place, value: V) -> None:
        self.pop(place, None)
        size = self._size(value)
        self._tenants.setdefault(place[0], {})[place] = value, size
        self._bytes[place[0]] = self._bytes.get(place[0], 0) + size
        self.bytes += size
        self._count += 1
        room = self.most if self.bytes <= self.most else self.most - self.most // SLACK
        # The newest value stays even if it's too large alone.
        while self._count > 1 and (self.bytes > room or self._count > self._entries):
            largest = max(self._bytes, key=self._bytes.__getitem__)
            oldest = next(iter(self._tenants[largest]))
            if oldest == place:
                largest = max(self._bytes.keys() - {largest}, key=self._bytes.__getitem__)
                oldest = next(iter(self._tenants[largest]))
            del self[oldest]

    def __delitem__(self, place: Place) -> None:
        values = self._tenants[place[0]]
        _, size = values.pop(place)
        self._bytes[place[0]] -= size
        self.bytes -= size
        self._count -= 1
        if not values:
            del self._tenants[place[0]], self._bytes[place[0]]

    def __iter__(self) -> Iterator[Place]:
        for values in self._tenants.values():
            yield from values

    def __len__(self) -> int:
        return self._count
