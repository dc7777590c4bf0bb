"""Test the size limit of the file, and that deleted data leaves no trace in it."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from proxy.limits.learned import Limits
from proxy.server.maintenance import Maintenance
from proxy.store import StoreFailed
from proxy.store.replicated_map import ReplicatedMap
from proxy.store.sqlite import SqliteStore
from proxy.store.sqlite_worker import rebuild

CANARY, GONE = b"CANARY-7f3a9b", b"GONE-1c8e02"


def with_store(path: Path | None, test: Callable[[SqliteStore], Awaitable[None]], max_bytes: int | None = None) -> None:
    async def whole() -> None:
        store = SqliteStore(path, max_bytes=max_bytes)
        try:
            await test(store)
        finally:
            await store.aclose()

    asyncio.run(whole())


def names(folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir()]


def size(folder: Path) -> int:
    """Bytes of the store's files, without the index of the log."""
    return sum(file.stat().st_size for file in folder.iterdir() if not file.name.endswith("-shm"))


def holding(folder: Path, *texts: bytes) -> list[str]:
    """Return the files that contain one of these texts."""
    return [file.name for file in folder.iterdir() if any(text in file.read_bytes() for text in texts)]


async def filled(stores: list[SqliteStore], tenants: Iterable[str], seconds: float, seed: int) -> None:
    """Put in entries of many sizes in an order that makes rows move, some of them twice."""
    chance, names = random.Random(seed), list(tenants)
    for _ in range(400):
        tenant = chance.choice(names)
        size = chance.choice([0, 30, 300, 1000, 3000, 20_000])
        text = CANARY if tenant == "team:leaving" else b"harmless"
        value = text + os.urandom(size) + text
        place = chance.choice(["summary", "archive"]), f"k{chance.randrange(200)}"
        await chance.choice(stores).put(tenant, *place, value, seconds if tenant == "team:leaving" else 60)


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_left_of_a_tenant_that_is_forgotten(tmp_path: Path, seed: int) -> None:
    async def test(store: SqliteStore) -> None:
        other = SqliteStore(tmp_path / "a.db")
        await filled([store, other], ["team:leaving", "team:a", "team:b"], 60, seed)
        assert holding(tmp_path, CANARY)
        count = {kind: len(await store.entries(kind)) for kind in ("summary", "archive")}
        removed = await store.forget("team:leaving")
        left = {kind: len(await other.entries(kind)) for kind in ("summary", "archive")}
        assert removed == {kind: count[kind] - left[kind] for kind in count}
        assert min(removed.values()) > 20
        assert {entry.tenant for kind in left for entry in await other.entries(kind)} == {"team:a", "team:b"}
        assert holding(tmp_path, CANARY, b"team:leaving") == []
        assert await store.forget("team:leaving") == {}
        await other.aclose()
        assert holding(tmp_path, CANARY, b"team:leaving") == []

    with_store(tmp_path / "a.db", test)
    assert holding(tmp_path, CANARY, b"team:leaving") == []


@pytest.mark.parametrize("seed", [2, 4, 5])
def test_not_even_a_name_is_left_between_the_rows_of_others(tmp_path: Path, seed: int) -> None:
    """Rows move between pages. With these seeds a name remains until SQLite rewrites the whole file."""

    async def test(store: SqliteStore) -> None:
        other, chance = SqliteStore(tmp_path / "a.db"), random.Random(seed)
        for _ in range(600):
            tenant = chance.choice(["team:leaving", "team:a", "team:b"])
            chance.choice([0])  # the draw that the seeds were found with
            writer, kind = chance.choice([store, other]), chance.choice(["summary", "archive"])
            await writer.put(tenant, kind, f"k{chance.randrange(2000):064}", b"", 60)
        await store.forget("team:leaving")
        assert holding(tmp_path, b"team:leaving") == []
        await other.aclose()

    with_store(tmp_path / "a.db", test)


@pytest.mark.parametrize("seed", range(3))
def test_no_content_is_left_of_what_expired(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(store: SqliteStore) -> None:
        other = SqliteStore(tmp_path / "a.db")
        await filled([store, other], ["team:leaving", "team:a"], 30, seed)
        assert holding(tmp_path, CANARY)
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 31)
        await other.upkeep()
        assert len(await store.entries("summary")) > 20
        assert holding(tmp_path, CANARY) == []
        await other.aclose()

    with_store(tmp_path / "a.db", test)


@pytest.mark.parametrize("seed", [3, 8, 9])
def test_no_content_is_left_of_small_entries_that_moved(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With these seeds something stays behind unless each value lies on pages of its own."""

    async def test(store: SqliteStore) -> None:
        other, chance = SqliteStore(tmp_path / "a.db"), random.Random(seed)
        for _ in range(600):
            tenant = chance.choice(["team:leaving", "team:a", "team:b"])
            size = chance.choice([0, 30, 300, 900, 1000, 1500, 3000])
            value, seconds = (CANARY, 60) if tenant == "team:leaving" else (b"h" * (26 + size), 600)
            writer, kind = chance.choice([store, other]), chance.choice(["summary", "archive"])
            await writer.put(tenant, kind, f"k{chance.randrange(200):03}", value, seconds)
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 61)
        await store.upkeep()
        assert holding(tmp_path, CANARY) == []
        await other.aclose()

    with_store(tmp_path / "a.db", test)


def test_no_content_is_left_of_a_file_of_an_earlier_version(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "a.db") as db:
        db.executescript(
            """CREATE TABLE entries (tenant TEXT NOT NULL, kind TEXT NOT NULL, key TEXT NOT NULL, value BLOB NOT NULL,
            expires REAL NOT NULL, PRIMARY KEY (tenant, kind, key)) WITHOUT ROWID;
            CREATE INDEX entries_expire ON entries (expires);"""
        )
        for n in range(300):
            value = GONE if f"k{n}" < "k2" else CANARY
            db.execute("INSERT INTO entries VALUES ('t', 'summary', ?, ?, ?)", (f"k{n}", value * 20, time.time() + 60))
        db.execute("PRAGMA secure_delete = OFF")
        db.execute("DELETE FROM entries WHERE key < 'k2'")
    db.close()
    assert holding(tmp_path, GONE)

    async def test(store: SqliteStore) -> None:
        assert len(await store.entries("summary")) > 100
        await store.upkeep()
        assert holding(tmp_path, GONE) == [], "of what was removed before either"
        await store.forget("t")
        assert holding(tmp_path, CANARY) == []

    with_store(tmp_path / "a.db", test)


def test_no_content_is_left_of_what_expired_in_a_file_that_keeps_its_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of an earlier version, which does not give back what is empty."""
    with sqlite3.connect(tmp_path / "a.db") as db:
        db.executescript(
            """CREATE TABLE entries (tenant TEXT NOT NULL, kind TEXT NOT NULL, key TEXT NOT NULL, value BLOB NOT NULL,
            expires REAL NOT NULL, PRIMARY KEY (tenant, kind, key)) WITHOUT ROWID;
            CREATE INDEX entries_expire ON entries (expires);"""
        )
        for n in range(100):
            db.execute(
                "INSERT INTO entries VALUES ('t', 'summary', ?, ?, ?)", (f"k{n}", CANARY * 500, time.time() + 60)
            )
    db.close()

    async def test(store: SqliteStore) -> None:
        assert len(await store.entries("summary")) == 100
        before = (tmp_path / "a.db").stat().st_size
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 61)
        await store.upkeep()
        assert await store.entries("summary") == []
        assert (tmp_path / "a.db").stat().st_size >= before / 2
        assert holding(tmp_path, CANARY) == []

    with_store(tmp_path / "a.db", test)


def test_a_log_that_is_read_without_a_pause_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.store.sqlite_worker.BUSY_SECONDS", 0.05)
    monkeypatch.setattr("proxy.store.sqlite.PATIENCE", 0.3)

    async def test(store: SqliteStore) -> None:
        await store.put("t", "summary", "k", CANARY, 60)
        reader = sqlite3.connect(tmp_path / "a.db")
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM entries").fetchone()
        with pytest.raises(StoreFailed, match="log"):
            await store.forget("t")
        reader.close()
        await store.forget("t")
        assert holding(tmp_path, CANARY) == []

    with_store(tmp_path / "a.db", test)


def test_waiting_for_readers_does_not_write_the_file_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a gigabyte, each time takes seconds, and as long a log."""
    monkeypatch.setattr("proxy.store.sqlite_worker.BUSY_SECONDS", 0.05)
    readers: list[sqlite3.Connection] = []

    def rebuild_and_read(connection: sqlite3.Connection) -> None:
        rebuild(connection)
        reader = sqlite3.connect(tmp_path / "a.db", check_same_thread=False)
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM entries").fetchone()
        readers.append(reader)

    monkeypatch.setattr("proxy.store.sqlite.rebuild", rebuild_and_read)

    async def test(store: SqliteStore) -> None:
        await store.put("t", "summary", "k", CANARY, 60)
        forgetting = asyncio.create_task(store.forget("t"))
        async with asyncio.timeout(30):
            while not readers:  # noqa: ASYNC110 - set from another thread
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        assert not forgetting.done()
        assert len(readers) == 1
        readers[0].close()
        assert await forgetting == {"summary": 1}
        assert len(readers) == 1
        assert holding(tmp_path, CANARY) == []

    with_store(tmp_path / "a.db", test)


@pytest.mark.parametrize("on_disk", [True, False])
def test_the_size_is_kept_by_removing_what_expires_first(tmp_path: Path, on_disk: bool) -> None:
    path, most = tmp_path / "a.db" if on_disk else None, 2_000_000

    async def test(store: SqliteStore) -> None:
        await store.put("t", "limit", "small", b"1", 900)
        for n in range(100):
            await store.put("t", "archive", f"{n:03}", os.urandom(50_000), 1000 + n)
        await store.upkeep()
        assert await store.get("t", "limit", "small") == b"1"
        left = [entry.key for entry in await store.entries("archive")]
        assert left == [f"{n:03}" for n in range(100 - len(left), 100)]
        assert 29 <= len(left) <= 36
        if path is not None:
            assert size(tmp_path) <= most
        await store.upkeep()
        assert len(await store.entries("archive")) == len(left)

    with_store(path, test, most)


def test_many_small_entries_are_bounded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.store.sqlite.BATCH", 10)

    async def test(store: SqliteStore) -> None:
        for n in range(100):
            await store.put("t", "limit", f"{n:03}", b"1", 1000 + n)
        await store.upkeep()
        left = [entry.key for entry in await store.entries("limit")]
        assert 0 < len(left) < 90
        assert left == [f"{n:03}" for n in range(100 - len(left), 100)]

    with_store(tmp_path / "a.db", test, 300_000)


def test_upkeep_begins_no_file(tmp_path: Path) -> None:
    async def test(store: SqliteStore) -> None:
        upkeep = Maintenance(store, [])
        await upkeep.once()
        assert await store.forget("t") == {}
        assert names(tmp_path) == []

    with_store(tmp_path / "a.db", test)


@pytest.mark.parametrize("where", ["folder", "round"])
def test_an_error_of_one_round_does_not_end_upkeep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """A network folder that can't be read for a moment, or a fault of the proxy's own."""
    monkeypatch.setattr("proxy.server.maintenance.EVERY", 0.01)
    failing = True

    def fault(real: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            if failing:
                raise (PermissionError(errno.EACCES, "no") if where == "folder" else KeyError("a fault"))
            return real(*arguments, **named)

        return run

    async def test(store: SqliteStore) -> None:
        nonlocal failing
        await store.put("t", "summary", "k", b"1", 60)
        place = (Path, "stat") if where == "folder" else (SqliteStore, "forgotten")
        monkeypatch.setattr(*place, fault(getattr(*place)))
        upkeep = Maintenance(store, [])
        with capture_logs() as logs:
            upkeep.start()
            async with asyncio.timeout(10):
                while not logs:  # noqa: ASYNC110 - the log has no event to wait for
                    await asyncio.sleep(0.01)
        assert {line["event"] for line in logs} == {"store.upkeep_failed"}
        failing = False
        done, real = asyncio.Event(), store.upkeep

        async def upkeep_again() -> None:
            await real()
            done.set()

        monkeypatch.setattr(store, "upkeep", upkeep_again)
        async with asyncio.timeout(10):
            await done.wait()
        await upkeep.aclose()

    with_store(tmp_path / "a.db", test)


def test_a_running_process_notices_that_a_tenant_was_forgotten(tmp_path: Path) -> None:
    async def test(store: SqliteStore) -> None:
        shared = ReplicatedMap(store, "limit", Limits, 10)
        upkeep = Maintenance(store, [shared])
        await upkeep.once()
        for tenant in ("team:leaving", "team:a"):
            shared.put(tenant, "u", "m", Limits("u", "m"))
            await store.put(tenant, "summary", "k", b"1", 60)
        command = SqliteStore(tmp_path / "a.db")
        await command.forget("team:leaving")
        await store.put("team:leaving", "summary", "since", b"1", 60)
        await upkeep.once()
        assert shared.get("team:leaving", "u", "m") is None
        assert shared.get("team:a", "u", "m") == Limits("u", "m")
        assert await store.get("team:leaving", "summary", "since") is None
        # Once it is noticed the tenant is like any other.
        shared.put("team:leaving", "u", "m", Limits("u", "m"))
        await store.put("team:leaving", "summary", "later", b"1", 60)
        await upkeep.once()
        assert shared.get("team:leaving", "u", "m") is not None
        assert await store.get("team:leaving", "summary", "later") == b"1"
        await command.forget("team:leaving")
        await upkeep.once()
        assert shared.get("team:leaving", "u", "m") is None
        await shared.aclose()
        await command.aclose()

    with_store(tmp_path / "a.db", test)


def test_who_starts_after_it_has_nothing_to_drop(tmp_path: Path) -> None:
    async def test(store: SqliteStore) -> None:
        await store.put("t", "summary", "k", b"1", 60)
        await store.forget("t")
        shared = ReplicatedMap(store, "limit", Limits, 10)
        upkeep = Maintenance(store, [shared])
        shared.put("t", "u", "m", Limits("u", "m"))
        await upkeep.once()
        assert shared.get("t", "u", "m") is not None
        await shared.aclose()

    with_store(tmp_path / "a.db", test)
