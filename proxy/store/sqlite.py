"""A store in one SQLite file. Several worker processes on one machine can share it."""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import structlog

from proxy.store.interface import PER_PAGE, Entry, ManagedStore, StoreFailed
from proxy.store.sqlite_worker import BUSY_SECONDS, PAD, PAGE, SqliteWorker, rebuild
from proxy.telemetry.metrics import STORE_REMOVED

log = structlog.get_logger(__name__)

BATCH = 200
"""Entries per removal. Other processes can write between removals."""

SMALL = 1_000
"""Bytes. To shrink the file, the store removes smaller entries only if there are no larger ones."""

SHRINK_TO = 0.9
"""Share of the size limit to shrink to when the file exceeds it."""

PAGES = 1_000
"""Empty pages that one step returns to the file system."""

KEYS = 500
"""Keys per query."""

ROWS = 100
"""Rows per statement that writes several. Each statement waits for the interpreter lock."""

_ROW = "tenant = ? AND kind = ? AND key = ?"
_COLUMNS = "tenant, kind, key, value, expires"
_LIVE = "expires > ? AND typeof(value) = 'blob'"  # the store writes only BLOBs
_SEVERAL = f"tenant = ? AND kind = ? AND {_LIVE}"
_VALUES = f"(?, ?, ?, ?, ?, zeroblob({PAD}), ?)"
_PUT = f"INSERT OR REPLACE INTO entries VALUES {_VALUES}"  # noqa: S608 - only constants
_DELETE = f"DELETE FROM entries WHERE {_ROW}"  # noqa: S608
_SAME = f"{_ROW} AND {_LIVE} AND value = ?"
_REPLACE = f"UPDATE entries SET expires = ?, codec = ?, value = ? WHERE {_SAME}"  # noqa: S608
_REMOVE = f"DELETE FROM entries WHERE {_SAME}"  # noqa: S608

RowKey = tuple[str, str, str]
Row = tuple[str, str, str, float, str, bytes]


class SqliteStore(ManagedStore):
    """Run reads and writes in separate threads, so reads don't wait for writes. See ``ManagedStore``."""

    def __init__(
        self,
        path: Path | None,
        max_bytes: int | None = None,
        *,
        batch: int = BATCH,
        busy_seconds: float = BUSY_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Use the file at ``path``, or memory if it is ``None``.

        The store creates a missing file and its folder, readable only by their owner. ``maintain`` shrinks the file to
        ``max_bytes``. ``clock`` returns seconds since 1970.
        """
        self._path = path
        self._max_bytes = max_bytes
        self._batch = batch
        self._clock = clock
        self._writer = SqliteWorker(path, "store-write", busy_seconds)
        self._reader = SqliteWorker(path, "store-read", busy_seconds) if path is not None else self._writer
        self._removed = True
        """True if the write-ahead log may still contain bytes of removed entries."""

    async def get_many(self, tenant: str, kind: str, keys: Sequence[str]) -> dict[str, bytes]:
        return await self._reader.run(lambda db: self._get_many(db, tenant, kind, keys))

    async def put_many(self, entries: Sequence[Entry], codec: str = "") -> None:
        now = self._clock()
        rows = [(entry.tenant, entry.kind, entry.key, now + entry.seconds, codec, entry.value) for entry in entries]
        rows.sort(key=lambda row: row[:3])  # in the order of the table, because that takes half of the time
        await self._writer.run(lambda db: _put(db, rows))

    async def add(self, tenant: str, kind: str, key: str, value: bytes, seconds: float, codec: str = "") -> bytes:
        row = (tenant, kind, key, self._clock() + seconds, codec, value)
        return await self._writer.run(lambda db: self._add(db, row))

    async def replace(
        self, tenant: str, kind: str, key: str, old: bytes, new: bytes, seconds: float, codec: str = ""
    ) -> bool:
        now = self._clock()
        same, row = (tenant, kind, key, now, old), (now + seconds, codec, new)
        return await self._writer.run(lambda db: self._replace(db, same, row if seconds > 0 else None))

    async def entries(self, kind: str) -> list[Entry]:
        return await self._select(f"kind = ? AND {_LIVE} ORDER BY tenant, key", kind, self._clock())

    async def pages(self, codec: str = "") -> AsyncIterator[list[Entry]]:
        after = ("", "", "")
        # The sign keeps SQLite from using the index of codecs, and then sorting all entries for each page.
        condition = f"+codec = ? AND +{_LIVE} AND (tenant, kind, key) > (?, ?, ?) ORDER BY tenant, kind, key LIMIT ?"
        while found := await self._select(condition, codec, self._clock(), *after, PER_PAGE):
            yield found
            after = (found[-1].tenant, found[-1].kind, found[-1].key)

    async def remove(self, tenant: str) -> Counter[str]:
        return await self._remove("tenant", tenant)

    async def remove_codec(self, codec: str) -> int:
        return (await self._remove("codec", codec)).total()

    async def counts(self) -> Counter[str]:
        if await self._absent():
            return Counter()
        query = "SELECT codec, count(*) FROM entries GROUP BY codec"
        return Counter(dict(await self._reader.run(lambda db: db.execute(query).fetchall())))

    async def erase(self) -> None:
        """Overwrite the values of removed entries. Raises ``StoreFailed`` while the file is being read."""
        if not await self._emptied():
            raise StoreFailed("the log can't be emptied: the file is being read without a pause")

    async def rebuild(self) -> None:
        """Rewrite the whole file, which overwrites the names of removed entries. This is slow for a large file."""
        await self._writer.run(rebuild)

    async def maintain(self) -> None:
        """Remove expired entries, and shrink the file.

        After the first call the store moves a damaged file away. Processes that only read leave it in place.
        """
        self._writer.mends = self._reader.mends = True
        if await self._absent():
            return
        for step in (self._expire, self._shrink):
            while await self._writer.run(step):
                pass
        if self._removed:
            self._removed = not await self._emptied()

    async def aclose(self) -> None:
        await self._writer.aclose()
        if self._reader is not self._writer:
            await self._reader.aclose()

    async def _absent(self) -> bool:
        """Return whether there is no file yet. Raises ``StoreFailed`` if its folder can't be read."""
        return self._path is not None and not await self._reader.run_without_database(self._path.exists)

    async def _select(self, condition: str, *values: object) -> list[Entry]:
        if await self._absent():
            return []
        query, now = f"SELECT {_COLUMNS} FROM entries WHERE {condition}", self._clock()  # noqa: S608 - no values in it
        rows = await self._reader.run(lambda db: db.execute(query, values).fetchall())
        return [Entry(tenant, kind, key, value, expires - now) for tenant, kind, key, value, expires in rows]

    async def _remove(self, column: str, value: str) -> Counter[str]:
        query = f"SELECT tenant, kind, key FROM entries WHERE {column} = ? LIMIT ?"  # noqa: S608 - the column's name

        def remove(db: sqlite3.Connection) -> Counter[str]:
            rows = db.execute(query, (value, self._batch)).fetchall()
            self._delete(db, rows)
            return Counter(kind for _, kind, _ in rows)

        return Counter() if await self._absent() else await self._writer.run(remove)

    async def _emptied(self) -> bool:
        """Clear removed bytes from the file and its log. Return whether that succeeded."""
        while await self._writer.run(_return_pages):
            pass
        return await self._writer.run(_truncate_log)

    def _get_many(self, db: sqlite3.Connection, tenant: str, kind: str, keys: Sequence[str]) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for start in range(0, len(keys), KEYS):
            some = keys[start : start + KEYS]
            query = f"SELECT key, value FROM entries WHERE {_SEVERAL} AND key IN ({', '.join('?' * len(some))})"  # noqa: S608
            found.update(db.execute(query, (tenant, kind, self._clock(), *some)).fetchall())
        return found

    def _add(self, db: sqlite3.Connection, row: Row) -> bytes:
        with db:
            db.execute("BEGIN IMMEDIATE")  # no other process writes between the read and the write
            tenant, kind, key, *_ = row
            found = self._get_many(db, tenant, kind, [key])
            if not found:
                db.execute(_PUT, row)
        return found.get(key, row[-1])

    def _replace(self, db: sqlite3.Connection, same: tuple[object, ...], new: tuple[object, ...] | None) -> bool:
        with db:
            if new is not None:
                return db.execute(_REPLACE, (*new, *same)).rowcount == 1
            removed = db.execute(_REMOVE, same).rowcount == 1
        self._removed |= removed
        return removed

    def _delete(self, db: sqlite3.Connection, keys: Sequence[RowKey]) -> None:
        with db:
            db.executemany(_DELETE, keys)
        self._removed |= bool(keys)

    def _drop(self, db: sqlite3.Connection, keys: Sequence[RowKey], reason: str) -> bool:
        """Delete entries, and count them by reason. Return whether there were any."""
        self._delete(db, keys)
        STORE_REMOVED.labels(reason=reason).inc(len(keys))
        return bool(keys)

    def _expire(self, db: sqlite3.Connection) -> bool:
        """Remove some expired entries. Return whether there may be more."""
        query = "SELECT tenant, kind, key FROM entries WHERE expires <= ? LIMIT ?"
        return self._drop(db, db.execute(query, (self._clock(), self._batch)).fetchall(), "expired")

    def _shrink(self, db: sqlite3.Connection) -> bool:
        """Remove some entries that expire first if the file is too large. Return whether there may be more."""
        if self._max_bytes is None:
            return False
        used = (_pragma(db, "page_count") - _pragma(db, "freelist_count")) * _pragma(db, "page_size")
        if used <= self._max_bytes:
            return False
        excess = used - int(self._max_bytes * SHRINK_TO)
        query = "SELECT tenant, kind, key, length(value) FROM entries WHERE length(value) >= ? ORDER BY expires LIMIT ?"
        rows = db.execute(query, (SMALL, self._batch)).fetchall() or db.execute(query, (0, self._batch)).fetchall()
        chosen: list[RowKey] = []
        for tenant, kind, key, size in rows:
            if excess <= 0:
                break
            chosen.append((tenant, kind, key))
            excess -= (size // PAGE + 2) * PAGE
        return self._drop(db, chosen, "size")


def _put(db: sqlite3.Connection, rows: Sequence[Row]) -> None:
    """Write rows in one transaction."""
    with db:
        for start in range(0, len(rows), ROWS):
            some = rows[start : start + ROWS]
            several = ", ".join([_VALUES] * (len(some) - 1))
            db.execute(f"{_PUT}, {several}" if several else _PUT, [value for row in some for value in row])


def _pragma(db: sqlite3.Connection, name: str) -> int:
    return int(db.execute(f"PRAGMA {name}").fetchone()[0])


def _return_pages(db: sqlite3.Connection) -> bool:
    """Return some empty pages to the file system. Return whether there may be more.

    Files from earlier versions keep their empty pages and reuse them.
    """
    free = _pragma(db, "freelist_count")
    if free:
        db.execute(f"PRAGMA incremental_vacuum({PAGES})").fetchall()
    return _pragma(db, "freelist_count") < free


def _truncate_log(db: sqlite3.Connection) -> bool:
    """Truncate the log, which removes deleted bytes from it. Return whether that succeeded."""
    busy, *_ = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    return not busy
