"""Read the records that a proxy has written, and write some."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from proxy.records import records_file
from proxy.records.model import RECORD_LIMIT, LedgerLabels, LedgerSums, RecordQuery
from proxy.records.sqlite import SqliteRecords
from proxy.telemetry.record import RequestRecord, new_id

EVERYTHING = RecordQuery(limit=RECORD_LIMIT)


def record(tenant: str = "team:red", **fields: Any) -> RequestRecord:
    """Return a new record of a team."""
    team = tenant.removeprefix("team:")
    return RequestRecord(new_id(), time.time(), tenant=tenant, team=team, policy="default", **fields)


def records_in(store: Path, query: RecordQuery = EVERYTHING, keys: Sequence[bytes] = ()) -> list[RequestRecord]:
    """Return the records next to a store's file, newest first."""

    async def read() -> list[RequestRecord]:
        records = SqliteRecords(records_file(store), keys)
        try:
            return await records.select(query)
        finally:
            await records.aclose()

    return asyncio.run(read())


def ledger_in(store: Path, keys: Sequence[bytes] = ()) -> list[tuple[LedgerLabels, LedgerSums]]:
    """Return all rows of the ledger next to a store's file."""

    async def read() -> list[tuple[LedgerLabels, LedgerSums]]:
        records = SqliteRecords(records_file(store), keys)
        try:
            return await records.ledger(0, 100_000)
        finally:
            await records.aclose()

    return asyncio.run(read())


def written(store: Path, records: Sequence[RequestRecord]) -> None:
    """Add records next to a store's file."""

    async def write() -> None:
        file = SqliteRecords(records_file(store))
        for start in range(0, len(records), 500):
            await file.write(records[start : start + 500], 1e6)
        await file.aclose()

    asyncio.run(write())
