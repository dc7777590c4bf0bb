"""A thread with its own SQLite connection, so that a slow disk doesn't block the event loop.

The file has private permissions. If it is damaged, the worker moves it away.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import structlog

from proxy.store.interface import Refused, StoreFailed

log = structlog.get_logger(__name__)

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

_REFUSED = (sqlite3.DataError, sqlite3.IntegrityError, sqlite3.InterfaceError, sqlite3.ProgrammingError)
_UNSTORABLE = (OverflowError, UnicodeError)
"""Errors of the ``sqlite3`` module for an integer of more than 64 bits, and for text that has no UTF-8 form."""

_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_LASTING = (*_DAMAGED, sqlite3.SQLITE_PERM, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)

ASIDE = ".damaged-"
"""Infix between the name of a damaged file and the time at which the proxy moved it."""

_BESIDE = ("-wal", "-shm", "-journal")
"""Suffixes of SQLite's companion files."""


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
    """Return SQLite's primary result code."""
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
