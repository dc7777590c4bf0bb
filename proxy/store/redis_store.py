"""A store on Redis or Valkey, which the replicas of a fleet share, and their common counts for limits of teams.

An entry is a key with an expiration time. Its value begins with its codec. For each codec and kind, a sorted set has
the entries' names by expiration time, for maintenance and for commands.

All names contain the version of the format of values. So versions of the proxy with different formats can share a
server. The format of names never changes, so each version can remove the entries of all others.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from proxy.store.interface import PER_PAGE, Entry, ManagedStore
from proxy.store.redis_client import close, connect, failures, matching, name, parts, refusals, unlink, values_of

VERSION = "1"  # the format of values

PREFIX = "compaction"

KEYS = 500  # keys per read
WRITES = 500  # Entries per write. The client encodes them on the event loop.
_INDEXES = name(PREFIX, "indexes")  # the set of all indexes: their versions, codecs, and kinds

# The arguments are the value that the entry must have, its new content, and the milliseconds to keep it.
_REPLACE = r"""
local raw = redis.call('GET', KEYS[1])
if not raw or string.sub(raw, (string.find(raw, '\n', 1, true) or 0) + 1) ~= ARGV[1] then return 0 end
if ARGV[3] == '0' then redis.call('UNLINK', KEYS[1]) else redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3]) end
return 1
"""

Place = tuple[str, str]  # a tenant, and the key of one of its entries


class RedisStore(ManagedStore):
    """See ``ManagedStore`` for the methods. Expired entries end by themselves."""

    def __init__(self, url: str, clock: Callable[[], float] = time.time, version: str = VERSION) -> None:
        """Use the server at ``url``. ``clock`` returns seconds since 1970.

        Raises ``ValueError`` for a wrong address.
        """
        self._redis = connect(url)
        self._clock = clock
        self._version = version

    async def get_many(self, tenant: str, kind: str, keys: Sequence[str]) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        with failures():
            for start in range(0, len(keys), KEYS):
                some = keys[start : start + KEYS]
                values = await values_of(self._redis, [self._entry(tenant, kind, key) for key in some])
                found |= {
                    key: content
                    for key, raw in zip(some, values, strict=True)
                    if (content := _content(raw)) is not None
                }
        return found

    async def put_many(self, entries: Sequence[Entry], codec: str = "") -> None:
        for start in range(0, len(entries), WRITES):
            with failures():
                async with self._redis.pipeline(transaction=False) as pipe:
                    removed = self._put(pipe, entries[start : start + WRITES], codec)
                    results = await pipe.execute(raise_on_error=False)
                for kind, places in removed.items():
                    await self._leave_index(codec, kind, places)
                refusals(results)

    async def add(self, tenant: str, kind: str, key: str, value: bytes, seconds: float, codec: str = "") -> bytes:
        place = self._entry(tenant, kind, key)
        with failures():
            while True:
                async with self._redis.pipeline(transaction=False) as pipe:
                    pipe.set(place, _raw(codec, value), px=max(1, math.ceil(seconds * 1000)), nx=True)
                    pipe.get(place)
                    self._add_to_index(pipe, codec, tenant, kind, key, seconds)
                    added, stored, *_ = await pipe.execute()
                if added:
                    return value
                if (content := _content(stored)) is not None:
                    return content
                # The older entry has just expired.

    async def replace(
        self, tenant: str, kind: str, key: str, old: bytes, new: bytes, seconds: float, codec: str = ""
    ) -> bool:
        arguments = old, _raw(codec, new), max(0, math.ceil(seconds * 1000))
        with failures():
            if not await self._redis.eval(_REPLACE, 1, self._entry(tenant, kind, key), *arguments):
                return False
            if seconds <= 0:
                await self._leave_index(codec, kind, [(tenant, key)])
            else:
                async with self._redis.pipeline(transaction=False) as pipe:
                    self._add_to_index(pipe, codec, tenant, kind, key, seconds)
                    await pipe.execute()
        return True

    async def entries(self, kind: str) -> list[Entry]:
        found: list[Entry] = []
        with failures():
            for codec, of_kind in await self._indexes():
                if of_kind == kind:
                    index = self._index(codec, kind)
                    names = await self._redis.zrangebyscore(index, self._clock(), "+inf")
                    found += await self._read(codec, kind, names)
        return sorted(found, key=lambda entry: (entry.tenant, entry.key))

    async def pages(self, codec: str = "") -> AsyncIterator[list[Entry]]:
        with failures():
            for of_codec, kind in await self._indexes():
                cursor = None if of_codec == codec else 0
                while cursor != 0:
                    cursor, scored = await self._redis.zscan(self._index(codec, kind), cursor or 0, count=KEYS)
                    names = [own for own, _ in scored]
                    for start in range(0, len(names), PER_PAGE):
                        yield await self._read(codec, kind, names[start : start + PER_PAGE])

    async def remove(self, tenant: str) -> Counter[str]:
        removed: Counter[str] = Counter()
        with failures():
            indexes = await self._all_indexes()
            async for keys in self._keys_of(tenant):
                async with self._redis.pipeline(transaction=False) as pipe:
                    for key in keys:
                        unlink(pipe, key)
                    done = await pipe.execute()
                removed.update(parts(key)[4] for key, gone in zip(keys, done, strict=True) if gone)
                await self._drop_names(indexes, keys)
        return removed

    async def remove_codec(self, codec: str) -> int:
        count = 0
        async for entries in self.pages(codec):
            with failures():
                async with self._redis.pipeline(transaction=False) as pipe:
                    for entry in entries:
                        unlink(pipe, self._entry(entry.tenant, entry.kind, entry.key))
                        pipe.zrem(self._index(codec, entry.kind), name(entry.tenant, entry.key))
                    await pipe.execute()
            count += len(entries)
        return count

    async def counts(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        with failures():
            for codec, kind in await self._indexes():
                counts[codec] += await self._redis.zcount(self._index(codec, kind), self._clock(), "+inf")
        return counts

    async def erase(self) -> None:
        """Do nothing: the server frees the memory. Its own files are replaced when it next rewrites them."""

    async def rebuild(self) -> None:
        """Do nothing. See ``erase``."""

    async def maintain(self) -> None:
        """Remove the names of expired entries."""
        with failures():
            for codec, kind in await self._indexes():
                await self._redis.zremrangebyscore(self._index(codec, kind), "-inf", self._clock())

    async def aclose(self) -> None:
        await close(self._redis)

    def _put(self, pipe: Any, entries: Iterable[Entry], codec: str) -> Mapping[str, list[Place]]:
        """Add the writes of entries to a pipeline. Return those that it removes, because they have expired, by kind."""
        now = self._clock()
        names: defaultdict[str, dict[str, float]] = defaultdict(dict)
        removed: defaultdict[str, list[Place]] = defaultdict(list)
        for entry in entries:
            place = self._entry(entry.tenant, entry.kind, entry.key)
            if entry.seconds <= 0:
                unlink(pipe, place)
                removed[entry.kind].append((entry.tenant, entry.key))
                continue
            pipe.set(place, _raw(codec, entry.value), px=math.ceil(entry.seconds * 1000))
            names[entry.kind][name(entry.tenant, entry.key)] = now + entry.seconds
        for kind, until in names.items():
            pipe.zadd(self._index(codec, kind), until, gt=True)
            pipe.sadd(_INDEXES, name(self._version, codec, kind))
        return removed

    async def _leave_index(self, codec: str, kind: str, places: Sequence[Place]) -> None:
        """Remove the names of removed entries from their index, unless another process has just added one again."""
        index = self._index(codec, kind)
        names = [name(*place) for place in places]
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.zrem(index, *names)
            for tenant, key in places:
                pipe.pttl(self._entry(tenant, kind, key))
            _, *left = await pipe.execute()
        now = self._clock()
        added = {
            own: now + milliseconds / 1000 for own, milliseconds in zip(names, left, strict=True) if milliseconds > 0
        }
        if added:
            await self._redis.zadd(index, added, gt=True)

    def _add_to_index(self, pipe: Any, codec: str, tenant: str, kind: str, key: str, seconds: float) -> None:
        pipe.zadd(self._index(codec, kind), {name(tenant, key): self._clock() + seconds}, gt=True)
        pipe.sadd(_INDEXES, name(self._version, codec, kind))

    def _entry(self, tenant: str, kind: str, key: str) -> str:
        return name(PREFIX, "entry", self._version, tenant, kind, key)

    def _index(self, codec: str, kind: str) -> str:
        return name(PREFIX, "index", self._version, codec, kind)

    async def _keys_of(self, tenant: str) -> AsyncIterator[list[bytes]]:
        """Yield the names of a tenant's entries, of all versions, in batches."""
        async for keys in matching(self._redis, f"{name(PREFIX, 'entry')}:*:{name(tenant)}:*"):
            # A pattern's asterisk also matches colons.
            yield [key for key in keys if parts(key)[3] == tenant]

    async def _indexes(self) -> list[tuple[str, str]]:
        """Return the codec and kind of each index of this version."""
        indexes = await self._all_indexes()
        return sorted((codec, kind) for version, codec, kind in indexes if version == self._version)

    async def _all_indexes(self) -> list[tuple[str, str, str]]:
        members: Iterable[bytes] = await self._redis.smembers(_INDEXES)
        return [(version, codec, kind) for version, codec, kind in map(parts, members)]

    async def _read(self, codec: str, kind: str, names: Sequence[bytes]) -> list[Entry]:
        """Return the entries of the codec with these names."""
        found = []
        for start in range(0, len(names), KEYS):
            places = [(tenant, key) for tenant, key in map(parts, names[start : start + KEYS])]
            keys = [self._entry(tenant, kind, key) for tenant, key in places]
            async with self._redis.pipeline(transaction=False) as pipe:
                for key in keys:
                    pipe.get(key)
                    pipe.pttl(key)
                answers = await pipe.execute()
            for (tenant, key), raw, left in zip(places, answers[::2], answers[1::2], strict=True):
                if (content := _content(raw, codec)) is not None and left > 0:
                    found.append(Entry(tenant, kind, key, content, left / 1000))
        return found

    async def _drop_names(self, indexes: Iterable[tuple[str, str, str]], keys: Iterable[bytes]) -> None:
        names: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        for key in keys:
            _, _, version, tenant, kind, own = parts(key)
            names[version, kind].append(name(tenant, own))
        for version, codec, kind in indexes:
            if gone := names[version, kind]:
                await self._redis.zrem(name(PREFIX, "index", version, codec, kind), *gone)


def _raw(codec: str, value: bytes) -> bytes:
    return b"%b\n%b" % (codec.encode(), value)


def _content(raw: bytes | None, codec: str | None = None) -> bytes | None:
    """Return the value of an entry; ``None`` if there is none, or it has another codec."""
    if raw is None:
        return None
    end = raw.find(b"\n")
    return raw[end + 1 :] if codec is None or raw[: max(end, 0)] == codec.encode() else None


LEASE_SECONDS = 60.0
"""Seconds until a request stops counting as concurrent, unless its process renews it. A killed process renews none."""

# The rate limit is the generic cell rate algorithm, by the server's clock in microseconds: the key has the time when
# the bucket is full again. The concurrent requests are a sorted set by the end of their leases.
_ADMIT = """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local rate, concurrent, id, lease = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
if concurrent > 0 then
    redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
    if redis.call('ZCARD', KEYS[2]) >= concurrent then return {'concurrency', 1} end
end
if rate > 0 then
    local interval = 60000000 / rate
    local full = math.max(now, tonumber(redis.call('GET', KEYS[1]) or now)) + interval
    local over = full - now - 60000000
    if over > 0.5 then return {'rate', math.ceil(over / 1000000)} end
    redis.call('SET', KEYS[1], string.format('%.0f', full), 'PX', math.ceil((full - now) / 1000) + 1)
end
if concurrent > 0 then
    redis.call('ZADD', KEYS[2], string.format('%.0f', now + lease * 1000000), id)
    redis.call('EXPIRE', KEYS[2], math.ceil(lease))
end
return {'admitted', 0}
"""

_RENEW = """
local time = redis.call('TIME')
local ends = string.format('%.0f', time[1] * 1000000 + time[2] + tonumber(ARGV[1]) * 1000000)
for index = 2, #ARGV do redis.call('ZADD', KEYS[1], 'XX', ends, ARGV[index]) end
redis.call('EXPIRE', KEYS[1], math.ceil(ARGV[1]))
"""


class Admission(NamedTuple):
    """The decision on a request. ``seconds`` is when another try may succeed."""

    decision: Literal["admitted", "rate", "concurrency"]
    seconds: int


class RedisLimits:
    """Rates and concurrent requests of teams. All methods except ``aclose`` raise ``StoreFailed``."""

    def __init__(self, url: str) -> None:
        """Use the server at ``url``. Raises ``ValueError`` for a wrong address."""
        self._redis = connect(url)

    async def admit(self, team: str, id: str, per_minute: int | None, concurrent: int | None) -> Admission:
        """Count a request against a team's limits, in one round trip, unless it is over one of them."""
        keys = _key(team, "rate"), _key(team, "running")
        with failures():
            decision, seconds = await self._redis.eval(
                _ADMIT, 2, *keys, per_minute or 0, concurrent or 0, id, LEASE_SECONDS
            )
        return Admission(decision.decode(), int(seconds))

    async def release(self, team: str, ids: Collection[str]) -> None:
        with failures():
            await self._redis.zrem(_key(team, "running"), *ids)

    async def renew(self, held: Mapping[str, Collection[str]]) -> None:
        """Extend the leases of requests, by team. A lease that has ended stays ended."""
        with failures():
            for team, ids in held.items():
                await self._redis.eval(_RENEW, 1, _key(team, "running"), LEASE_SECONDS, *ids)

    async def aclose(self) -> None:
        await close(self._redis)


def _key(team: str, kind: str) -> str:
    # A digest, because names are encrypted elsewhere on the server. The hash tag keeps a team's keys on one server.
    return f"{{{name('compaction-limits', hashlib.sha256(team.encode()).hexdigest()[:24])}}}:{kind}"
