"""Stores for tests: run a test with one, look into its files, and write files of another format."""

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from proxy.store import ManagedStore
from proxy.store.redis_store import RedisStore
from proxy.store.sealing import SealedStore
from proxy.store.sqlite import SqliteStore

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


def write_old_file(path: Path) -> None:
    """Write a file as versions before 0.1.0 did."""
    with opened(path) as db:
        db.executescript(
            """CREATE TABLE entries (tenant TEXT NOT NULL, kind TEXT NOT NULL, key TEXT NOT NULL, value BLOB NOT NULL,
            expires REAL NOT NULL, PRIMARY KEY (tenant, kind, key)) WITHOUT ROWID;
            CREATE INDEX entries_expire ON entries (expires);"""
        )
        db.execute("INSERT INTO entries VALUES ('t', 'summary', 'k', 'old', ?)", [time.time() + 60])


def files_with(folder: Path, *texts: bytes) -> list[str]:
    """Return the files that contain one of these texts."""
    return [file.name for file in folder.iterdir() if any(text in file.read_bytes() for text in texts)]


@dataclass(frozen=True)
class Place:
    """A file or server that the stores of a test share.

    ``backend`` opens it without encryption. ``raw`` returns all names and contents in it. The stores use ``clock``. The
    server has a clock of its own, so there ``second`` is the real length of a second in tests.
    """

    backend: Callable[[], SqliteStore | RedisStore]
    raw: Callable[[], bytes]
    clock: Clock
    second: float = 0.0

    def open(self, keys: Sequence[bytes] = ()) -> ManagedStore:
        """Open a store as another process does."""
        return SealedStore(self.backend(), keys) if keys else self.backend()

    def seconds(self, number: float) -> float:
        """Return a lifetime of this number of seconds."""
        return number * (self.second or 1.0)

    async def pass_time(self, number: float) -> None:
        """Let this number of seconds pass."""
        if self.second:
            await asyncio.sleep(number * self.second)
        else:
            self.clock.now += number


PLACES = ("sqlite", "redis")


@contextlib.contextmanager
def place(kind: str, folder: Path, request: pytest.FixtureRequest) -> Iterator[Place]:
    """Return an empty place of a kind. Skip the test if a program is missing."""
    clock = Clock()
    if kind == "sqlite":
        path = folder / "place" / "store.db"
        yield Place(lambda: SqliteStore(path, clock=clock), lambda: contents(folder / "place"), clock)
    else:
        redis = request.getfixturevalue("redis")
        yield Place(lambda: RedisStore(redis.url), redis.raw, clock, second=0.02)


def contents(folder: Path) -> bytes:
    """Return the names and the contents of all files and folders."""
    found = [(path.relative_to(folder), path) for path in sorted(folder.rglob("*"))]
    return b"\n".join(
        part for name, path in found for part in (bytes(name), path.read_bytes() if path.is_file() else b"")
    )
