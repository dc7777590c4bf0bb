"""Cache the facts about messages, so that each turn reads and counts only its new messages.

The key is a fast digest of a message's bytes. Each process has its own seed, so clients can't construct collisions.
Each tenant has its own seed, too, so that response times don't reveal the messages of other tenants. The cache keeps
sizes, roles, ids, and the short forms that stages made.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import TypeVar, cast

import xxhash
from cachetools import LRUCache

from proxy.compaction.turn import Facts, Turn
from proxy.dialects.counting import Counter
from proxy.dialects.request import Request
from proxy.pipeline.stored_facts import StoredFacts, decoded, encoded
from proxy.store.tenant_cache import Place
from proxy.tokens.media import has_remote_media

T = TypeVar("T")

_SEED = secrets.randbits(64)

GENERATION = 40_000
"""Messages per generation; two generations are kept."""

GENERATION_BYTES = 100_000_000
"""Bytes of messages per generation. An entry is a few hundred bytes longer than its message at most, and the short
forms add as much again for each setting that they were made with."""

FORMS_BYTES = 65_536
"""The largest size of short forms, in bytes. Longer messages count as this many bytes."""

INLINE_BYTES = 16_384
"""Bytes of unknown messages that are counted on the event loop, in about 1 ms. More are counted in a thread."""


MANY = 1_000
"""Messages that are processed on the event loop. A request with more is processed in a thread."""

OVERHEADS = 1_000
"""Sets of tools whose size is cached."""


class CounterFacts:
    """Facts by digest, for one counter. When the younger generation is full, the older one is dropped."""

    def __init__(self, counter: Counter) -> None:
        self.counter = counter
        self._young: dict[bytes, Facts] = {}
        self._old: dict[bytes, Facts] = {}
        self._weight = 0

    def look_up(self, raws: Sequence[bytes], tenant: str = "") -> tuple[list[Facts | None], list[bytes]]:
        """Return a tenant's cached facts of messages (``None``: not cached), and the digests of all messages."""
        digest = xxhash.xxh3_128_digest
        young, old = self._young, self._old
        seed = xxhash.xxh3_64_intdigest(tenant.encode("utf-8", "surrogatepass"), _SEED)
        keys = list(map(digest, raws, repeat(seed)))
        found = list(map(young.get, keys))
        if None in found:
            for index, key in enumerate(keys):
                if found[index] is None and (facts := old.get(key)) is not None:
                    self._remember(key, facts, len(raws[index]))
                    old = self._old
                    found[index] = facts
        return found, keys

    def learn(self, raw: bytes, key: bytes) -> Facts:
        """Read and count a message, unless it's cached by now."""
        known = self._young.get(key)
        if known is not None:
            return known
        facts = self.counter.format.read(raw)
        facts.estimated = has_remote_media(raw)
        self._remember(key, facts, len(raw))
        return facts

    def adopt(
        self, facts: Sequence[Facts | None], raws: Sequence[bytes], keys: Sequence[bytes], found: list[Facts | None]
    ) -> None:
        """Cache facts that another process found, and put them into ``found`` where facts are missing."""
        for index, known in enumerate(facts):
            if known is not None and found[index] is None:
                found[index] = known
                self._remember(keys[index], known, len(raws[index]))

    def _remember(self, key: bytes, facts: Facts, length: int) -> None:
        names = len(facts.answers or "") + sum(len(call.id) + len(call.name) for call in facts.calls)
        weight = names + min(length, FORMS_BYTES)
        if len(self._young) >= GENERATION or self._weight + weight > GENERATION_BYTES:
            self._old, self._young, self._weight = self._young, {}, 0
        self._young[key] = facts
        self._weight += weight


class FactsCache:
    """The caches of all counters, and the threads that count new messages."""

    def __init__(self, stored: StoredFacts | None = None) -> None:
        """``stored`` keeps the facts of large conversations for other processes."""
        self._stored = stored
        self._memories: dict[object, CounterFacts] = {}
        self._overheads: LRUCache[Hashable, int] = LRUCache(OVERHEADS)
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="counting")

    def memory(self, counter: Counter) -> CounterFacts:
        """Return the cache for a counter. Counters with the same key share one."""
        return self._memories.setdefault(counter.key, CounterFacts(counter))

    async def turns(
        self, raws: Sequence[bytes], counter: Counter, tenant: str = "", *, shared: bool = False
    ) -> list[Turn]:
        """Return a tenant's messages with their facts.

        Many messages, and large unknown ones, are read and counted off the event loop. ``shared``: other processes may
        get the same conversation, so its facts are stored.
        """
        memory = self.memory(counter)
        many = len(raws) > MANY
        found, keys = await self.run_if(many, lambda: memory.look_up(raws, tenant))
        place: Place | None = None
        learned = 0
        if None in found:
            if shared and self._stored is not None:
                place = self._stored.place(raws, counter, tenant)
            learned = await self._complete(memory, raws, keys, found, place)
        base = [] if place is None else list(found)
        if counter.profile.escapes:
            places = await self.run_if(many, lambda: _among_several(found))
            size = sum(len(raws[index]) for index, facts in places if facts.one_of_several is None)
            await self.run_if(size > INLINE_BYTES, partial(_put_right, raws, found, places, counter))
        if place is not None and self._stored is not None and self._stored.due(place, learned, sum(map(len, raws))):
            entry = await self.run(lambda: encoded(raws, cast(Sequence[Facts], base)))
            self._stored.write(place, entry)
        return list(map(Turn, raws, cast(Sequence[Facts], found)))

    async def _complete(
        self,
        memory: CounterFacts,
        raws: Sequence[bytes],
        keys: list[bytes],
        found: list[Facts | None],
        place: Place | None,
    ) -> int:
        """Put the facts about unknown messages into ``found``. Return the bytes of the messages that were counted.

        If most of a large conversation is unknown, its facts may be in the store.
        """
        size = _unknown_bytes(raws, found)
        if self._stored is not None and place is not None and 2 * size > sum(map(len, raws)):
            entry = await self._stored.read(*place)
            if entry is not None:
                await self.run(lambda: memory.adopt(decoded(entry, raws), raws, keys, found))
                size = _unknown_bytes(raws, found)
        if size:
            slow = size > INLINE_BYTES or not memory.counter.ready
            await self.run_if(slow, partial(_learn, memory, raws, keys, found))
        return size

    async def overhead(self, body: Request, counter: Counter, tenant: str = "") -> int:
        """Return the tokens of a request's tools, response format, and framing. They are counted once per tenant."""
        size = sum(map(len, body.overhead))
        if not size:
            return counter.overhead({})
        key = (counter.key, tenant, *map(xxhash.xxh3_128_digest, body.overhead, repeat(_SEED)))
        found = self._overheads.get(key)
        if found is None:
            slow = size > INLINE_BYTES or not counter.ready
            found = await self.run_if(slow, lambda: counter.overhead(body.overhead_fields()))
            self._overheads[key] = found
        return found

    async def run_if(self, slow: bool, work: Callable[[], T]) -> T:
        """Do CPU-bound work, in the counting threads if it's slow."""
        return await self.run(work) if slow else work()

    async def run(self, work: Callable[[], T]) -> T:
        """Do CPU-bound work in the counting threads."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _unknown_bytes(raws: Sequence[bytes], found: Sequence[Facts | None]) -> int:
    return sum(len(raw) for raw, facts in zip(raws, found, strict=True) if facts is None)


def _learn(memory: CounterFacts, raws: Sequence[bytes], keys: list[bytes], found: list[Facts | None]) -> None:
    for index, facts in enumerate(found):
        if facts is None:
            found[index] = memory.learn(raws[index], keys[index])


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
        elif several and facts.wide:
            places.append((index, facts))
    return places


def _put_right(
    raws: Sequence[bytes], found: list[Facts | None], places: Sequence[tuple[int, Facts]], counter: Counter
) -> None:
    """Replace the facts of such results by those that hold there, counted if they are new."""
    for index, facts in places:
        if facts.one_of_several is None:
            again = replace(facts, parallel=True, one_of_several=None, forms={})
            again.tokens = counter.format.tokens(raws[index], again)
            facts.one_of_several = again
        found[index] = facts.one_of_several
