"""Test the SQLite store."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from proxy.errors import ConfigurationError
from proxy.store import StoreFailed, open_store
from proxy.store.file import put_aside
from proxy.store.sqlite import SqliteStore

Test = Callable[[SqliteStore], Awaitable[None]]


def run(path: Path | None, *tests: Test) -> None:
    """Run tests one after the other, each with a store of its own at the same place."""

    async def whole(test: Test) -> None:
        store = SqliteStore(path)
        try:
            await test(store)
        finally:
            await store.aclose()

    for test in tests:
        asyncio.run(whole(test))


@pytest.mark.parametrize("on_disk", [True, False])
def test_what_was_put_is_got_by_tenant_kind_and_key(tmp_path: Path, on_disk: bool) -> None:
    async def test(store: SqliteStore) -> None:
        await store.put("t", "summary", "k", b"one\x00\xff", 60)
        assert await store.get("t", "summary", "k") == b"one\x00\xff"
        for other in (("u", "summary", "k"), ("t", "limit", "k"), ("t", "summary", "j")):
            assert await store.get(*other) is None
        await store.put("t", "summary", "k", b"two", 60)
        assert await store.get("t", "summary", "k") == b"two"

    run(tmp_path / "a.db" if on_disk else None, test)


def test_entries_outlive_the_process_and_end_with_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def write(store: SqliteStore) -> None:
        await store.put("t", "summary", "short", b"1", 10)
        await store.put("t", "summary", "long", b"2", 1000)

    async def read(store: SqliteStore) -> None:
        assert await store.get("t", "summary", "short") == b"1"
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 11)
        assert await store.get("t", "summary", "short") is None
        assert await store.get("t", "summary", "long") == b"2"

    run(tmp_path / "a.db", write, read)


def test_upkeep_removes_expired_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.store.sqlite.BATCH", 3)

    async def test(store: SqliteStore) -> None:
        for n in range(10):
            await store.put("t", "summary", f"k{n}", b"", -1)
        await store.put("t", "summary", "lasting", b"", 60)
        await store.upkeep()

    run(tmp_path / "a.db", test)
    with sqlite3.connect(tmp_path / "a.db") as db:
        assert db.execute("SELECT key FROM entries").fetchall() == [("lasting",)]
    db.close()


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions")
def test_only_the_owner_can_read_it(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "newer"
    modes: dict[str, int] = {}

    async def test(store: SqliteStore) -> None:
        await store.put("t", "summary", "k", b"secret", 60)
        modes.update(
            {file.name: stat.S_IMODE(file.stat().st_mode) for file in (*folder.iterdir(), folder, folder.parent)}
        )

    before = os.umask(0)
    try:
        run(folder / "a.db", test)
    finally:
        os.umask(before)
    files = dict.fromkeys(("a.db", "a.db-wal", "a.db-shm"), 0o600)
    assert modes == files | dict.fromkeys(("new", "newer"), 0o700)


def test_two_processes_share_it(tmp_path: Path) -> None:
    async def test(store: SqliteStore) -> None:
        other = SqliteStore(tmp_path / "a.db")
        await asyncio.gather(
            *(one.put("t", "summary", f"{name}{n}", b"", 60) for n in range(30) for name, one in pairs(store, other))
        )
        assert await other.get("t", "summary", "a29") == await store.get("t", "summary", "b29") == b""
        await other.aclose()

    def pairs(a: SqliteStore, b: SqliteStore) -> tuple[tuple[str, SqliteStore], ...]:
        return (("a", a), ("b", b))

    run(tmp_path / "a.db", test)


@pytest.mark.parametrize("keys", [(), (b"k" * 32,)], ids=("plain", "encrypted"))
def test_of_many_that_add_an_entry_the_first_one_wins(
    keys: tuple[bytes, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each store is a process of its own."""

    async def whole() -> None:
        stores = [SqliteStore(tmp_path / "a.db", keys) for _ in range(4)]
        place = ("t", "summary", "k")
        got = await asyncio.gather(*(store.add(*place, b"%d" % number, 60) for number, store in enumerate(stores * 5)))
        (first,) = set(got)
        assert {await store.get(*place) for store in stores} == {first}
        assert await stores[0].add("u", "summary", "k", b"theirs", 60) == b"theirs"
        await stores[1].discard(*place)
        await stores[1].discard(*place)
        assert await stores[2].get(*place) is None
        assert await stores[2].get("u", "summary", "k") == b"theirs"
        assert await stores[3].add(*place, b"next", 60) == b"next"
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 61)
        assert await stores[0].add(*place, b"after it expired", 60) == b"after it expired"
        for store in stores:
            await store.aclose()

    asyncio.run(whole())


def test_many_processes_open_a_new_file_at_once(tmp_path: Path) -> None:
    async def test(store: SqliteStore) -> None:
        for n in range(10):
            stores = [SqliteStore(tmp_path / f"{n}.db") for _ in range(6)]
            await asyncio.gather(*(one.put("t", "summary", "k", b"", 60) for one in stores))
            await asyncio.gather(*(one.aclose() for one in stores))

    run(None, test)


def test_hostile_names_are_only_names(tmp_path: Path) -> None:
    async def test(store: SqliteStore) -> None:
        name = "'; DROP TABLE entries; --\x00é"
        await store.put(name, name, name, b"x", 60)
        assert await store.get(name, name, name) == b"x"
        assert await store.get(name, name, "'") is None

    run(tmp_path / "a.db", test)


def test_a_file_that_is_no_database_fails_as_a_store_does(tmp_path: Path) -> None:
    (tmp_path / "a.db").write_bytes(b"this is no database at all " * 100)

    async def test(store: SqliteStore) -> None:
        for _ in range(2):
            with pytest.raises(StoreFailed):
                await store.get("t", "summary", "k")
            with pytest.raises(StoreFailed):
                await store.put("t", "summary", "k", b"", 60)
            with pytest.raises(StoreFailed):
                await store.entries("summary")

    run(tmp_path / "a.db", test)
    assert put_aside(tmp_path / "a.db") == []


def test_upkeep_moves_a_file_that_is_no_database_aside(tmp_path: Path) -> None:
    other = b"this is no database at all " * 100
    (tmp_path / "a.db").write_bytes(other)

    async def test(store: SqliteStore) -> None:
        await store.upkeep()
        assert await store.get("t", "summary", "k") is None
        await store.put("t", "summary", "k", b"1", 60)
        assert await store.get("t", "summary", "k") == b"1"

    run(tmp_path / "a.db", test)
    (aside,) = put_aside(tmp_path / "a.db")
    assert aside.read_bytes() == other


def test_many_processes_move_a_damaged_file_aside_once(tmp_path: Path) -> None:
    (tmp_path / "a.db").write_bytes(b"this is no database at all " * 100)

    async def test(store: SqliteStore) -> None:
        stores = [SqliteStore(tmp_path / "a.db") for _ in range(6)]
        await asyncio.gather(*(one.upkeep() for one in stores))
        await asyncio.gather(*(one.put("t", "summary", f"k{n}", b"", 60) for n, one in enumerate(stores)))
        assert [await stores[0].get("t", "summary", f"k{n}") for n in range(6)] == [b""] * 6
        await asyncio.gather(*(one.aclose() for one in stores))

    run(None, test)
    assert len(put_aside(tmp_path / "a.db")) == 1


def test_a_file_that_is_damaged_later_is_moved_aside_by_whoever_meets_it(tmp_path: Path) -> None:
    path = tmp_path / "a.db"

    async def test(store: SqliteStore) -> None:
        other = SqliteStore(path)
        for n in range(50):
            await store.put("t", "summary", f"k{n}", b"x" * 5000, 60)
        await asyncio.gather(store.upkeep(), other.upkeep())
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.seek(4096)
            file.write(b"\xff" * (size - 4096))
        assert await other.get("t", "summary", "k7") is None
        await store.put("t", "summary", "new", b"1", 60)
        assert await other.get("t", "summary", "new") == b"1"
        await other.aclose()

    run(path, test)
    assert len([aside for aside in put_aside(path) if not aside.name.endswith(("-wal", "-shm"))]) == 1


def test_a_file_that_was_removed_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "a.db"

    async def test(store: SqliteStore) -> None:
        await store.put("t", "summary", "k", b"1", 60)
        path.unlink()
        assert await store.get("t", "summary", "k") is None
        await store.put("t", "summary", "k", b"2", 60)

    async def again(store: SqliteStore) -> None:
        assert await store.get("t", "summary", "k") == b"2"

    run(path, test, again)


def test_a_file_of_an_earlier_version_keeps_its_entries(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "a.db") as db:
        db.executescript(
            """CREATE TABLE entries (tenant TEXT NOT NULL, kind TEXT NOT NULL, key TEXT NOT NULL, value BLOB NOT NULL,
            expires REAL NOT NULL, PRIMARY KEY (tenant, kind, key)) WITHOUT ROWID;
            CREATE INDEX entries_expire ON entries (expires);"""
        )
        db.execute("INSERT INTO entries VALUES ('t', 'summary', 'k', ?, ?)", (b"old", time.time() + 60))
    db.close()

    async def test(store: SqliteStore) -> None:
        other = SqliteStore(tmp_path / "a.db")
        found = tuple(await asyncio.gather(store.get("t", "summary", "k"), other.get("t", "summary", "k")))
        assert found == (b"old", b"old")
        await other.aclose()

    run(tmp_path / "a.db", test, test)


def test_a_place_that_cannot_be_written_fails_as_a_store_does(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")

    async def test(store: SqliteStore) -> None:
        with pytest.raises(StoreFailed):
            await store.get("t", "summary", "k")

    run(tmp_path / "file" / "a.db", test)


def test_a_lock_is_waited_for_only_so_long_and_the_store_goes_on_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.store.sqlite_worker.BUSY_SECONDS", 0.05)

    async def test(store: SqliteStore) -> None:
        await store.put("t", "summary", "k", b"1", 60)
        other = sqlite3.connect(tmp_path / "a.db")
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreFailed, match="locked"):
            await store.put("t", "summary", "k", b"2", 60)
        assert await store.get("t", "summary", "k") == b"1"
        other.rollback()
        other.close()
        await store.put("t", "summary", "k", b"2", 60)
        assert await store.get("t", "summary", "k") == b"2"

    run(tmp_path / "a.db", test)


def test_a_slow_disk_does_not_hold_up_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(store: SqliteStore) -> None:
        await store.put("t", "summary", "k", b"1", 60)
        work = store._reader._open
        go = threading.Event()

        def slowly() -> sqlite3.Connection:
            assert go.wait(30)
            return work()

        monkeypatch.setattr(store._reader, "_open", slowly)
        reading = asyncio.ensure_future(store.get("t", "summary", "k"))
        turns = 0
        while not reading.done():
            turns += 1
            if turns == 20:
                go.set()
            await asyncio.sleep(0.001)
        assert await reading == b"1"
        assert turns >= 20

    run(tmp_path / "a.db", test)


def test_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def put(url: str) -> None:
        store = open_store(url)
        await store.put("t", "summary", "k", b"1", 60)
        await store.aclose()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    asyncio.run(put("sqlite:///relative.db"))
    asyncio.run(put(f"sqlite:///{tmp_path}/absolute.db"))
    asyncio.run(put("sqlite:///~/home.db"))
    asyncio.run(put("sqlite://"))
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.db")}
    assert found == {"relative.db", "absolute.db", "home/home.db"}


@pytest.mark.parametrize("url", ["sqlite:///", "redis://localhost", "postgres:///x", "", "a.db", "sqlite:/a.db"])
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"store\.url"):
        open_store(url)
