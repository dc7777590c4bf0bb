"""Stores for tests: run a test with one, look into its files, and write files of version 0.1."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from proxy.store import ManagedStore

S = TypeVar("S", bound=ManagedStore)


class Clock:
    """A clock that tests set."""

    def __init__(self, now: float | None = None) -> None:
        self.now = time.time() if now is None else now

    def __call__(self) -> float:
        return self.now


def with_store(make: Callable[[], S], *tests: Callable[[S], Awaitable[None]]) -> None:
    """Run tests one after the other, each with a store of its own."""

    async def whole(test: Callable[[S], Awaitable[None]]) -> None:
        store = make()
        try:
            await test(store)
        finally:
            await store.aclose()

    for test in tests:
        asyncio.run(whole(test))


@contextlib.contextmanager
def opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Connect to a store's file without the store."""
    with contextlib.closing(sqlite3.connect(path, check_same_thread=False)) as db, db:
        yield db


@contextlib.contextmanager
def being_read(path: Path) -> Iterator[None]:
    """Keep a read transaction open, as another process might."""
    with opened(path) as db:
        db.execute("BEGIN")
        db.execute("SELECT * FROM entries").fetchone()
        yield


def write_version_0_1(path: Path, entries: Iterable[tuple[str, bytes]], then: Sequence[str] = ()) -> None:
    """Write a file of version 0.1 with summaries of tenant "t", and run further statements."""
    with opened(path) as db:
        db.executescript(
            """CREATE TABLE entries (tenant TEXT NOT NULL, kind TEXT NOT NULL, key TEXT NOT NULL, value BLOB NOT NULL,
            expires REAL NOT NULL, PRIMARY KEY (tenant, kind, key)) WITHOUT ROWID;
            CREATE INDEX entries_expire ON entries (expires);"""
        )
        rows: list[Any] = [("t", "summary", key, value, time.time() + 60) for key, value in entries]
        db.executemany("INSERT INTO entries VALUES (?, ?, ?, ?, ?)", rows)
        for statement in then:
            db.execute(statement)


def files_with(folder: Path, *texts: bytes) -> list[str]:
    """Return the files that contain one of these texts."""
    return [file.name for file in folder.iterdir() if any(text in file.read_bytes() for text in texts)]
