"""Test that records are found by their names, added to the ledger once, and removed."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given

from proxy.records import model
from proxy.records import sqlite as module
from proxy.records.model import (
    DAY,
    LARGEST_SUM,
    LEDGER_DAYS,
    OTHER,
    SUMS,
    TENANT_ROWS,
    LedgerSums,
    RecordQuery,
)
from proxy.records.sqlite import SqliteRecords
from proxy.store import Refused
from proxy.telemetry.record import Cost, Reason, RequestRecord, UpstreamCall, Usage
from tests.kit.records import EVERYTHING, expected_ledger, found_ledger, record, varied_batches
from tests.kit.stores import Clock

WEEK = 7 * 86_400.0
KEY, NEW_KEY = b"k" * 32, b"n" * 32


def used(work: Callable[[SqliteRecords], Awaitable[None]], *, path: Path | None = None, **options: object) -> None:
    async def run() -> None:
        store = SqliteRecords(path, **options)  # type: ignore[arg-type]
        try:
            await work(store)
        finally:
            await store.aclose()

    asyncio.run(run())


@pytest.mark.parametrize("keys", [(), (KEY,)])
def test_a_record_comes_back_whole_and_is_found_by_its_names(tmp_path: Path, keys: tuple[bytes, ...]) -> None:
    first = record(
        model="gpt-5",
        verdict="compacted",
        reason=Reason("fraction", 800, 900),
        steps=("summary",),
        before=900,
        sent=300,
        calls=[UpstreamCall("overflow", 400, 1.5, 900, 700), UpstreamCall("accepted", 200, 2.5, 300)],
        usage=Usage(310, 20, 100, None),
        cost=Cost(5, 7, estimated=True),
        phases={"total": 12.5},
        archive=["a" * 20],
    )
    others = [record("team:blue", model="gpt-5"), record(model="o3", verdict="refused", error="overloaded")]

    async def work(store: SqliteRecords) -> None:
        await store.write([first, *others], WEEK)
        found = await store.get(first.id)
        assert found is not None
        assert {name: getattr(found, name) for name in found.__struct_fields__} == {
            name: getattr(first, name) for name in first.__struct_fields__
        }
        assert found.retries == 1
        for query, ids in (
            (RecordQuery(), [others[1].id, others[0].id, first.id]),
            (RecordQuery(team="red"), [others[1].id, first.id]),
            (RecordQuery(model="gpt-5", verdict="compacted"), [first.id]),
            (RecordQuery(tenants=("team:blue",)), [others[0].id]),
            (RecordQuery(tenants=()), []),
            (RecordQuery(limit=1), [others[1].id]),
            (RecordQuery(before=others[1].id), [others[0].id, first.id]),
            (RecordQuery(since=time.time() + 60), []),
            (RecordQuery(until=time.time() - 60), []),
        ):
            assert sorted(one.id for one in await store.select(query)) == sorted(ids), query

    used(work, path=tmp_path / "r.db", keys=keys)


def test_the_ledger_is_the_sum_of_the_records_even_if_a_write_is_repeated(tmp_path: Path) -> None:
    records = [
        record(
            verdict="compacted", before=900, sent=300, usage=Usage(310, 20, 100, 10), cost=Cost(5, 7, estimated=True)
        ),
        record(before=50, status=500, fits=False),
        record("team:red", fits=False, verdict="compacted", before=0, sent=0, status=200),
        record("team:red", fits=False, verdict="compacted", status=400),
        record(verdict="shadow", before=90, forecast=40, status=200),
        record(verdict="shadow", fits=False, before=90, forecast=40, status=400),
        record(kind="summary", usage=Usage(500, 60), cost=Cost(11)),
    ]

    async def work(store: SqliteRecords) -> None:
        await store.write(records[:2], WEEK)
        await store.write(records, WEEK)
        ((labels, sums),) = await store.ledger(0, 10**6)
        assert (labels.team, labels.policy) == ("red", "default")
        assert {name: getattr(sums, name) for name in SUMS if getattr(sums, name)} == {
            "requests": 6,
            "compacted": 3,
            "avoided": 1,
            "errors": 3,
            "shadow": 2,
            "would_compact": 2,
            "would_avoid": 1,
            "summaries": 1,
            "estimated": 1,
            "received": 1130,
            "sent": 530,
            "forecast": 430,
            "input": 310,
            "output": 20,
            "cache_read": 100,
            "cache_write": 10,
            "summary_input": 500,
            "summary_output": 60,
            "cost": 5,
            "summary_cost": 11,
            "as_received": 7,
            "forecast_cost": 5,
        }
        assert await store.ledger(0, 10**6, tenants=("team:blue",)) == []

    used(work, path=tmp_path / "r.db")


@pytest.mark.parametrize("keys", [(), (KEY,)])
@given(batches=varied_batches())
def test_a_ledger_written_in_any_batches_with_repeats_is_the_sum_of_the_records(
    keys: tuple[bytes, ...], batches: list[list[RequestRecord]]
) -> None:
    records = {record.id: record for batch in batches for record in batch}

    async def work(store: SqliteRecords) -> None:
        for batch in batches:
            await store.write(batch, WEEK)
        await store.write(batches[0], WEEK)
        assert found_ledger(await store.ledger(0, 10**6)) == expected_ledger(list(records.values()))
        found = {record.id: record for record in await store.select(EVERYTHING)}
        assert len(found) == await store.count() == len(records)
        for id, one in records.items():
            assert msgspec.to_builtins(found[id]) == msgspec.to_builtins(one)
            if one.parent is not None:
                children = {child.id for child in await store.select(RecordQuery(parent=one.parent))}
                assert children == {child.id for child in records.values() if child.parent == one.parent}

    used(work, keys=keys)


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
        used(work)


def test_large_batches_are_stored_whole_or_not_at_all(tmp_path: Path) -> None:
    records = [record(model=f"m{number % 3}", before=number) for number in range(2 * module.ROWS + 50)]
    damaged = record(before=1)
    damaged.tenant = None  # type: ignore[assignment]

    async def work(store: SqliteRecords) -> None:
        with pytest.raises(Refused):
            await store.write([*records, damaged], WEEK)
        assert (await store.count(), await store.ledger(0, 10**6)) == (0, [])
        await store.write(records[::7], WEEK)
        await store.write(records, WEEK)
        assert {one.id for one in await store.select(EVERYTHING)} == {one.id for one in records}
        assert sum(sums.received for _, sums in await store.ledger(0, 10**6)) == sum(range(len(records)))

    used(work, path=tmp_path / "r.db")


def test_encrypted_names_and_values_are_not_in_the_file_and_rows_of_both_keys_add_up(tmp_path: Path) -> None:
    path = tmp_path / "r.db"
    one, two = record("team:canary-red", model="canary-model", before=1), record("team:canary-red", before=2)

    async def first(store: SqliteRecords) -> None:
        await store.write([one], WEEK)

    async def second(store: SqliteRecords) -> None:
        await store.write([two], WEEK)
        assert len(await store.select(RecordQuery(team="canary-red"))) == 2
        rows = await store.ledger(0, 10**6)
        assert sum((sums.received for _, sums in rows), 0) == 3

    async def without(store: SqliteRecords) -> None:
        assert await store.select(RecordQuery()) == []
        assert await store.ledger(0, 10**6) == []

    used(first, path=path, keys=[KEY])
    used(second, path=path, keys=[NEW_KEY, KEY])
    used(without, path=path)
    used(without, path=path, keys=[b"x" * 32])
    assert b"canary" not in b"".join(file.read_bytes() for file in tmp_path.iterdir())


def test_maintenance_removes_expired_records_and_the_oldest_ones_but_keeps_the_ledger(tmp_path: Path) -> None:
    clock = Clock()
    records = [record() for _ in range(5)]

    async def work(store: SqliteRecords) -> None:
        await store.write(records[:3], 10.0)
        await store.write(records[3:], 1_000.0)
        newest = sorted(one.id for one in records)[-4:]
        await store.maintain(4)
        assert sorted(one.id for one in await store.select(RecordQuery())) == newest
        clock.now += 11
        await store.maintain(4)
        assert {one.id for one in await store.select(RecordQuery())} <= {one.id for one in records[3:]}
        assert (await store.ledger(0, 10**6))[0][1].requests == 5

    used(work, path=tmp_path / "r.db", clock=clock)


def test_a_tenant_is_removed_from_records_and_ledger(tmp_path: Path) -> None:
    async def work(store: SqliteRecords) -> None:
        await store.write([record("team:gone"), record("team:stays")], WEEK)
        assert await store.remove("team:gone") == {"record": 1, "ledger row": 1}
        assert [one.team for one in await store.select(RecordQuery())] == ["stays"]
        assert [labels.team for labels, _ in await store.ledger(0, 10**6)] == ["stays"]

    used(work, path=tmp_path / "r.db")
    assert b"gone" not in b"".join(file.read_bytes() for file in tmp_path.iterdir())


def test_maintenance_creates_no_file(tmp_path: Path) -> None:
    async def work(store: SqliteRecords) -> None:
        await store.maintain(10)

    used(work, path=tmp_path / "r.db")
    assert not (tmp_path / "r.db").exists()


def test_rows_of_the_ledger_are_bounded_by_tenant_and_day_and_sums_stay_complete(tmp_path: Path) -> None:
    records = [record(model=f"m{number}", before=1) for number in range(TENANT_ROWS + 50)]
    yesterday = record(model="old")
    yesterday.time -= DAY

    async def work(store: SqliteRecords) -> None:
        await store.write(records, WEEK)
        await store.write([record(model=f"n{number}", before=1) for number in range(50)], WEEK)
        await store.write([record("team:blue", model="gpt-5"), yesterday, record(model="m0", before=1)], WEEK)
        rows = await store.ledger(0, 10**6, ("team:red",))
        assert len(rows) == TENANT_ROWS + 2
        assert sum(sums.received for _, sums in rows) == len(records) + 51
        counts = {labels.model: sums.requests for labels, sums in rows}
        assert (counts[OTHER], counts["m0"], counts["old"]) == (100, 2, 1)
        assert [labels.model for labels, _ in await store.ledger(0, 10**6, ("team:blue",))] == ["gpt-5"]

    used(work, path=tmp_path / "r.db", keys=[KEY])


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

    used(work, path=tmp_path / "r.db", clock=clock)


def test_a_sum_has_a_maximum(tmp_path: Path) -> None:
    async def work(store: SqliteRecords) -> None:
        for _ in range(3):
            await store.write([record(cost=Cost(3 * 10**18, 2**63))], WEEK)
        ((_, sums),) = await store.ledger(0, 10**6)
        assert (sums.requests, sums.cost, sums.as_received) == (3, LARGEST_SUM, LARGEST_SUM)

    used(work, path=tmp_path / "r.db")


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

    used(first, path=path)
    with sqlite3.connect(path) as database:
        for name in ("would_compact", "would_avoid"):
            database.execute(f"ALTER TABLE ledger DROP COLUMN {name}")
    database.close()
    used(second, path=path)


def test_sums_cover_every_field() -> None:
    sums = LedgerSums(*range(1, len(SUMS) + 1))
    sums.add(sums)
    assert [getattr(sums, name) for name in SUMS] == [2 * number for number in range(1, len(SUMS) + 1)]
