"""Records and the ledger on Redis or Valkey. See ``proxy.store.redis_store`` for the other entries.

All keys have the same hash tag, so that in a cluster one server has them and a script can write several of them.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from heapq import merge

import msgspec

from proxy.constants import DAY
from proxy.records.model import (
    LARGEST_SUM,
    LEDGER_DAYS,
    SUMS,
    LedgerLabels,
    LedgerSums,
    RecordCodec,
    RecordQuery,
    RecordStore,
    Sealed,
    bounded,
    labels_of,
    row_order,
    sums_of,
)
from proxy.store.redis_client import close, connect, failures, name, unlink, values_of
from proxy.telemetry.record import RequestRecord, first_id

TAG = "{compaction-records}"

VERSION = "1"
"""The format of values. Another version of the proxy with another format uses other keys.

The format of names never changes, so each version can remove the records of all others.
"""

PREFIX = f"{TAG}:{VERSION}"

_VERSIONS = f"{TAG}:versions"  # the set of the versions that have written records
BATCH = 200  # Records per script. The server answers nobody else meanwhile.
PAGE = 500  # records per read

# The arguments are the milliseconds to keep the records, and for each record its id, tenant, parent (or nothing),
# value, row of the ledger (or nothing), the row's tenant, day, and labels, the length of its sums, and these: names,
# each followed by an amount.
# If a record isn't stored yet, the script stores it, indexes it, and adds its sums to its row of the ledger. An error
# in the middle would leave the rest out, so a damaged sum starts again at 0, and sums have a maximum.
# Rows and their lists don't expire on the server, because `volatile-lru` removes keys that do when it is full.
_WRITE = """
local prefix, expires, at = KEYS[1], ARGV[1], 2
redis.call('SADD', KEYS[2], prefix)
while at <= #ARGV do
    local id, tenant, parent, value, row, holder, day, labels = unpack(ARGV, at, at + 7)
    local first, last = at + 9, at + 8 + tonumber(ARGV[at + 8])
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
                local sum = redis.pcall('HINCRBY', key, ARGV[index], ARGV[index + 1])
                if type(sum) ~= 'number' then
                    redis.call('HSET', key, ARGV[index], ARGV[index + 1])
                elseif sum > LARGEST then
                    redis.call('HSET', key, ARGV[index], 'LARGEST')
                end
            end
            redis.call('ZADD', prefix .. ':rows', day, row)
            redis.call('ZADD', prefix .. ':ledger:' .. holder, day, row)
        end
    end
end
""".replace("LARGEST", str(LARGEST_SUM))

# Forget a tenant without records.
_LEAVE = """
if redis.call('EXISTS', KEYS[1]) == 0 then redis.call('SREM', KEYS[2], ARGV[1]) end
"""


class RedisRecords(RecordStore):
    """See ``RecordStore``. With keys, values and names are encrypted as by ``RecordCodec``."""

    def __init__(self, url: str, keys: Sequence[bytes] = ()) -> None:
        """Use the server at ``url``. Raises ``ValueError`` for a wrong address."""
        self._redis = connect(url)
        self._codec = RecordCodec(keys)

    async def write(self, records: Sequence[RequestRecord], seconds: float, *, ledger: bool = True) -> None:
        for start in range(0, len(records), BATCH):
            batch = records[start : start + BATCH]
            with failures():
                rows = await self._rows(batch) if ledger else {}
            arguments = await asyncio.to_thread(self._arguments, batch, rows)
            with failures():
                await self._redis.eval(_WRITE, 2, PREFIX, _VERSIONS, max(1, math.ceil(seconds * 1000)), *arguments)

    async def _rows(self, records: Sequence[RequestRecord]) -> dict[LedgerLabels, LedgerLabels]:
        """Return the row to add to, by the one that a record belongs to. See ``bounded``.

        Processes that add rows at the same time may exceed the bounds by the rows of one batch each.
        """
        wanted = list(dict.fromkeys(labels_of(record) for record in records))
        async with self._redis.pipeline(transaction=False) as pipe:
            for labels in wanted:
                own = name(self._codec.names("tenant", labels.tenant)[0])
                pipe.exists(_key("row", self._codec.row(labels)[0]))
                pipe.zcount(_key("ledger", own), labels.day, labels.day)
                pipe.zcount(_key("rows"), labels.day, labels.day)
            answers = iter(await pipe.execute())
        added: Counter[object] = Counter()
        rows: dict[LedgerLabels, LedgerLabels] = {}
        for labels, exists, own_rows, day_rows in zip(wanted, answers, answers, answers, strict=True):
            own_day = labels.tenant, labels.day
            rows[labels] = labels
            if not exists:
                rows[labels] = bounded(labels, own_rows + added[own_day], day_rows + added[labels.day])
                added.update((own_day, labels.day))
        return rows

    async def copy_rows(self, rows: Sequence[tuple[LedgerLabels, LedgerSums]], source: str) -> None:
        with failures():
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.sadd(_VERSIONS, PREFIX)
                for labels, sums in rows:
                    row, sealed = self._codec.row(labels, source)
                    pipe.delete(_key("row", row))
                    mapping = {**_amounts(sums), "labels": msgspec.msgpack.encode(sealed)}
                    pipe.hset(_key("row", row), mapping=mapping)
                    pipe.zadd(_key("rows"), {row: labels.day})
                    pipe.zadd(_key("ledger", name(sealed.tenant)), {row: labels.day})
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
            found += [record for record in records if record is not None and query.selects(record)]
            if query.parent is not None or len(ids) < PAGE:
                break
            before = ids[-1]
        return found[: query.limit]

    async def ledger(
        self, since: int, until: int, tenants: tuple[str, ...] | None = None
    ) -> list[tuple[LedgerLabels, LedgerSums]]:
        with failures():
            keys: list[bytes] = []
            if tenants is None:
                keys += await self._redis.zrangebyscore(_key("rows"), since, until)
            else:
                for own in sorted({name(own) for tenant in tenants for own in self._codec.names("tenant", tenant)}):
                    keys += await self._redis.zrangebyscore(_key("ledger", own), since, until)
            async with self._redis.pipeline(transaction=False) as pipe:
                for key in keys:
                    pipe.hgetall(_key("row", key.decode()))
                rows: list[dict[bytes, bytes]] = await pipe.execute()

        def summed() -> list[tuple[LedgerLabels, LedgerSums]]:
            found: dict[LedgerLabels, LedgerSums] = {}
            for key, row in zip(keys, rows, strict=True):
                if not row:  # removed meanwhile
                    continue
                id = key.decode()
                sealed = self._codec.decoded("ledger", id, row.pop(b"labels", b""), Sealed)
                labels = None if sealed is None else self._codec.open_row(id, sealed)
                if labels is not None and (tenants is None or labels.tenant in tenants):
                    texts = {one.decode("utf-8", "replace"): sum.decode("utf-8", "replace") for one, sum in row.items()}
                    amounts = self._codec.sums(id, texts)
                    found.setdefault(labels, LedgerSums()).add(amounts)  # rows under several keys of encryption
            return sorted(found.items(), key=row_order)

        return await asyncio.to_thread(summed)

    async def remove(self, tenant: str) -> Counter[str]:
        removed: Counter[str] = Counter()
        with failures():
            for prefix in sorted({PREFIX, *(each.decode() for each in await self._redis.smembers(_VERSIONS))}):
                for own in map(name, self._codec.names("tenant", tenant)):
                    removed += await self._remove(prefix, own)
        return removed

    async def _remove(self, prefix: str, own: str) -> Counter[str]:
        """Remove the records and rows of a tenant by its name in the store, of one version."""
        removed: Counter[str] = Counter()
        while ids := await self._redis.zrange(f"{prefix}:ids:{own}", 0, BATCH - 1):
            async with self._redis.pipeline(transaction=False) as pipe:
                unlink(pipe, *(f"{prefix}:record:{id.decode()}" for id in ids))
                unlink(pipe, *(f"{prefix}:children:{id.decode()}" for id in ids))
                pipe.zrem(f"{prefix}:ids", *ids)
                pipe.zrem(f"{prefix}:ids:{own}", *ids)
                removed["record"] += (await pipe.execute())[0]
        listed = f"{prefix}:ledger:{own}"
        while rows := await self._redis.zrange(listed, 0, BATCH - 1):
            async with self._redis.pipeline(transaction=False) as pipe:
                unlink(pipe, *(f"{prefix}:row:{row.decode()}" for row in rows))
                pipe.zrem(f"{prefix}:rows", *rows)
                pipe.zrem(listed, *rows)
                removed["ledger row"] += (await pipe.execute())[0]
        await self._redis.srem(f"{prefix}:tenants", own)
        return +removed

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
                own, until = tenant.decode(), "+" if oldest is None else b"(" + oldest
                await self._redis.zremrangebylex(_key("ids", own), "-", until)
                await self._redis.eval(_LEAVE, 2, _key("ids", own), _key("tenants"), own)
            await self._drop_rows(int(time.time() // DAY) - LEDGER_DAYS)

    async def _drop_rows(self, first: int) -> None:
        while rows := await self._redis.zrangebyscore(_key("rows"), "-inf", f"({first}", start=0, num=BATCH):
            async with self._redis.pipeline(transaction=False) as pipe:
                for row in rows:
                    pipe.hget(_key("row", row.decode()), "labels")
                labels = await pipe.execute()
            async with self._redis.pipeline(transaction=False) as pipe:
                for row, value in zip(rows, labels, strict=True):
                    sealed = self._codec.decoded("ledger", row.decode(), value or b"", Sealed)
                    if sealed is not None:
                        pipe.zrem(_key("ledger", name(sealed.tenant)), row)
                unlink(pipe, *(_key("row", row.decode()) for row in rows))
                pipe.zrem(_key("rows"), *rows)
                await pipe.execute()

    async def aclose(self) -> None:
        await close(self._redis)

    def _arguments(
        self, records: Sequence[RequestRecord], rows: Mapping[LedgerLabels, LedgerLabels]
    ) -> list[str | bytes | int]:
        """Return what the script takes. The amounts are text, because Lua's numbers have 53 bits."""
        arguments: list[str | bytes | int] = []
        for record in records:
            sealed = self._codec.record(record)
            arguments += record.id, name(sealed.tenant), record.parent or "", msgspec.msgpack.encode(sealed)
            if (labels := rows.get(labels_of(record))) is None:
                arguments += "", "", 0, "", 0
                continue
            row, described = self._codec.row(labels)
            amounts = [part for item in _amounts(sums_of(record)).items() for part in item]
            arguments += row, name(described.tenant), labels.day, msgspec.msgpack.encode(described), len(amounts)
            arguments += amounts
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
        sealed = self._codec.decoded("record", id, raw, Sealed)
        return None if sealed is None else self._codec.open_record(id, sealed)


def _key(*parts: str) -> str:
    return ":".join((PREFIX, *parts))


def _amounts(sums: LedgerSums) -> dict[str, str]:
    return {one: str(min(amount, LARGEST_SUM)) for one in SUMS if (amount := getattr(sums, one))}
