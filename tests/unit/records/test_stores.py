"""Records and the ledger, in SQLite and on a real Redis server."""

import asyncio
import sqlite3
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given

from proxy.records import model
from proxy.records.model import DAY, LARGEST_SUM, LEDGER_DAYS, OTHER, TENANT_ROWS, RecordQuery
from proxy.records.redis import BATCH, PAGE, RedisRecords
from proxy.records.sqlite import SqliteRecords
from proxy.telemetry.record import Cost, RequestRecord
from tests.kit.combinations import combined
from tests.kit.records import EVERYTHING, expected_ledger, found_ledger, record, varied_batches
from tests.kit.redis_server import RedisServer
from tests.kit.stores import Clock

WEEK = 7 * 86_400.0
KEY, NEW_KEY = b"k" * 32, b"n" * 32


def ids(records: Sequence[RequestRecord]) -> list[str]:
    return [one.id for one in records]


Records = RedisRecords | SqliteRecords
Open = Callable[[Sequence[bytes]], Records]


@pytest.fixture(params=["sqlite", "redis"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Open an empty store."""
    if request.param == "sqlite":
        return lambda keys: SqliteRecords(tmp_path / "r.db", keys=keys)
    server: RedisServer = request.getfixturevalue("redis")
    return lambda keys: RedisRecords(server.url, keys)


def raw(request: pytest.FixtureRequest, tmp_path: Path) -> bytes:
    """Return all bytes of the store."""
    if (tmp_path / "r.db").exists():
        return b"".join(file.read_bytes() for file in tmp_path.iterdir())
    server: RedisServer = request.getfixturevalue("redis")
    return server.raw()


def used(opened: Open, work: Callable[[Records], Awaitable[None]], *keys: bytes) -> None:
    async def run() -> None:
        store = opened(keys)
        try:
            await work(store)
        finally:
            await store.aclose()

    asyncio.run(run())


def test_a_filter_looks_behind_the_first_page(redis: RedisServer) -> None:
    old = [record(model="old") for _ in range(3)]
    records = [*old, *(record(model="new") for _ in range(2 * PAGE))]

    async def work(store: Records) -> None:
        await store.write(records, WEEK)
        assert ids(await store.select(RecordQuery(model="old", limit=2))) == ids([old[2], old[1]])
        assert len(await store.select(RecordQuery(limit=1_000))) == 1_000

    used(lambda keys: RedisRecords(redis.url, keys), work)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "keys"), combined(2, ["sqlite", "redis"], [(), (KEY,)]))
@given(batches=varied_batches())
def test_a_ledger_written_in_any_batches_with_repeats_is_the_sum_of_the_records(
    redis_process: RedisServer, kind: str, keys: tuple[bytes, ...], batches: list[list[RequestRecord]]
) -> None:
    records = {record.id: record for batch in batches for record in batch}

    async def work(store: Records) -> None:
        for batch in batches:
            await store.write(batch, WEEK)
        await store.write(batches[0], WEEK)
        assert found_ledger(await store.ledger(0, 10**6)) == expected_ledger(list(records.values()))
        found = {record.id: record for record in await store.select(EVERYTHING)}
        assert len(found) == len(records)
        for id, one in records.items():
            assert msgspec.to_builtins(found[id]) == msgspec.to_builtins(one)
            if one.parent is not None:
                children = {child.id for child in await store.select(RecordQuery(parent=one.parent))}
                assert children == {child.id for child in records.values() if child.parent == one.parent}

    if kind == "sqlite":
        used(lambda keys: SqliteRecords(None, keys), work, *keys)
        return
    with redis_process.client() as client:
        client.flushall()
    used(lambda keys: RedisRecords(redis_process.url, keys), work, *keys)


@pytest.mark.parametrize("keys", [(), (KEY,)])
def test_a_removed_tenant_leaves_nothing(
    opened: Open, request: pytest.FixtureRequest, tmp_path: Path, keys: tuple[bytes, ...]
) -> None:
    parent = record()
    red = [parent, record(kind="summary", parent=parent.id), *(record() for _ in range(BATCH + 50))]
    blue = record("team:blue")

    async def work(store: Records) -> None:
        await store.write([*red, blue], WEEK)
        assert await store.remove("team:red") == {"record": len(red), "ledger row": 1}
        assert ids(await store.select(RecordQuery())) == ids([blue])
        assert [labels.team for labels, _ in await store.ledger(0, 10**6)] == ["blue"]
        for name in ("red", parent.id, red[-1].id):
            assert name.encode() not in raw(request, tmp_path)

    used(opened, work, *keys)


def test_expired_and_excess_records_are_removed_and_stay_in_the_ledger(redis: RedisServer) -> None:
    short, kept = [record() for _ in range(BATCH + 9)], [record("team:blue") for _ in range(30)]

    async def work(store: Records) -> None:
        await store.write(short, 0.001)
        await store.write(kept, WEEK)
        await asyncio.sleep(0.05)
        await store.maintain(20)
        assert ids(await store.select(RecordQuery(limit=100))) == ids(kept[:-21:-1])
        with redis.client() as client:
            assert client.zcard("{compaction-records}:1:ids:team%3Ared") == 0
            assert client.zcard("{compaction-records}:1:ids:team%3Ablue") == 20
        assert sum(sums.requests for _, sums in await store.ledger(0, 10**6)) == len(short) + len(kept)

    used(lambda keys: RedisRecords(redis.url, keys), work)


@pytest.mark.parametrize("keys", [(), (KEY,)])
def test_rows_of_the_ledger_are_bounded_by_tenant_and_day_and_sums_stay_complete(
    opened: Open, keys: tuple[bytes, ...]
) -> None:
    records = [record(model=f"m{number}", before=1) for number in range(TENANT_ROWS + 50)]

    async def work(store: Records) -> None:
        for _ in range(2):
            await store.write(records, WEEK)
        await store.write([record("team:blue", model="gpt-5"), record(model="m0", before=1)], WEEK)
        rows = await store.ledger(0, 10**6, ("team:red",))
        assert len(rows) == TENANT_ROWS + 1
        assert sum(sums.received for _, sums in rows) == len(records) + 1
        counts = {labels.model: sums.requests for labels, sums in rows}
        assert (counts[OTHER], counts["m0"]) == (50, 2)
        assert [labels.model for labels, _ in await store.ledger(0, 10**6, ("team:blue",))] == ["gpt-5"]

    used(opened, work, *keys)


def test_a_sum_has_a_maximum_and_a_damaged_one_starts_again(redis: RedisServer) -> None:
    async def work(store: Records) -> None:
        for _ in range(3):
            await store.write([record(before=2, cost=Cost(3 * 10**18, 2**63))], WEEK)
        with redis.client() as client:
            (row,) = client.zrange("{compaction-records}:1:rows", 0, -1)
            client.hset(b"{compaction-records}:1:row:" + row, "received", "much")  # type: ignore[arg-type, operator]
        ((_, sums),) = await store.ledger(0, 10**6)
        assert (sums.requests, sums.received, sums.cost, sums.as_received) == (3, 0, LARGEST_SUM, LARGEST_SUM)
        await store.write([record(before=2)], WEEK)
        ((_, sums),) = await store.ledger(0, 10**6)
        assert (sums.requests, sums.received, sums.sent) == (4, 2, 8)

    used(lambda keys: RedisRecords(redis.url, keys), work)


@pytest.mark.parametrize("keys", [(), (KEY,)])
def test_unreadable_values_are_skipped(redis: RedisServer, keys: tuple[bytes, ...]) -> None:
    records = [record(), record(), record(), record("team:blue")]

    async def work(store: Records) -> None:
        await store.write(records, WEEK)
        with redis.client() as client:
            for key, value in (
                (f":record:{records[1].id}", b"\x00"),
                (f":record:{records[2].id}", b"\x93\xa0\xa0\x01"),
            ):
                client.set("{compaction-records}:1" + key, value)
            for row in client.zrange("{compaction-records}:1:rows", 0, 0):  # type: ignore[union-attr]
                client.hdel(b"{compaction-records}:1:row:" + row, "labels")
        assert ids(await store.select(RecordQuery(limit=2))) == ids([records[3], records[0]])
        assert await store.get(records[1].id) is None
        assert len(await store.ledger(0, 10**6)) == 1
        await store.maintain(10)

    used(lambda keys: RedisRecords(redis.url, keys), work, *keys)


def test_rows_have_a_lifetime_and_callers_without_records_leave_no_name(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = record("team:gone")
    old.time -= (LEDGER_DAYS + 2) * DAY

    async def work(store: Records) -> None:
        await store.write([old], 0.001)
        await store.write([record()], WEEK)
        await asyncio.sleep(0.05)
        await store.maintain(10)
        assert [labels.team for labels, _ in await store.ledger(0, 10**6)] == ["red"]
        assert b"gone" not in redis.raw()

    used(lambda keys: RedisRecords(redis.url, keys), work)


def names_used(
    work: Callable[[SqliteRecords], Awaitable[None]], *, path: Path | None = None, **options: object
) -> None:
    async def run() -> None:
        store = SqliteRecords(path, **options)  # type: ignore[arg-type]
        try:
            await work(store)
        finally:
            await store.aclose()

    asyncio.run(run())


@pytest.mark.long
@given(batches=varied_batches())
def test_rows_over_the_bounds_change_no_total(batches: list[list[RequestRecord]]) -> None:
    records = {record.id: record for batch in batches for record in batch}

    async def work(store: SqliteRecords) -> None:
        for batch in batches:
            await store.write(batch, WEEK)
        rows = await store.ledger(0, 10**6)
        totals, wanted = Counter[str](), Counter[str]()
        for row in found_ledger(rows).values():
            totals += row
        for row in expected_ledger(list(records.values())).values():
            wanted += row
        assert totals == wanted
        own = Counter((labels.tenant, labels.day) for labels, _ in rows if labels.model != OTHER)
        assert max(own.values(), default=0) <= 3
        without_team = Counter(labels.day for labels, _ in rows if labels.tenant == "key")
        assert max(without_team.values(), default=0) <= 4

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "TENANT_ROWS", 3)
        patch.setattr(model, "DAY_ROWS", 4)
        names_used(work)


def test_rows_of_the_ledger_have_a_lifetime(tmp_path: Path) -> None:
    clock = Clock()
    clock.now = time.time()

    async def work(store: SqliteRecords) -> None:
        await store.write([record()], WEEK)
        clock.now += (LEDGER_DAYS - 1) * DAY
        await store.maintain(10)
        assert len(await store.ledger(0, 10**6)) == 1
        clock.now += 2 * DAY
        await store.maintain(10)
        assert await store.ledger(0, 10**6) == []

    names_used(work, path=tmp_path / "r.db", clock=clock)


def test_a_file_of_an_older_version_gets_the_newer_columns_and_keeps_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "r.db"

    async def first(store: SqliteRecords) -> None:
        await store.write([record(before=3)], WEEK)

    async def second(store: SqliteRecords) -> None:
        both = SqliteRecords(path)
        shadow = record(before=4, verdict="shadow", forecast=2)
        await asyncio.gather(store.write([shadow], WEEK), both.write([record(before=5)], WEEK))
        await both.aclose()
        ((_, sums),) = await store.ledger(0, 10**6)
        assert (sums.received, sums.would_compact) == (12, 1)

    names_used(first, path=path)
    with sqlite3.connect(path) as database:
        for name in ("would_compact", "would_avoid"):
            database.execute(f"ALTER TABLE ledger DROP COLUMN {name}")
    database.close()
    names_used(second, path=path)
