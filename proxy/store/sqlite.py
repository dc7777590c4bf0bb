"""A store in one SQLite file, which several worker processes on one machine can share.

A worker thread with its own connection reads and writes, so that a slow disk doesn't block the event loop. The file has
private permissions. If it's damaged, the worker moves it away. The records have a file and workers of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import structlog

from proxy.store.interface import PER_PAGE, Entry, ManagedStore, Refused, StoreFailed
from proxy.telemetry.metrics import STORE_REMOVED

log = structlog.get_logger(__name__)

T = TypeVar("T")

IN_MEMORY = 256_000_000  # Largest file, in bytes, that a rebuild copies in memory. Larger files use a temporary file.
BUSY_SECONDS = 2.0  # seconds to wait for another process's write
PAGE = 4096  # page size of new files, in bytes

PAD = 1002
"""Padding bytes before each value, so that the value lies entirely on overflow pages.

SQLite keeps up to this many bytes of a row on a page shared with other rows. When it moves them to another page, it
doesn't overwrite the old bytes. Overflow pages don't move, and SQLite overwrites them when it removes the row.
"""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    tenant TEXT NOT NULL, kind TEXT NOT NULL, key TEXT NOT NULL,
    expires REAL NOT NULL, codec TEXT NOT NULL, pad BLOB NOT NULL, value BLOB NOT NULL,
    PRIMARY KEY (tenant, kind, key)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS entries_expire ON entries (expires);
CREATE INDEX IF NOT EXISTS entries_codec ON entries (codec, kind);
"""

_REFUSED = (sqlite3.DataError, sqlite3.IntegrityError, sqlite3.InterfaceError, sqlite3.ProgrammingError)
_UNSTORABLE = (OverflowError, UnicodeError)
"""Errors of the ``sqlite3`` module for an integer of more than 64 bits, and for text that has no UTF-8 form."""

_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_LASTING = (*_DAMAGED, sqlite3.SQLITE_PERM, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)

ASIDE = ".damaged-"  # infix between the name of a damaged file and the time at which the proxy moved it
_BESIDE = ("-wal", "-shm", "-journal")  # suffixes of SQLite's companion files


class SqliteWorker:
    """Run work sequentially on the database in a file, or on one in memory."""

    def __init__(
        self,
        path: Path | None,
        name: str,
        busy_seconds: float = BUSY_SECONDS,
        *,
        tables: Callable[[sqlite3.Connection], None] | None = None,
    ) -> None:
        """``tables`` creates the tables, if they are missing, or updates them. Default: those of the store."""
        self._path = path
        self._tables = tables
        self._busy_seconds = busy_seconds
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None
        self.mends = False
        """True to move a damaged file away and create a new one."""

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Return the result of ``work``. Cancellation doesn't stop work that has begun. Raises ``StoreFailed``."""
        return await self.run_without_database(lambda: self._do(work))

    async def run_without_database(self, work: Callable[[], T]) -> T:
        """Return the result of work that needs the thread but no database. Raises ``StoreFailed``."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, work)
        except (*_REFUSED, *_UNSTORABLE) as error:
            raise Refused(f"{type(error).__name__}: {error}") from error
        except (sqlite3.Error, OSError) as error:
            raise StoreFailed(f"{type(error).__name__}: {error}") from error

    async def aclose(self) -> None:
        loop = asyncio.get_running_loop()
        closing = loop.run_in_executor(self._thread, self._close)
        self._thread.shutdown(wait=False)
        await closing

    def _do(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            return work(self._open())
        except sqlite3.DatabaseError as error:
            if not self._was_moved() and not self._set_aside(error):
                raise
            return work(self._open())

    def _was_moved(self) -> bool:
        """Return whether another process moved or removed the file while this one used it. If so, close it."""
        if self._path is None or identity(self._path) == self._file:
            return False
        self._close()
        return True

    def _set_aside(self, error: sqlite3.DatabaseError) -> bool:
        """Move the file away if the error shows damage. Return whether it did. Raises ``OSError``."""
        if not self.mends or self._path is None or _code(error) not in _DAMAGED:
            return False
        self._close()
        set_aside(self._path, self._file, str(error))
        return True

    def _open(self) -> sqlite3.Connection:
        if self._connection is None or self._was_moved():  # writes to a moved file would be lost
            if self._path is not None:
                prepare(self._path)
                self._file = identity(self._path)
            connection = sqlite3.connect(self._path or ":memory:", timeout=self._busy_seconds)
            try:
                _set_up(connection, self._busy_seconds, self._tables)
            except sqlite3.Error:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _set_up(
    connection: sqlite3.Connection, busy_seconds: float, tables: Callable[[sqlite3.Connection], None] | None
) -> None:
    # Only for new files: setting auto_vacuum on an existing file waits for other writers.
    if connection.execute("PRAGMA page_count").fetchone() == (0,):
        connection.execute(f"PRAGMA page_size = {PAGE}")
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    _write_ahead(connection, busy_seconds)
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA secure_delete = ON")
    connection.execute("PRAGMA temp_store = MEMORY")
    if tables is not None:
        tables(connection)
        return
    columns = [row[1] for row in connection.execute("PRAGMA table_info(entries)")]
    if columns and "codec" not in columns:
        raise sqlite3.NotSupportedError("a version before 0.1.0 wrote this file. Fix: move it away")
    connection.executescript(_SCHEMA)


def rebuild(connection: sqlite3.Connection) -> None:
    """Rewrite the whole file, which also clears the names of removed entries from shared pages."""
    pages, size = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
    connection.execute(f"PRAGMA temp_store = {'MEMORY' if pages * size < IN_MEMORY else 'FILE'}")
    connection.execute("VACUUM")
    connection.execute("PRAGMA temp_store = MEMORY")


def _write_ahead(connection: sqlite3.Connection, busy_seconds: float) -> None:
    """Enable the write-ahead log. Retry, because SQLite rejects one of two processes that open a new file."""
    deadline = time.monotonic() + busy_seconds
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            # SQLite can't write to a file that another process has moved.
            if time.monotonic() > deadline or _code(error) == sqlite3.SQLITE_READONLY:
                raise
            time.sleep(0.01)
        else:
            return


def _code(error: sqlite3.DatabaseError) -> int:
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def is_lasting(error: BaseException | None) -> bool:
    """Return whether the file's permissions or damage caused an error, so that a retry can't help."""
    return isinstance(error, PermissionError) or (isinstance(error, sqlite3.DatabaseError) and _code(error) in _LASTING)


def tables_in(path: Path) -> set[str]:
    """Return the names of the tables in a file, none if it isn't a readable database. Don't change the file."""
    with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?immutable=1", uri=True)) as connection:
        try:
            return {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        except sqlite3.DatabaseError:
            return set()


def prepare(path: Path) -> None:
    """Create the file and its missing folders, accessible only to their owner. Raises ``OSError``."""
    for folder in reversed(path.parents):
        with contextlib.suppress(FileExistsError):
            if not folder.exists():
                folder.mkdir(mode=0o700)
    # Don't open an existing file: closing it would drop the locks of this process's other connections.
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))


def identity(path: Path) -> tuple[int, int] | None:
    """Return the device and inode of the current file, or ``None`` if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def set_aside(path: Path, seen: tuple[int, int] | None, reason: str) -> None:
    """Move a damaged file and SQLite's companion files away, unless another process has already done so.

    ``seen`` is the identity of the damaged file. Raises ``OSError``.
    """
    with _alone_in(path.parent):
        if seen is None or identity(path) != seen:
            return
        aside = path.with_name(f"{path.name}{ASIDE}{datetime.now(UTC):%Y%m%dT%H%M%S.%f}")
        # Move the companion files first: a new file must not pick up the old log.
        for suffix in (*_BESIDE, ""):
            with contextlib.suppress(FileNotFoundError):
                os.replace(f"{path}{suffix}", f"{aside}{suffix}")
    log.error("store.damaged", moved_to=str(aside), reason=reason)


def put_aside(path: Path) -> list[Path]:
    """Return the damaged files that the proxy moved away earlier."""
    return sorted(path.parent.glob(f"{path.name}{ASIDE}*")) if path.parent.is_dir() else []


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Lock a folder against other processes. Windows needs no lock, because it can't move open files."""
    if sys.platform == "win32":
        yield
        return
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


BATCH = 200  # Entries per removal. Other processes can write between removals.
SMALL = 1_000  # Bytes. To shrink the file, the store removes smaller entries only if there are no larger ones.
SHRINK_TO = 0.9  # share of the size limit to shrink to when the file exceeds it
PAGES = 1_000  # empty pages that one step returns to the file system
KEYS = 500  # keys per query
ROWS = 100  # Rows per statement that writes several. Each statement waits for the interpreter lock.

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
