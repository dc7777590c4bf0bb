"""Write entries to the store in the background, many in one call."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Any, Generic, TypeVar

import structlog

from proxy.store.interface import Entry, Refused, Store, StoreFailed
from proxy.telemetry.metrics import STORE_WAITING

log = structlog.get_logger(__name__)

V = TypeVar("V")

Place = tuple[str, str]
"""A tenant, and the key of one of its entries."""

ENTRIES = 500
"""Maximum entries per write."""

BYTES = 4_000_000
"""Bytes after which a write gets no further entry."""

INLINE_BYTES = 32_768
"""Bytes of entries that are packed on the event loop. More are packed in a thread."""

LATE_SECONDS = 1.0
"""Age of the oldest waiting entry from which requests wait for the writer."""

ROOM_SECONDS, STUCK_SECONDS = 5.0, 2.0
"""Seconds after which a request stops waiting for the writer: in total, and without a completed write."""

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 5.0
"""Seconds between failed writes. The pause doubles."""

ATTEMPTS = 3
"""Times that an entry may fail alone while the store takes other entries. Then it's dropped."""

CLOSING_SECONDS = 5.0
"""Seconds without a completed write after which a process that ends drops what waits."""

LAST_ATTEMPTS = 4
"""Failed writes after which a process that ends drops what waits."""

AGAIN_SECONDS = 0.1
"""Seconds after which ``cancelled`` cancels a task again."""


async def cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel a task that uses the store, and wait until it has ended.

    redis-py loses a cancellation that arrives together with an answer, so cancel a task until it ends.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=AGAIN_SECONDS)


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
    for the interpreter lock. If a write fails, its entries wait for the next attempt, which gets half as many. So a
    value that the store refuses fails alone in the end. It is dropped, and all others are written.
    """

    def __init__(
        self,
        store: Store,
        kind: str,
        pack: Callable[[Sequence[V]], list[bytes]],
        most: int,
        failed: Callable[[int, str], None],
        ended: Callable[[Place, Waiting[V], bool], None] = lambda *_: None,
    ) -> None:
        """``pack`` encodes values, maybe in a thread. ``most`` is the maximum size of what waits, in bytes.

        ``failed`` gets the number of entries of a failed write, and the reason. ``ended`` gets each value that was
        written or dropped, and whether it was written.
        """
        self._store = store
        self._kind = kind
        self._pack = pack
        self._most = most
        self._failed = failed
        self._ended = ended
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
        self._hurry = asyncio.Event()
        """Set when the process ends."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def bytes(self) -> int:
        """Return the size of what waits."""
        return self._bytes

    def get(self, place: Place) -> V | None:
        """Return a value that waits."""
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
        while self._is_late() and loop.time() < until:
            if not await self._progressed(STUCK_SECONDS):
                return

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        """Drop the values of forgotten tenants, and return those tenants. A write in progress continues."""
        gone = [place for place in self._waiting if forgotten(place[0])]
        for place in gone:
            self._bytes -= self._waiting.pop(place).size
        return {tenant for tenant, _ in gone}

    async def settled(self) -> None:
        """Wait until the write in progress has ended."""
        async with self._turn:
            return

    async def drained(self, seconds: float = CLOSING_SECONDS) -> bool:
        """Wait until nothing waits. Return false after ``seconds`` without a completed write."""
        while self._waiting and self._task is not None:
            if not await self._progressed(seconds):
                break
        return not self._waiting

    async def aclose(self) -> int:
        """Write what waits, and drop it if the store fails for too long. Return the number of dropped values."""
        self._hurry.set()
        await self.drained(CLOSING_SECONDS)
        if self._task is not None:
            await cancelled(self._task)
        return len(self._waiting)

    async def _progressed(self, seconds: float) -> bool:
        """Wait for the next completed write. Return false if there is none in time."""
        try:
            async with asyncio.timeout(seconds):
                await self._progress.wait()
        except TimeoutError:
            return False
        return True

    def _is_late(self) -> bool:
        if self._pause or not self._waiting:
            return False
        oldest = next(iter(self._waiting.values()))
        return asyncio.get_running_loop().time() - oldest.since > LATE_SECONDS

    async def _write_all(self) -> None:
        try:
            while batch := self._batch():
                self._gauge.set(len(self._waiting))
                async with self._turn:
                    await self._write(batch)
                if not self._pause or not self._waiting:
                    self._tell()
                elif not await self._may_repeat():
                    break
        finally:
            self._gauge.set(len(self._waiting))
            self._task = None
            self._tell()

    def _tell(self) -> None:
        """Wake those who wait for progress."""
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
        """Return the values of the next write, oldest first."""
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
            await self._store.put_many(await self._entries(batch))
        except StoreFailed as failure:
            reason, refused = str(failure), isinstance(failure, Refused)
            pause = not refused
        except Exception as error:  # one value must not keep others from the store
            log.exception("store.write_failed", kind=self._kind, reason=type(error).__name__)
            reason, pause = type(error).__name__, len(batch) == 1
        else:
            self._written(batch)
            return
        self._limit = max(1, len(batch) // 2)
        if pause:
            self._pause = min(2 * self._pause or FIRST_PAUSE, LONGEST_PAUSE)
        if pause or len(batch) == 1:
            self._failed(len(batch), reason)
        if len(batch) == 1:
            self._failed_alone(*batch[0], refused=refused)

    def _written(self, batch: Sequence[tuple[Place, Waiting[V]]]) -> None:
        self._pause = 0.0
        self._limit = min(2 * self._limit, ENTRIES)
        self._successes += 1
        for place, waiting in batch:
            self._settle(place, waiting, written=True)

    def _failed_alone(self, place: Place, waiting: Waiting[V], *, refused: bool) -> None:
        if waiting.successes != self._successes:
            waiting.attempts, waiting.successes = waiting.attempts + 1, self._successes
        if refused or waiting.attempts >= ATTEMPTS:
            self._settle(place, waiting, written=False)
        elif self._waiting.get(place) is waiting:
            self._waiting[place] = self._waiting.pop(place)  # the others first

    async def _entries(self, batch: Sequence[tuple[Place, Waiting[V]]]) -> list[Entry]:
        """Return the entries to store. Raises ``Refused`` if a value can't be encoded."""
        values = [waiting.value for _, waiting in batch]
        try:
            if sum(waiting.size for _, waiting in batch) <= INLINE_BYTES:
                packed = self._pack(values)
            else:
                packed = await asyncio.to_thread(self._pack, values)
        except Exception as error:
            log.exception("store.write_failed", kind=self._kind, reason=type(error).__name__)
            raise Refused(type(error).__name__) from error
        return [
            Entry(tenant, self._kind, key, value, waiting.seconds)
            for ((tenant, key), waiting), value in zip(batch, packed, strict=True)
        ]

    def _settle(self, place: Place, waiting: Waiting[V], *, written: bool) -> None:
        """Remove a value that was written or dropped, unless its tenant was forgotten or a newer value waits."""
        if self._waiting.get(place) is waiting:
            del self._waiting[place]
            self._bytes -= waiting.size
            self._ended(place, waiting, written)
