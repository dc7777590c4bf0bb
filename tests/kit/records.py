"""Read the records that a proxy has written, and write some."""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from proxy.constants import DAY
from proxy.records import records_file
from proxy.records.model import RECORD_LIMIT, SUMS, LedgerLabels, LedgerSums, RecordQuery
from proxy.records.sqlite import SqliteRecords
from proxy.telemetry.record import ID_LENGTH, Cost, RequestRecord, Usage, new_id

EVERYTHING = RecordQuery(limit=RECORD_LIMIT)

NOON = 20_000.5 * DAY
"""The time of generated records, in seconds since 1970."""

_IDS = st.integers(0, 16**ID_LENGTH - 1).map(f"{{:0{ID_LENGTH}x}}".format)
_TOKENS = st.integers(0, 10**6)
_PRICES = st.integers(0, 10**17)


@st.composite
def varied_record(draw: st.DrawFn) -> RequestRecord:
    """Return a record of a request or a summary call, with any figures."""
    team = draw(st.sampled_from(["red", "blue", None]))
    kind = draw(st.sampled_from(["request", "request", "summary"]))
    optional = st.none() | _TOKENS
    usage = st.builds(Usage, optional, optional, optional, optional, estimated=st.booleans())
    return RequestRecord(
        draw(_IDS),
        NOON + draw(st.sampled_from([-DAY, 0.0, 0.25])),
        kind,
        parent=draw(_IDS) if kind == "summary" else None,
        tenant="key" if team is None else f"team:{team}",
        team=team,
        policy=draw(st.sampled_from(["default", None])),
        model=draw(st.sampled_from(["gpt-5", "o3", None])),
        upstream=draw(st.sampled_from(["main", None])),
        verdict=draw(st.sampled_from(["none", "compacted", "shadow", "refused"])),
        before=draw(optional),
        sent=draw(optional),
        forecast=draw(optional),
        fits=draw(st.booleans()),
        usage=draw(st.none() | usage),
        cost=draw(st.none() | st.builds(Cost, _PRICES, _PRICES, st.none() | _PRICES, st.booleans())),
        status=draw(st.sampled_from([200, 302, 400, 500])),
    )


@st.composite
def varied_batches(draw: st.DrawFn) -> list[list[RequestRecord]]:
    """Return records in batches. Later batches repeat some of the records, and a batch may have one twice."""
    records = draw(st.lists(varied_record(), min_size=1, max_size=40, unique_by=lambda record: record.id))
    starts = sorted(draw(st.sets(st.integers(1, len(records)), max_size=4)))
    batches = [records[start:end] for start, end in zip([0, *starts], [*starts, len(records)], strict=True)]
    seen: list[RequestRecord] = []
    for batch in batches:
        seen += batch
        if seen:
            batch += draw(st.lists(st.sampled_from(seen), max_size=3))
    return batches


_OF_REQUESTS: Mapping[str, Callable[[RequestRecord, Usage, Cost], int | None]] = {
    "requests": lambda record, usage, cost: 1,
    "errors": lambda record, usage, cost: record.status >= 400,
    "compacted": lambda record, usage, cost: record.verdict == "compacted",
    "avoided": lambda record, usage, cost: record.verdict == "compacted" and not record.fits and record.status < 400,
    "shadow": lambda record, usage, cost: record.verdict == "shadow",
    "would_compact": lambda record, usage, cost: record.forecast is not None,
    "would_avoid": lambda record, usage, cost: record.forecast is not None and not record.fits,
    "unpriced": lambda record, usage, cost: record.usage is not None and record.cost is None,
    "estimated": lambda record, usage, cost: usage.estimated or cost.estimated,
    "received": lambda record, usage, cost: record.before,
    "sent": lambda record, usage, cost: record.before if record.sent is None else record.sent,
    "forecast": lambda record, usage, cost: next(
        (size for size in (record.forecast, record.sent, record.before) if size is not None), 0
    ),
    "input": lambda record, usage, cost: usage.input,
    "output": lambda record, usage, cost: usage.output,
    "cache_read": lambda record, usage, cost: usage.cache_read,
    "cache_write": lambda record, usage, cost: usage.cache_write,
    "cost": lambda record, usage, cost: cost.sent,
    "as_received": lambda record, usage, cost: cost.as_received,
    "forecast_cost": lambda record, usage, cost: cost.sent if cost.forecast is None else cost.forecast,
}
_OF_SUMMARIES: Mapping[str, Callable[[RequestRecord, Usage, Cost], int | None]] = {
    "summaries": lambda record, usage, cost: 1,
    "unpriced": lambda record, usage, cost: record.usage is not None and record.cost is None,
    "summary_input": lambda record, usage, cost: usage.input,
    "summary_output": lambda record, usage, cost: usage.output,
    "summary_cost": lambda record, usage, cost: cost.sent,
}
_COUNTED = ("received", "sent", "forecast")
"""Sums of those requests that the proxy counted."""


def expected_ledger(records: Sequence[RequestRecord]) -> dict[tuple[Any, ...], Counter[str]]:
    """Return the sums of records by day, tenant, policy, model, and upstream, one sum at a time."""
    rows: defaultdict[tuple[Any, ...], Counter[str]] = defaultdict(Counter)
    for record in records:
        row = rows[record.time // DAY, record.tenant, record.policy, record.model, record.upstream]
        for name, amount in (_OF_SUMMARIES if record.kind == "summary" else _OF_REQUESTS).items():
            if name not in _COUNTED or record.before is not None:
                row[name] += amount(record, record.usage or Usage(), record.cost or Cost()) or 0
    return {labels: +row for labels, row in rows.items()}


def found_ledger(rows: Sequence[tuple[LedgerLabels, LedgerSums]]) -> dict[tuple[Any, ...], Counter[str]]:
    """Return the rows of a ledger in the form of ``expected_ledger``."""
    return {
        (row.day, row.tenant, row.policy, row.model, row.upstream): +Counter(
            {name: getattr(sums, name) for name in SUMS}
        )
        for row, sums in rows
    }


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
