"""Cache the facts about messages, so that each turn reads and counts only its new messages, in a thread of its own.

The key is a fast digest of a message's bytes. Each process has its own seed, so clients can't construct collisions.
Each tenant has its own seed, too, so that response times don't reveal the messages of other tenants. The cache keeps
sizes, roles, ids, and the short forms that stages made.

The thread does the CPU-bound work of all requests, and competes with the event loop for the interpreter. Tenants take
turns. A job pauses between two texts, and between the parts of a long one. Then a job of less than half its size runs
first, and a job whose client has left ends. So a job waits for one other job of each tenant at most, and only for the
next pause of a job of more than twice its size.

Python's lock gives the thread and the event loop turns of equal length, however many small requests wait for the loop.
So the thread sleeps at a pause while the loop is busy, for a multiple of its own time at most.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import repeat
from random import randrange
from typing import Generic, TypeVar, cast

import xxhash
from cachetools import LRUCache
from msgspec import structs

from proxy.compaction.pieces import begin_thread
from proxy.compaction.turn import Facts, SharedForms, Turn, loading
from proxy.dialects.counting import Counter
from proxy.dialects.request import Request
from proxy.store.tenant_cache import SLACK, CacheCapacity

T = TypeVar("T")

_SEED = secrets.randbits(64)

INLINE_BYTES = 16_384
"""Bytes of unknown messages that are counted on the event loop, in about 1 ms. More are counted in a thread."""

MANY = 1_000
"""Messages that are processed on the event loop. A request with more is processed in a thread."""

OVERHEADS = 1_000
"""Sets of tools whose size is cached."""

LOADABLE = 100
"""Sets of tools whose members may be loaded, with the size of each."""


_PARALLEL = ("parallel", None)
"""The key of the facts of a result that is one of several calls'."""


class _Part:
    """A tenant's facts for one counter by digest, with their bytes."""

    __slots__ = ("charge", "facts", "keys", "weight")

    def __init__(self, charge: Callable[[_Part, SharedForms, int], None]) -> None:
        """``charge`` gets the bytes of short forms that are made later."""
        self.charge = partial(charge, self)
        self.facts: dict[bytes, Facts] = {}
        self.keys: list[bytes] = []
        self.weight = 0

    def drop(self, size: int) -> None:
        """Drop facts of about ``size`` bytes, chosen by chance.

        Conversations take turns. Without the oldest facts, all of them would be counted again.
        """
        least = self.weight - size
        while self.keys and self.weight > least:
            place = randrange(len(self.keys))  # noqa: S311
            key, self.keys[place] = self.keys[place], self.keys[-1]
            del self.keys[-1]
            self.weight -= self.facts.pop(key).forgotten()


class FactsMemory:
    """The facts of all counters and tenants. If they take too many bytes, the largest parts lose some."""

    def __init__(self, most: int = CacheCapacity().facts) -> None:
        """``most`` is in bytes."""
        self.most = most
        self._parts: dict[tuple[Hashable, str], _Part] = {}
        self._weight = 0
        self._lock = threading.RLock()

    def known(self, counter: Hashable, tenant: str) -> Mapping[bytes, Facts]:
        """Return the facts of a tenant for a counter."""
        part = self._parts.get((counter, tenant))
        return {} if part is None else part.facts

    def add(self, counter: Hashable, tenant: str, key: bytes, facts: Facts) -> None:
        """Keep facts, unless another thread added them."""
        with self._lock:
            part = self._parts.get((counter, tenant))
            if part is None:
                part = self._parts[counter, tenant] = _Part(self._charge)
            if key not in part.facts:
                part.facts[key], facts.cache = facts, part.charge
                part.keys.append(key)
                self._grow(part, facts.bytes)

    def _charge(self, part: _Part, account: SharedForms, size: int) -> None:
        with self._lock:
            if account.cache is not None:
                account.bytes += size
                self._grow(part, size)

    def _grow(self, part: _Part, size: int) -> None:
        part.weight += size
        self._weight += size
        if self._weight > self.most:
            self._make_room()

    def _make_room(self) -> None:
        weights = {key: part.weight for key, part in self._parts.items()}
        while (excess := sum(weights.values()) + self.most // SLACK - self.most) > 0:
            largest = max(weights, key=weights.__getitem__)
            part = self._parts[largest]
            part.drop(min(excess, part.weight // 2))
            weights[largest] = part.weight
            if not part.facts:
                del self._parts[largest], weights[largest]
        self._weight = sum(weights.values())


class FactsCache:
    """The caches of all counters, and the threads that count new messages."""

    def __init__(self, most: int = CacheCapacity().facts) -> None:
        """``most`` is the bytes of facts."""
        self._facts = FactsMemory(most)
        self._overheads: LRUCache[Hashable, int] = LRUCache(OVERHEADS)
        self._thread = CountingThread()
        self._loadable: LRUCache[Hashable, Mapping[str, int]] = LRUCache(LOADABLE)

    async def turns(self, raws: Sequence[bytes], counter: Counter, tenant: str = "") -> list[Turn]:
        """Return a tenant's messages with their facts.

        Many messages, and large unknown ones, are read and counted off the event loop.
        """
        many = len(raws) > MANY
        seed = xxhash.xxh3_64_intdigest(tenant.encode("utf-8", "surrogatepass"), _SEED)

        def look_up() -> tuple[list[Facts | None], list[bytes]]:
            keys = list(map(xxhash.xxh3_128_digest, raws, repeat(seed)))
            return list(map(self._facts.known(counter.key, tenant).get, keys)), keys

        found, keys = await self.run_if(many, look_up, tenant)
        if size := sum(len(raw) for raw, facts in zip(raws, found, strict=True) if facts is None):
            slow = size > INLINE_BYTES or not counter.ready
            learn = partial(_learn, self._facts, counter, raws, keys, found, tenant)
            await self.run_if(slow, learn, tenant, size)
        if counter.profile.escapes:  # the provider counts results differently that are one of several calls'
            places = await self.run_if(many, lambda: _among_several(found), tenant)
            size = sum(len(raws[index]) for index, facts in places if _PARALLEL not in facts.forms)
            await self.run_if(size > INLINE_BYTES, partial(_put_right, raws, found, places, counter), tenant, size)
        return list(map(Turn, raws, cast(Sequence[Facts], found)))

    async def overhead(self, body: Request, counter: Counter, tenant: str = "") -> int:
        """Return the tokens of a request's tools, response format, and framing. They are counted once per tenant."""
        size = sum(map(len, body.overhead))
        if not size:
            return counter.overhead({})
        key = (counter.key, tenant, *map(xxhash.xxh3_128_digest, body.overhead, repeat(_SEED)))
        found = self._overheads.get(key)
        if found is None:
            slow = size > INLINE_BYTES or not counter.ready
            found = await self.run_if(slow, lambda: counter.overhead(body.overhead_fields()), tenant, size)
            self._overheads[key] = found
        return found

    async def turns_of(self, body: Request, counter: Counter, tenant: str) -> list[Turn]:
        """Return a request's messages with their facts. Those that load tools have the tokens of these tools, too."""
        turns = await self.turns(body.units, counter, tenant)
        if not body.loads_tools:
            return turns
        key = ("loaded", counter.key, tenant, *map(xxhash.xxh3_128_digest, body.overhead, repeat(_SEED)))
        sizes = self._loadable.get(key)
        if sizes is None:
            size = sum(map(len, body.overhead))
            sizes = self._loadable[key] = await self.run(lambda: counter.deferred(body.overhead_fields()), tenant, size)
        return loading(turns, sizes)

    async def run_if(self, slow: bool, work: Callable[[], T], tenant: str, size: int = 0) -> T:
        """Do CPU-bound work, in the counting thread if it's slow."""
        return await self.run(work, tenant, size) if slow else work()

    async def run(self, work: Callable[[], T], tenant: str, size: int = 0) -> T:
        """Do CPU-bound work in the counting thread. ``size`` is the bytes to process, 0 if it never takes long."""
        return await self._thread.run(work, tenant, size)

    def close(self) -> None:
        self._thread.close()


def _learn(
    memory: FactsMemory,
    counter: Counter,
    raws: Sequence[bytes],
    keys: Sequence[bytes],
    found: list[Facts | None],
    tenant: str,
) -> None:
    """Read and count the messages that aren't cached, unless another request's job did."""
    shared = counter.key
    for place, raw in enumerate(raws):
        if found[place] is None:
            facts = memory.known(shared, tenant).get(keys[place])
            if facts is None:
                facts = counter.format.read(raw)
                memory.add(shared, tenant, keys[place], facts)
            found[place] = facts


def _among_several(found: Sequence[Facts | None]) -> list[tuple[int, Facts]]:
    """Return the results that are one of several calls', which providers count in another way, with their places.

    Their places follow from the messages before each alone.
    """
    several = False
    places: list[tuple[int, Facts]] = []
    for index, facts in enumerate(found):
        if facts is None:
            continue
        if facts.kind != "result":
            several = len(facts.calls) > 1
        elif several and facts.rare.wide:
            places.append((index, facts))
    return places


def _put_right(
    raws: Sequence[bytes], found: list[Facts | None], places: Sequence[tuple[int, Facts]], counter: Counter
) -> None:
    """Replace the facts of such results by those that hold there, counted if they are new."""
    for index, facts in places:
        form = facts.forms.get(_PARALLEL)
        if form is None:
            again = facts.changed(rare=structs.replace(facts.rare, parallel=True))
            again.tokens = counter.format.tokens(raws[index], again)
            form = facts.forms[_PARALLEL] = Turn(b"", again)
        found[index] = form.facts


DEEPEST = 8
"""Jobs that wait within each other for a smaller one. Each needs some of the stack."""

BUSY_SECONDS = 0.0002
"""CPU seconds of the other threads between two looks, or during a sleep, that show that the event loop is busy."""

LOOKS_SECONDS = 0.0005
"""Seconds between two looks at these CPU seconds, because each takes some microseconds."""

SLEEP_SECONDS, LONGEST_SECONDS, SLEPT = 0.001, 0.005, 3
"""The seconds of a sleep, and of all sleeps at a pause. Those take at most so many times the thread's own CPU seconds
since the last ones."""


class _Job(Generic[T]):
    __slots__ = ("future", "left", "size", "work")

    def __init__(self, work: Callable[[], T], size: int) -> None:
        self.work = work
        self.size = size
        self.future: Future[T] = Future()
        self.left = False

    def run(self) -> None:
        if self.future.set_running_or_notify_cancel():
            try:
                self.future.set_result(self.work())
            except BaseException as error:  # noqa: BLE001 - the code that awaits the future gets it
                self.future.set_exception(error)
                del self  # the error's traceback would form a reference cycle with it


class CountingThread:
    """The thread, and the jobs that wait for it, by tenant."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[_Job[object]]] = {}
        self._running: list[_Job[object]] = []
        self._own = self._others = self._next_look = 0.0
        self._pool = ThreadPoolExecutor(
            1, thread_name_prefix="counting", initializer=begin_thread, initargs=(self._pause,)
        )

    async def run(self, work: Callable[[], T], tenant: str, size: int) -> T:
        """Do work in the thread. ``size`` is the bytes to process."""
        job = _Job(work, size)
        with self._lock:
            self._waiting.setdefault(tenant, deque()).append(job)  # type: ignore[arg-type]  # nothing reads results
        self._pool.submit(self._next)
        try:
            return await asyncio.wrap_future(job.future)
        finally:
            job.left = True
            del job  # see `_Job.run`

    def close(self) -> None:
        """End the thread at the next pause, and cancel the jobs that wait."""
        with self._lock:
            for job in [*self._running, *(job for jobs in self._waiting.values() for job in jobs)]:
                job.left = True
                job.future.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _next(self, below: float = float("inf")) -> None:
        """Run the first job with a size below a limit, unless an earlier call has run it."""
        with self._lock:
            found = next(
                ((tenant, job) for tenant, jobs in self._waiting.items() for job in jobs if job.size < below), None
            )
            if found is None:
                return
            tenant, job = found
            jobs = self._waiting.pop(tenant)  # its other jobs are after those of other tenants
            jobs.remove(job)
            if jobs:
                self._waiting[tenant] = jobs
        self._running.append(job)
        self._others, self._next_look = math.inf, time.perf_counter() + LOOKS_SECONDS  # short jobs don't look
        job.run()
        self._running.pop()

    def _pause(self) -> None:
        if self._running[-1].left:
            raise asyncio.CancelledError
        if self._waiting and len(self._running) < DEEPEST:
            self._next(below=self._running[-1].size / 2)
        if (now := time.perf_counter()) >= self._next_look:
            own, others = _cpu()
            latest = now + min(SLEPT * (own - self._own), LONGEST_SECONDS)
            while others - self._others > BUSY_SECONDS and now < latest:
                self._others = others
                time.sleep(SLEEP_SECONDS)
                own, others = _cpu()
                now = time.perf_counter()
            self._own, self._others, self._next_look = own, others, now + LOOKS_SECONDS


def _cpu() -> tuple[float, float]:
    """Return the CPU seconds of this thread, and of the other threads of the process."""
    own = time.thread_time()
    return own, time.process_time() - own
