"""A store in one SQLite file, for one machine; several worker processes may share it."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from proxy.store.interface import Entry, StoreFailed

T = TypeVar("T")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    tenant TEXT NOT NULL, kind TEXT NOT NULL, key TEXT NOT NULL,
    value BLOB NOT NULL, expires REAL NOT NULL,
    PRIMARY KEY (tenant, kind, key)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS entries_expire ON entries (expires);
"""

BUSY_SECONDS = 2.0
"""How long to wait for another process's write."""

SWEEP_EVERY = 200
"""Expired entries are removed once in so many writes."""


class SqliteStore:
    """All work is done in one thread of its own, so a slow disk never holds up the event loop."""

    def __init__(self, path: Path | None) -> None:
        """``path`` is the file, made with its folder where missing, readable by its owner only; ``None``: in memory."""
        self._path = path
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        self._connection: sqlite3.Connection | None = None
        self._writes = 0

    async def get(self, tenant: str, kind: str, key: str) -> bytes | None:
        """See ``Store``."""
        row = await self._run(
            lambda db: db.execute(
                "SELECT value FROM entries WHERE tenant = ? AND kind = ? AND key = ? AND expires > ?",
                (tenant, kind, key, time.time()),
            ).fetchone()
        )
        return bytes(row[0]) if row else None

    async def put(self, tenant: str, kind: str, key: str, value: bytes, seconds: float) -> None:
        """See ``Store``."""
        await self._run(lambda db: self._write(db, (tenant, kind, key, value, time.time() + seconds)))

    async def entries(self, kind: str) -> list[Entry]:
        """See ``ListingStore``. Where there is no file yet none is made."""
        if self._path is not None and self._connection is None and not self._path.exists():
            return []
        rows = await self._run(
            lambda db: db.execute(
                "SELECT tenant, key, value FROM entries WHERE kind = ? AND expires > ? ORDER BY tenant, key",
                (kind, time.time()),
            ).fetchall()
        )
        return [Entry(tenant, key, bytes(value)) for tenant, key, value in rows]

    async def aclose(self) -> None:
        """See ``Store``."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._close)
        self._thread.shutdown(wait=False)

    def _write(self, db: sqlite3.Connection, row: tuple[str, str, str, bytes, float]) -> None:
        with db:
            db.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?)", row)
            if self._writes % SWEEP_EVERY == 0:
                db.execute("DELETE FROM entries WHERE expires <= ?", (time.time(),))
        self._writes += 1

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, lambda: work(self._open()))
        except (sqlite3.Error, OSError) as error:
            raise StoreFailed(f"{type(error).__name__}: {error}") from error

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))
            connection = sqlite3.connect(self._path or ":memory:", timeout=BUSY_SECONDS)
            try:
                _write_ahead(connection)
                connection.execute("PRAGMA synchronous = NORMAL")
                connection.executescript(_SCHEMA)
            except sqlite3.Error:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Keep a write-ahead log. Two processes that open a new file at once: SQLite refuses one without waiting."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return
