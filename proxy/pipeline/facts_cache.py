"""Cache the facts about messages, so that each turn reads and counts only its new messages.

The key is a fast digest of a message's bytes. Each process has its own seed, so clients can't construct collisions.
Each tenant has its own seed, too, so that response times don't reveal the messages of other tenants. The cache keeps
sizes, roles, ids, and the short forms that stages made.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from itertools import repeat
from random import randrange
from typing import TypeVar, cast

import xxhash
from cachetools import LRUCache
from msgspec import structs

from proxy.compaction.turn import Account, Facts, Turn, loading
from proxy.dialects.counting import Counter
from proxy.dialects.request import Request
from proxy.pipeline.counting_thread import CountingThread
from proxy.store.cache_capacity import SLACK, CacheCapacity

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

    def __init__(self, charge: Callable[[_Part, Account, int], None]) -> None:
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

    def _charge(self, part: _Part, account: Account, size: int) -> None:
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


class CounterFacts:
    """Facts by digest, for one counter."""

    def __init__(self, counter: Counter, memory: FactsMemory | None = None) -> None:
        self.counter = counter
        self._memory = memory or FactsMemory()
        self._key = counter.key

    def look_up(self, raws: Sequence[bytes], tenant: str = "") -> tuple[list[Facts | None], list[bytes]]:
        """Return a tenant's cached facts of messages (``None``: not cached), and the digests of all messages."""
        seed = xxhash.xxh3_64_intdigest(tenant.encode("utf-8", "surrogatepass"), _SEED)
        keys = list(map(xxhash.xxh3_128_digest, raws, repeat(seed)))
        return list(map(self._memory.known(self._key, tenant).get, keys)), keys

    def learn(self, raw: bytes, key: bytes, tenant: str = "") -> Facts:
        """Read and count a message, unless it's cached by now."""
        known = self._memory.known(self._key, tenant).get(key)
        if known is not None:
            return known
        facts = self.counter.format.read(raw)
        self._memory.add(self._key, tenant, key, facts)
        return facts


class FactsCache:
    """The caches of all counters, and the threads that count new messages."""

    def __init__(self, most: int = CacheCapacity().facts) -> None:
        """``most`` is the bytes of facts."""
        self._facts = FactsMemory(most)
        self._memories: dict[object, CounterFacts] = {}
        self._overheads: LRUCache[Hashable, int] = LRUCache(OVERHEADS)
        self._thread = CountingThread()
        self._loadable: LRUCache[Hashable, Mapping[str, int]] = LRUCache(LOADABLE)

    def memory(self, counter: Counter) -> CounterFacts:
        """Return the cache for a counter. Counters with the same key share one."""
        return self._memories.setdefault(counter.key, CounterFacts(counter, self._facts))

    async def turns(self, raws: Sequence[bytes], counter: Counter, tenant: str = "") -> list[Turn]:
        """Return a tenant's messages with their facts.

        Many messages, and large unknown ones, are read and counted off the event loop.
        """
        memory = self.memory(counter)
        many = len(raws) > MANY
        found, keys = await self.run_if(many, lambda: memory.look_up(raws, tenant), tenant)
        await self._complete(memory, raws, keys, found, tenant)
        await self._put_right(raws, found, counter, tenant)
        return list(map(Turn, raws, cast(Sequence[Facts], found)))

    async def _put_right(self, raws: Sequence[bytes], found: list[Facts | None], counter: Counter, tenant: str) -> None:
        """Replace the facts of results that are one of several calls', if the provider counts those differently."""
        if not counter.profile.escapes:
            return
        places = await self.run_if(len(raws) > MANY, lambda: _among_several(found), tenant)
        size = sum(len(raws[index]) for index, facts in places if _PARALLEL not in facts.forms)
        await self.run_if(size > INLINE_BYTES, partial(_put_right, raws, found, places, counter), tenant, size)

    async def _complete(
        self, memory: CounterFacts, raws: Sequence[bytes], keys: list[bytes], found: list[Facts | None], tenant: str
    ) -> None:
        """Put the facts about unknown messages into ``found``."""
        if size := sum(len(raw) for raw, facts in zip(raws, found, strict=True) if facts is None):
            slow = size > INLINE_BYTES or not memory.counter.ready
            await self.run_if(slow, partial(_learn, memory, raws, keys, found, tenant), tenant, size)

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

    async def with_loaded(self, turns: list[Turn], body: Request, counter: Counter, tenant: str) -> list[Turn]:
        """Return a request's turns with the tokens of the tools that they load."""
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
    memory: CounterFacts,
    raws: Sequence[bytes],
    keys: list[bytes],
    found: list[Facts | None],
    tenant: str,
) -> None:
    for place, raw in enumerate(raws):
        if found[place] is None:
            found[place] = memory.learn(raw, keys[place], tenant)


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
