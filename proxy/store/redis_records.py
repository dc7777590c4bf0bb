"""Records and the ledger on Redis or Valkey. See ``redis_store`` for the other entries.

All keys have the same hash tag, so that in a cluster one server has them and a script can write several of them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from heapq import merge

import msgspec

from proxy.store.record_codec import RecordCodec
from proxy.store.records import SUMS, LedgerLabels, LedgerSums, RecordQuery, labels_of, row_order, sums_of
from proxy.store.redis_client import close, connect, failures, name, unlink, values_of
from proxy.telemetry.record import RequestRecord, first_id

TAG = "{compaction-records}"

VERSION = "1"
"""The format of values. Another version of the proxy with another format uses other keys.

The format of names never changes, so each version can remove the records of all others.
"""

PREFIX = f"{TAG}:{VERSION}"

_VERSIONS = f"{TAG}:versions"
"""The set of the versions that have written records."""

BATCH = 200
"""Records per script. The server answers nobody else meanwhile."""

PAGE = 500
"""Records per read."""

# The arguments are the milliseconds to keep the records, and for each record its id, tenant, parent (or nothing),
# value, row of the ledger (or nothing), day, the row's labels, the length of its sums, and these: names, each followed
# by an amount.
# If a record isn't stored yet, the script stores it, indexes it, and adds its sums to its row of the ledger.
_WRITE = """
local prefix, expires, at = KEYS[1], ARGV[1], 2
redis.call('SADD', KEYS[2], prefix)
while at <= #ARGV do
    local id, tenant, parent, value, row, day, labels = unpack(ARGV, at, at + 6)
    local first, last = at + 8, at + 7 + tonumber(ARGV[at + 7])
    at = last + 1
    if redis.call('SET', prefix .. ':record:' .. id, value, 'PX', expires, 'NX') then
        redis.call('ZADD', prefix .. ':ids', 0, id)
        redis.call('ZADD', prefix .. ':ids:' .. tenant, 0, id)
        redis.call('SADD', prefix .. ':tenants', tenant)
        if parent ~= '' then
            redis.call('SADD', prefix .. ':children:' .. parent, id)
            redis.call('PEXPIRE', prefix .. ':children:' .. parent, expires)
        end
        if row ~= '' then
            local key = prefix .. ':row:' .. row
            redis.call('HSET', key, 'labels', labels)
            for index = first, last, 2 do
                redis.call('HINCRBY', key, ARGV[index], ARGV[index + 1])
            end
            redis.call('ZADD', prefix .. ':rows', day, row)
            redis.call('SADD', prefix .. ':rows:' .. tenant, row)
        end
    end
end
"""

_Sealed = tuple[str, str, bytes]
"""A codec, a tenant's name, and a value."""


class RedisRecords:
    """See ``RecordStore``. With keys, values and names are encrypted as by ``RecordCodec``."""

    def __init__(self, url: str, keys: Sequence[bytes] = ()) -> None:
        """Use the server at ``url``. Raises ``ValueError`` for a wrong address."""
        self._redis = connect(url)
        self._codec = RecordCodec(keys)

    async def write(self, records: Sequence[RequestRecord], seconds: float, *, ledger: bool = True) -> None:
        for start in range(0, len(records), BATCH):
            arguments = await asyncio.to_thread(self._arguments, records[start : start + BATCH], ledger)
            with failures():
                await self._redis.eval(_WRITE, 2, PREFIX, _VERSIONS, max(1, math.ceil(seconds * 1000)), *arguments)

    async def copy_rows(self, rows: Sequence[tuple[LedgerLabels, LedgerSums]], source: str) -> None:
        with failures():
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.sadd(_VERSIONS, PREFIX)
                for labels, sums in rows:
                    row, codec, tenant, value = self._codec.row(labels, source)
                    amounts = {one: str(amount) for one in SUMS if (amount := getattr(sums, one))}
                    pipe.delete(_key("row", row))
                    described = msgspec.msgpack.encode((codec, tenant, value))
                    pipe.hset(_key("row", row), mapping={**amounts, "labels": described})
                    pipe.zadd(_key("rows"), {row: labels.day})
                    pipe.sadd(_key("rows", name(tenant)), row)
                await pipe.execute()

    async def get(self, id: str, tenants: tuple[str, ...] | None = None) -> RequestRecord | None:
        with failures():
            (record,) = await self._read([id])
        return record if record is not None and (tenants is None or record.tenant in tenants) else None

    async def select(self, query: RecordQuery) -> list[RequestRecord]:
        found: list[RequestRecord] = []
        before = query.before
        while len(found) < query.limit:
            with failures():
                ids = await self._ids(query, before)
                records = await self._read(ids)
            found += [record for record in records if record is not None and _selected(record, query)]
            if query.parent is not None or len(ids) < PAGE:
                break
            before = ids[-1]
        return found[: query.limit]

    async def ledger(
        self, since: int, until: int, tenants: tuple[str, ...] | None = None
    ) -> list[tuple[LedgerLabels, LedgerSums]]:
        found: dict[LedgerLabels, LedgerSums] = {}
        with failures():
            keys: list[bytes] = await self._redis.zrangebyscore(_key("rows"), since, until)
            async with self._redis.pipeline(transaction=False) as pipe:
                for key in keys:
                    pipe.hgetall(_key("row", key.decode()))
                rows = await pipe.execute()
        for key, row in zip(keys, rows, strict=True):
            if not row:  # removed meanwhile
                continue
            codec, tenant, value = msgspec.msgpack.decode(row.pop(b"labels"), type=_Sealed)
            labels = self._codec.open_row(tenant, codec, key.decode(), value)
            if labels is not None and (tenants is None or labels.tenant in tenants):
                sums = LedgerSums(
                    **{name.decode(): int(amount) for name, amount in row.items() if name.decode() in SUMS}
                )
                found.setdefault(labels, LedgerSums()).add(sums)  # rows under several keys of encryption
        return sorted(found.items(), key=row_order)

    async def count(self) -> int:
        with failures():
            return int(await self._redis.zcard(_key("ids")))

    async def remove(self, tenant: str) -> int:
        removed = 0
        with failures():
            for prefix in sorted({PREFIX, *(each.decode() for each in await self._redis.smembers(_VERSIONS))}):
                for own in map(name, self._codec.names("tenant", tenant)):
                    removed += await self._remove(prefix, own)
        return removed

    async def _remove(self, prefix: str, own: str) -> int:
        """Remove the records and rows of a tenant by its name in the store, of one version."""
        removed = 0
        while ids := await self._redis.zrange(f"{prefix}:ids:{own}", 0, BATCH - 1):
            async with self._redis.pipeline(transaction=False) as pipe:
                unlink(pipe, *(f"{prefix}:record:{id.decode()}" for id in ids))
                unlink(pipe, *(f"{prefix}:children:{id.decode()}" for id in ids))
                pipe.zrem(f"{prefix}:ids", *ids)
                pipe.zrem(f"{prefix}:ids:{own}", *ids)
                removed += (await pipe.execute())[0]
        while rows := await self._redis.srandmember(f"{prefix}:rows:{own}", BATCH):
            async with self._redis.pipeline(transaction=False) as pipe:
                unlink(pipe, *(f"{prefix}:row:{row.decode()}" for row in rows))
                pipe.zrem(f"{prefix}:rows", *rows)
                pipe.srem(f"{prefix}:rows:{own}", *rows)
                removed += (await pipe.execute())[0]
        await self._redis.srem(f"{prefix}:tenants", own)
        return removed

    async def maintain(self, most: int) -> None:
        with failures():
            while (over := await self._redis.zcard(_key("ids")) - most) > 0:
                await self._drop(await self._redis.zrange(_key("ids"), 0, min(over, BATCH) - 1))
            # Expired records are the oldest ones.
            oldest: bytes | None = None
            while oldest is None and (ids := await self._redis.zrange(_key("ids"), 0, BATCH - 1)):
                values = await values_of(self._redis, [_key("record", id.decode()) for id in ids])
                if expired := [id for id, value in zip(ids, values, strict=True) if value is None]:
                    await self._drop(expired)
                oldest = next((id for id, value in zip(ids, values, strict=True) if value is not None), None)
            for tenant in await self._redis.smembers(_key("tenants")):
                until = "+" if oldest is None else b"(" + oldest
                await self._redis.zremrangebylex(_key("ids", tenant.decode()), "-", until)

    async def aclose(self) -> None:
        await close(self._redis)

    def _arguments(self, records: Sequence[RequestRecord], ledger: bool) -> list[str | bytes | int]:
        """Return what the script takes. The amounts are text, because Lua's numbers have 53 bits."""
        arguments: list[str | bytes | int] = []
        for record in records:
            codec, tenant, value = self._codec.record(record)
            labels, sums = labels_of(record), sums_of(record)
            row, row_codec, _, row_value = self._codec.row(labels)
            sealed = msgspec.msgpack.encode((codec, tenant, value))
            described = msgspec.msgpack.encode((row_codec, tenant, row_value))
            amounts = [part for one in SUMS if (amount := getattr(sums, one)) for part in (one, str(amount))]
            own = record.id, name(tenant), record.parent or "", sealed, row if ledger else "", labels.day, described
            arguments += (*own, len(amounts), *amounts)
        return arguments

    async def _drop(self, ids: Sequence[bytes]) -> None:
        async with self._redis.pipeline(transaction=False) as pipe:
            unlink(pipe, *(_key("record", id.decode()) for id in ids))
            pipe.zrem(_key("ids"), *ids)
            await pipe.execute()

    async def _ids(self, query: RecordQuery, before: str | None) -> list[str]:
        """Return up to ``PAGE`` ids, newest first."""
        if query.parent is not None:
            return sorted(
                (id.decode() for id in await self._redis.smembers(_key("children", query.parent))), reverse=True
            )
        upper = [*([] if before is None else [before]), *([] if query.until is None else [first_id(query.until)])]
        most = f"({min(upper)}" if upper else "+"
        least = "-" if query.since is None else f"[{first_id(query.since)}"
        indexes = [_key("ids")]
        if query.tenants is not None:
            names = (own for tenant in query.tenants for own in self._codec.names("tenant", tenant))
            indexes = [_key("ids", name(own)) for own in names]
        found = [await self._redis.zrevrangebylex(index, most, least, start=0, num=PAGE) for index in indexes]
        return [id.decode() for id in merge(*found, reverse=True)][:PAGE]

    async def _read(self, ids: Sequence[str]) -> list[RequestRecord | None]:
        values = await values_of(self._redis, [_key("record", id) for id in ids])

        def opened() -> list[RequestRecord | None]:
            return [None if value is None else self._opened(id, value) for id, value in zip(ids, values, strict=True)]

        return await asyncio.to_thread(opened)

    def _opened(self, id: str, raw: bytes) -> RequestRecord | None:
        codec, tenant, value = msgspec.msgpack.decode(raw, type=_Sealed)
        return self._codec.open_record(tenant, codec, id, value)


def _key(*parts: str) -> str:
    return ":".join((PREFIX, *parts))


def _selected(record: RequestRecord, query: RecordQuery) -> bool:
    return (
        (query.tenants is None or record.tenant in query.tenants)
        and all(
            (wanted := getattr(query, one)) is None or getattr(record, one) == wanted
            for one in ("team", "policy", "model", "verdict", "kind", "parent")
        )
        and (query.since is None or record.id >= first_id(query.since))
        and (query.until is None or record.id < first_id(query.until))
        and (query.before is None or record.id < query.before)
    )
