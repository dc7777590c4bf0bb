"""Records and the ledger in one SQLite file, which the worker processes on one machine share."""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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
    amounts_of,
    bounded,
    row_order,
    summed,
)
from proxy.store.sqlite import BUSY_SECONDS, SqliteWorker
from proxy.telemetry.record import RequestRecord, first_id

SCANNED = 500  # records per read if their values decide which ones are wanted
BATCH = 1_000  # Records that one step of maintenance removes. Other processes can write between steps.
_AMOUNT = "INTEGER NOT NULL DEFAULT 0"  # The type of sums. Older versions of the proxy add rows without newer columns.

_SUMS = ", ".join(f"{name} {_AMOUNT}" for name in SUMS)

SCHEMA = f"""
CREATE TABLE IF NOT EXISTS records (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, team TEXT, policy TEXT, model TEXT, verdict TEXT NOT NULL,
    kind TEXT NOT NULL, parent TEXT, expires REAL NOT NULL, codec TEXT NOT NULL, value BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS records_tenant ON records (tenant, id);
CREATE INDEX IF NOT EXISTS records_parent ON records (parent) WHERE parent IS NOT NULL;
CREATE TABLE IF NOT EXISTS ledger (
    key TEXT PRIMARY KEY, day INTEGER NOT NULL, tenant TEXT NOT NULL, codec TEXT NOT NULL, labels BLOB NOT NULL, {_SUMS}
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS ledger_day ON ledger (day);
CREATE INDEX IF NOT EXISTS ledger_tenant ON ledger (tenant, day);
"""

ROWS = 100
"""Records per statement. Fewer statements take less CPU and pass the interpreter lock between threads less often.

Old versions of SQLite don't accept the parameters of more records.
"""

_RECORD = "(?1, ?2, ?, ?, ?, ?, ?, ?, ?, nullif(?, ''), ?)"
"""A row of records. All rows of a statement share the expiration time and the codec."""

# Interpolates only constants of this module.
_ROW = (
    f"INTO ledger (key, day, tenant, codec, labels, {', '.join(SUMS)}) "
    f"VALUES (?, ?, ?, ?, ?, {', '.join('?' * len(SUMS))})"
)
_SET = f"INSERT OR REPLACE {_ROW}"
_NEW = f"INSERT {_ROW}"
_ADDED = ", ".join(f"{name} = min({name} + ?{place}, {LARGEST_SUM})" for place, name in enumerate(SUMS, 6))
_ADD = f"UPDATE ledger SET labels = ?5, {_ADDED} WHERE key = ?1"  # noqa: S608
_COLUMNS_PUT = "expires, codec, id, tenant, team, policy, model, verdict, kind, parent, value"
_PUT = f"INSERT INTO records ({_COLUMNS_PUT}) VALUES "  # noqa: S608
_LEDGER = f"SELECT key, codec, tenant, labels, {', '.join(SUMS)} FROM ledger WHERE day BETWEEN ? AND ?"  # noqa: S608
_COLUMNS = "id, codec, tenant, value"


class SqliteRecords(RecordStore):
    """See ``RecordStore``. With keys, values and names are encrypted as by ``RecordCodec``."""

    def __init__(
        self,
        path: Path | None,
        keys: Sequence[bytes] = (),
        *,
        busy_seconds: float = BUSY_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Use the file at ``path``, or memory if it is ``None``. ``clock`` returns seconds since 1970."""
        self._clock = clock
        self._path = path
        self._codec = RecordCodec(keys)
        self._writer = SqliteWorker(path, "records-write", busy_seconds, tables=_prepare)
        self._reader = SqliteWorker(path, "records-read", busy_seconds, tables=_prepare) if path else self._writer

    async def write(self, records: Sequence[RequestRecord], seconds: float, *, ledger: bool = True) -> None:
        expires = self._clock() + seconds

        def write(db: sqlite3.Connection) -> None:
            try:
                self._write(db, records, expires, ledger=ledger)
            except sqlite3.IntegrityError:
                self._write(db, records, expires, ledger=ledger, repeated=True)

        await self._writer.run(write)

    async def copy_rows(self, rows: Sequence[tuple[LedgerLabels, LedgerSums]], source: str) -> None:
        def copy(db: sqlite3.Connection) -> None:
            with db:
                db.executemany(_SET, [self._ledger_row(labels, sums, source) for labels, sums in rows])

        await self._writer.run(copy)

    async def get(self, id: str, tenants: tuple[str, ...] | None = None) -> RequestRecord | None:
        conditions, values = ["id = ?", "expires > ?"], [id, self._clock()]
        if tenants is not None:
            self._among_tenants(tenants, conditions, values)
        query = f"SELECT {_COLUMNS} FROM records WHERE {' AND '.join(conditions)}"  # noqa: S608 - no values in it
        row = await self._reader.run(lambda db: db.execute(query, values).fetchone())
        return None if row is None else self._opened(*row)

    async def select(self, query: RecordQuery) -> list[RequestRecord]:
        conditions: list[str] = ["expires > ?"]
        values: list[Any] = [self._clock()]
        _among("codec", self._codec.ids, conditions, values)  # others can't be read, and don't count
        for name in ("team", "policy", "model"):
            if (wanted := getattr(query, name)) is not None:
                _among(name, self._codec.names(name, wanted), conditions, values)
        if query.tenants is not None:
            self._among_tenants(query.tenants, conditions, values)
        for condition, value in (
            ("verdict = ?", query.verdict),
            ("kind = ?", query.kind),
            ("parent = ?", query.parent),
            ("id >= ?", None if query.since is None else first_id(query.since)),
            ("id < ?", None if query.until is None else first_id(query.until)),
            ("id < ?", query.before),
        ):
            if value is not None:
                conditions.append(condition)
                values.append(value)
        where = " AND ".join(conditions)
        sql = f"SELECT {_COLUMNS} FROM records WHERE {where} ORDER BY id DESC LIMIT ?"  # noqa: S608 - no values in it
        following = sql.replace(" ORDER BY", " AND id < ? ORDER BY")

        def read(db: sqlite3.Connection) -> list[RequestRecord]:
            # Decoding a page takes too long for the event loop.
            found: list[RequestRecord] = []
            least = SCANNED if query.reads_values else 0
            rows = db.execute(sql, (*values, max(least, query.limit))).fetchall()
            while rows:
                opened = (self._opened(*row) for row in rows)
                found += [record for record in opened if record is not None and query.selects(record)]
                wanted = query.limit - len(found)  # unreadable rows don't count
                more = (*values, rows[-1][0], max(least, wanted))
                rows = db.execute(following, more).fetchall() if wanted > 0 else []
            return found[: query.limit]

        return await self._reader.run(read)

    async def ledger(
        self, since: int, until: int, tenants: tuple[str, ...] | None = None
    ) -> list[tuple[LedgerLabels, LedgerSums]]:
        conditions: list[str] = []
        values: list[Any] = [since, until]
        if tenants is not None:
            self._among_tenants(tenants, conditions, values)
        sql = " AND ".join([_LEDGER, *conditions])

        def read(db: sqlite3.Connection) -> list[tuple[LedgerLabels, LedgerSums]]:
            found: dict[LedgerLabels, LedgerSums] = {}
            for key, codec, tenant, labels, *sums in db.execute(sql, values):
                row = self._codec.open_row(key, Sealed(codec, tenant, labels))
                if row is not None:  # rows under an older key are added to those under the newest
                    amounts = self._codec.sums(key, dict(zip(SUMS, sums, strict=True)))
                    found.setdefault(row, LedgerSums()).add(amounts)
            return sorted(found.items(), key=row_order)

        return await self._reader.run(read)

    async def remove(self, tenant: str) -> Counter[str]:
        conditions: list[str] = []
        values: list[Any] = []
        self._among_tenants([tenant], conditions, values)

        def remove(db: sqlite3.Connection) -> Counter[str]:
            removed: Counter[str] = Counter()
            with db:
                for kind, table in (("record", "records"), ("ledger row", "ledger")):
                    sql = f"DELETE FROM {table} WHERE {conditions[0]}"  # noqa: S608 - constants
                    removed[kind] += db.execute(sql, values).rowcount
            return +removed

        removed = await self._writer.run(remove)
        if removed:
            await self._writer.run(_truncate_log)
        return removed

    async def maintain(self, most: int) -> None:
        self._writer.mends = self._reader.mends = True
        if self._path is not None and not await self._reader.run_without_database(self._path.exists):
            return
        now = self._clock()
        expired, oldest, over = "WHERE expires <= ?", "ORDER BY id", "max(0, (SELECT count(*) FROM records) - ?)"
        for table, key, which, limit, value in (
            ("records", "id", expired, BATCH, now),
            ("records", "id", oldest, f"min({BATCH}, {over})", most),
            ("ledger", "key", "WHERE day < ?", BATCH, now // DAY - LEDGER_DAYS),
        ):
            sql = f"DELETE FROM {table} WHERE {key} IN (SELECT {key} FROM {table} {which} LIMIT {limit})"  # noqa: S608
            while await self._writer.run(lambda db, sql=sql, value=value: _delete(db, sql, value)):  # type: ignore[misc]
                pass

    async def aclose(self) -> None:
        await self._writer.aclose()
        if self._reader is not self._writer:
            await self._reader.aclose()

    def _write(
        self,
        db: sqlite3.Connection,
        records: Sequence[RequestRecord],
        expires: float,
        *,
        ledger: bool,
        repeated: bool = False,
    ) -> None:
        """Store records in one transaction. ``repeated``: some may be stored already."""
        with db:
            db.execute("BEGIN IMMEDIATE")
            new = _not_stored(db, records) if repeated else records
            for start in range(0, len(new), ROWS):
                some = new[start : start + ROWS]
                values: list[object] = [expires, self._codec.ids[0]]
                for record in some:
                    names = self._codec.columns(record.tenant, record.team, record.policy, record.model)
                    value = self._codec.record(record).value
                    # For `bytes` and `None`, the module looks for an adapter, which takes longer than a copy.
                    values += record.id, *names, record.verdict, record.kind, record.parent or "", bytearray(value)
                db.execute(_PUT + ", ".join([_RECORD] * len(some)), values)
            for labels, sums in summed(new).items() if ledger else ():
                self._add(db, labels, sums)

    def _ledger_row(self, labels: LedgerLabels, sums: LedgerSums, source: str = "") -> tuple[object, ...]:
        key, sealed = self._codec.row(labels, source)
        amounts = amounts_of(sums)
        if max(amounts) > LARGEST_SUM:
            amounts = tuple(min(amount, LARGEST_SUM) for amount in amounts)
        return key, labels.day, sealed.tenant, sealed.codec, bytearray(sealed.value), *amounts

    def _add(self, db: sqlite3.Connection, labels: LedgerLabels, sums: LedgerSums) -> None:
        """Add sums to their row, or to that of all others if its tenant or day has too many rows."""
        row = self._ledger_row(labels, sums)
        if db.execute(_ADD, row).rowcount:
            return
        ((own,),) = db.execute("SELECT count(*) FROM ledger WHERE tenant = ? AND day = ?", (row[2], labels.day))
        ((all_,),) = db.execute("SELECT count(*) FROM ledger WHERE day = ?", (labels.day,))
        row = self._ledger_row(bounded(labels, own, all_), sums)
        if not db.execute(_ADD, row).rowcount:
            db.execute(_NEW, row)

    def _among_tenants(self, tenants: Sequence[str], conditions: list[str], values: list[Any]) -> None:
        _among("tenant", [name for one in tenants for name in self._codec.names("tenant", one)], conditions, values)

    def _opened(self, id: str, *sealed: Any) -> RequestRecord | None:
        return self._codec.open_record(id, Sealed(*sealed))


def _prepare(db: sqlite3.Connection) -> None:
    """Create the tables, and add the columns that an older version of the proxy didn't have."""
    db.executescript(SCHEMA)
    if _missing(db):
        with db:
            db.execute("BEGIN IMMEDIATE")  # another process may be doing the same
            for column in _missing(db):
                db.execute(f"ALTER TABLE ledger ADD COLUMN {column} {_AMOUNT}")


def _missing(db: sqlite3.Connection) -> list[str]:
    columns = {row[1] for row in db.execute("PRAGMA table_info(ledger)")}
    return [name for name in SUMS if name not in columns]


def _not_stored(db: sqlite3.Connection, records: Sequence[RequestRecord]) -> list[RequestRecord]:
    marks = ", ".join("?" * len(records))
    stored = db.execute(f"SELECT id FROM records WHERE id IN ({marks})", [record.id for record in records])  # noqa: S608
    known = {id for (id,) in stored}
    return list({record.id: record for record in records if record.id not in known}.values())


def _among(column: str, names: Sequence[str], conditions: list[str], values: list[Any]) -> None:
    conditions.append(f"{column} IN ({', '.join('?' * len(names))})")
    values += names


def _delete(db: sqlite3.Connection, sql: str, value: float) -> int:
    with db:
        return db.execute(sql, (value,)).rowcount


def _truncate_log(db: sqlite3.Connection) -> None:
    """Overwrite the bytes of removed rows in the write-ahead log, unless other processes are reading it."""
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
