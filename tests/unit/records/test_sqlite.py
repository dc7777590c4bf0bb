"""Test that records are found by their names, added to the ledger once, and removed."""

import asyncio
import sqlite3
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given

from proxy.records import model
from proxy.records.model import (
    DAY,
    LEDGER_DAYS,
    OTHER,
)
from proxy.records.sqlite import SqliteRecords
from proxy.telemetry.record import RequestRecord
from tests.kit.records import expected_ledger, found_ledger, record, varied_batches
from tests.kit.stores import Clock

WEEK = 7 * 86_400.0


def used(work: Callable[[SqliteRecords], Awaitable[None]], *, path: Path | None = None, **options: object) -> None:
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
        used(work)


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
