"""A thread with its own SQLite connection, so that a slow disk doesn't block the event loop."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from proxy.store import file
from proxy.store.interface import Refused, StoreFailed

T = TypeVar("T")

IN_MEMORY = 256_000_000
"""Largest file, in bytes, that a rebuild copies in memory. Larger files use a temporary file."""

BUSY_SECONDS = 2.0
"""Seconds to wait for another process's write."""

PAGE = 4096
"""Page size of new files, in bytes."""

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

# Interpolates only constants of this module.
_FROM_0_1 = f"""
BEGIN IMMEDIATE;
ALTER TABLE entries RENAME TO entries_0_1;
DROP INDEX entries_expire;
{_SCHEMA}
INSERT INTO entries SELECT tenant, kind, key, expires, '', zeroblob({PAD}), value FROM entries_0_1;
DROP TABLE entries_0_1;
COMMIT;
"""  # noqa: S608

_REFUSED = (sqlite3.DataError, sqlite3.IntegrityError, sqlite3.InterfaceError, sqlite3.ProgrammingError)
_UNSTORABLE = (OverflowError, UnicodeError)
"""Errors of the ``sqlite3`` module for an integer of more than 64 bits, and for text that has no UTF-8 form."""

_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


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
        """Close the connection once the work is done."""
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
        if self._path is None or file.identity(self._path) == self._file:
            return False
        self._close()
        return True

    def _set_aside(self, error: sqlite3.DatabaseError) -> bool:
        """Move the file away if the error shows damage. Return whether it did. Raises ``OSError``."""
        if not self.mends or self._path is None or _code(error) not in _DAMAGED:
            return False
        self._close()
        file.set_aside(self._path, self._file, str(error))
        return True

    def _open(self) -> sqlite3.Connection:
        if self._connection is None or self._was_moved():  # writes to a moved file would be lost
            if self._path is not None:
                file.prepare(self._path)
                self._file = file.identity(self._path)
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
    if columns and "pad" not in columns:
        _convert(connection)
    connection.executescript(_SCHEMA)


def _convert(connection: sqlite3.Connection) -> None:
    """Convert a file from version 0.1, unless another process is already doing it."""
    try:
        connection.executescript(_FROM_0_1)
    except sqlite3.OperationalError:
        if connection.in_transaction:
            connection.rollback()
        if "pad" not in [row[1] for row in connection.execute("PRAGMA table_info(entries)")]:
            raise
    else:
        rebuild(connection)


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
    """Return SQLite's primary result code."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF
