"""The store in one file: sharing, damage, permissions, formats, and what removal leaves."""

import asyncio
import importlib.util
import os
import random
import stat
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from proxy.errors import ConfigurationError
from proxy.records import redis as redis_records
from proxy.records.model import RecordQuery
from proxy.records.redis import RedisRecords
from proxy.store import Entry, ManagedStore, StoreFailed, open_store, sqlite
from proxy.store.forgetting import digest, forget, forgotten, remove
from proxy.store.redis_store import RedisStore
from proxy.store.sealing import SealedStore
from proxy.store.sqlite import SqliteStore, put_aside
from proxy.summary import store as module
from proxy.summary.single_flight import Progress, Summaries
from proxy.summary.store import Checkpoint, StoredSummary
from tests.kit.records import record
from tests.kit.redis_server import RedisServer
from tests.kit.stores import Clock, being_read, files_with, opened, with_store, write_old_file
from tests.kit.summary_conversation import SimpleOrder

CANARY = b"CANARY-7f3a9b"
NO_DATABASE = b"this is no database at all " * 100


def size(folder: Path) -> int:
    """Return the bytes of the store's files, without the index of the log."""
    return sum(file.stat().st_size for file in folder.iterdir() if not file.name.endswith("-shm"))


Test = Callable[[SqliteStore], Awaitable[None]]


def run(path: Path | None, *tests: Test) -> None:
    """Run tests one after the other, each with a store of its own at the same place."""
    with_store(lambda: SqliteStore(path), *tests)


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


def test_a_file_that_is_no_database_fails_as_a_store_does(tmp_path: Path) -> None:
    (tmp_path / "a.db").write_bytes(NO_DATABASE)

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
    (tmp_path / "a.db").write_bytes(NO_DATABASE)

    async def test(store: SqliteStore) -> None:
        await store.maintain()
        assert await store.get("t", "summary", "k") is None
        await store.put("t", "summary", "k", b"1", 60)
        assert await store.get("t", "summary", "k") == b"1"

    run(tmp_path / "a.db", test)
    (aside,) = put_aside(tmp_path / "a.db")
    assert aside.read_bytes() == NO_DATABASE


def test_many_processes_move_a_damaged_file_aside_once(tmp_path: Path) -> None:
    (tmp_path / "a.db").write_bytes(NO_DATABASE)

    async def test(store: SqliteStore) -> None:
        stores = [SqliteStore(tmp_path / "a.db") for _ in range(6)]
        await asyncio.gather(*(one.maintain() for one in stores))
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
        await asyncio.gather(store.maintain(), other.maintain())
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


def test_a_file_from_before_the_first_version_fails_with_advice_and_stays(tmp_path: Path) -> None:
    write_old_file(tmp_path / "a.db")

    async def test(store: SqliteStore) -> None:
        with pytest.raises(StoreFailed, match=r"before 0\.1\.0 wrote this file\. Fix: move it away"):
            await store.get("t", "summary", "k")
        with pytest.raises(StoreFailed, match=r"before 0\.1\.0"):
            await store.maintain()

    run(tmp_path / "a.db", test)
    with opened(tmp_path / "a.db") as db:
        assert db.execute("SELECT value FROM entries").fetchall() == [("old",)]


def test_a_lock_is_waited_for_only_so_long_and_the_store_goes_on_after_it(tmp_path: Path) -> None:
    async def test(store: SqliteStore) -> None:
        await store.put("t", "summary", "k", b"1", 60)
        with opened(tmp_path / "a.db") as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreFailed, match="locked"):
                await store.put("t", "summary", "k", b"2", 60)
            assert await store.get("t", "summary", "k") == b"1"
        await store.put("t", "summary", "k", b"2", 60)
        assert await store.get("t", "summary", "k") == b"2"

    with_store(lambda: SqliteStore(tmp_path / "a.db", busy_seconds=0.05), test)


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


@pytest.mark.parametrize("url", ["sqlite:///", "mongodb://localhost", "postgres:///x", "", "a.db", "sqlite:/a.db"])
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"store\.url"):
        open_store(url)


@pytest.mark.parametrize("seed", range(3))
def test_no_content_is_left_of_what_expired(tmp_path: Path, seed: int) -> None:
    clock = Clock()

    async def test(store: SqliteStore) -> None:
        other, chance = SqliteStore(tmp_path / "a.db", clock=clock), random.Random(seed)
        for _ in range(400):
            tenant = chance.choice(["team:leaving", "team:a"])
            size = chance.choice([0, 30, 300, 1000, 3000, 20_000])
            text, seconds = (CANARY, 30) if tenant == "team:leaving" else (b"harmless", 60)
            names = chance.choice(["summary", "archive"]), f"k{chance.randrange(200)}"
            await chance.choice([store, other]).put(tenant, *names, text + os.urandom(size) + text, seconds)
        assert files_with(tmp_path, CANARY)
        clock.now += 31
        await other.maintain()
        assert len(await store.entries("summary")) > 20
        assert files_with(tmp_path, CANARY) == []
        await other.aclose()

    with_store(lambda: SqliteStore(tmp_path / "a.db", clock=clock), test)


@pytest.mark.parametrize("seed", [3, 8, 9])
def test_no_content_is_left_of_small_entries_that_moved(tmp_path: Path, seed: int) -> None:
    """With these seeds, bytes stay in the file unless each value lies on its own pages."""
    clock = Clock()

    async def test(store: SqliteStore) -> None:
        other, chance = SqliteStore(tmp_path / "a.db", clock=clock), random.Random(seed)
        for _ in range(600):
            tenant = chance.choice(["team:leaving", "team:a", "team:b"])
            size = chance.choice([0, 30, 300, 900, 1000, 1500, 3000])
            value, seconds = (CANARY, 60) if tenant == "team:leaving" else (b"h" * (26 + size), 600)
            writer, kind = chance.choice([store, other]), chance.choice(["summary", "archive"])
            await writer.put(tenant, kind, f"k{chance.randrange(200):03}", value, seconds)
        clock.now += 61
        await store.maintain()
        assert files_with(tmp_path, CANARY) == []
        await other.aclose()

    with_store(lambda: SqliteStore(tmp_path / "a.db", clock=clock), test)


def test_no_content_is_left_of_what_expired_in_a_file_that_keeps_its_pages(tmp_path: Path) -> None:
    """A file that another program has rewritten may keep its empty pages."""
    clock = Clock()
    with opened(tmp_path / "a.db") as db:
        db.executescript(sqlite._SCHEMA)

    async def test(store: SqliteStore) -> None:
        await store.put_many([Entry("t", "summary", f"k{n}", CANARY * 500, 60) for n in range(100)])
        await store.erase()
        before = (tmp_path / "a.db").stat().st_size
        clock.now += 61
        await store.maintain()
        assert await store.entries("summary") == []
        assert (tmp_path / "a.db").stat().st_size >= before / 2
        assert files_with(tmp_path, CANARY) == []

    with_store(lambda: SqliteStore(tmp_path / "a.db", clock=clock), test)


@pytest.mark.parametrize("on_disk", [True, False])
def test_the_size_is_kept_by_removing_what_expires_first(tmp_path: Path, on_disk: bool) -> None:
    path, most = tmp_path / "a.db" if on_disk else None, 2_000_000

    async def test(store: SqliteStore) -> None:
        await store.put("t", "limit", "small", b"1", 900)
        for n in range(100):
            await store.put("t", "archive", f"{n:03}", os.urandom(50_000), 1000 + n)
        await store.maintain()
        assert await store.get("t", "limit", "small") == b"1"
        left = [entry.key for entry in await store.entries("archive")]
        assert left == [f"{n:03}" for n in range(100 - len(left), 100)]
        assert 29 <= len(left) <= 36
        if path is not None:
            assert size(tmp_path) <= most
        await store.maintain()
        assert len(await store.entries("archive")) == len(left)

    with_store(lambda: SqliteStore(path, most), test)


GONE = b"GONE-1c8e02"


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_left_of_a_tenant_that_is_forgotten(tmp_path: Path, seed: int) -> None:
    """Entries have many sizes, in an order that makes rows move, some of them twice."""

    async def test(store: SqliteStore) -> None:
        other, chance = SqliteStore(tmp_path / "a.db"), random.Random(seed)
        for _ in range(400):
            tenant = chance.choice(["team:leaving", "team:a", "team:b"])
            size = chance.choice([0, 30, 300, 1000, 3000, 20_000])
            text = CANARY if tenant == "team:leaving" else b"harmless"
            names = chance.choice(["summary", "archive"]), f"k{chance.randrange(200)}"
            await chance.choice([store, other]).put(tenant, *names, text + os.urandom(size) + text, 60)
        assert files_with(tmp_path, CANARY)
        count = {kind: len(await store.entries(kind)) for kind in ("summary", "archive")}
        removed = await forget(store, "team:leaving")
        left = {kind: await other.entries(kind) for kind in ("summary", "archive")}
        assert removed == {kind: count[kind] - len(left[kind]) for kind in count}
        assert min(removed.values()) > 20
        assert {entry.tenant for entries in left.values() for entry in entries} == {"team:a", "team:b"}
        assert files_with(tmp_path, CANARY, b"team:leaving") == []
        assert list(await forgotten(other)) == [digest("team:leaving")]
        assert await forget(store, "team:leaving") == {}
        await other.aclose()
        assert files_with(tmp_path, CANARY, b"team:leaving") == []

    with_store(lambda: SqliteStore(tmp_path / "a.db"), test)
    assert files_with(tmp_path, CANARY, b"team:leaving") == []


@pytest.mark.parametrize("seed", [2, 4, 5])
def test_not_even_a_name_is_left_between_the_rows_of_others(tmp_path: Path, seed: int) -> None:
    """With these seeds, rows move so that a name stays in the file until it is rebuilt."""

    async def test(store: SqliteStore) -> None:
        other, chance = SqliteStore(tmp_path / "a.db"), random.Random(seed)
        for _ in range(600):
            tenant = chance.choice(["team:leaving", "team:a", "team:b"])
            chance.choice([0])  # the seeds were found with this draw
            writer, kind = chance.choice([store, other]), chance.choice(["summary", "archive"])
            await writer.put(tenant, kind, f"k{chance.randrange(2000):064}", b"", 60)
        await forget(store, "team:leaving")
        assert files_with(tmp_path, b"team:leaving") == []
        await other.aclose()

    with_store(lambda: SqliteStore(tmp_path / "a.db"), test)


@pytest.mark.parametrize("work", [forget, remove])
def test_a_file_that_is_read_without_a_pause_fails(tmp_path: Path, work: Callable[..., Awaitable[Any]]) -> None:
    async def test(store: SqliteStore) -> None:
        await store.put("t", "summary", "k", CANARY, 60)
        with being_read(tmp_path / "a.db"), pytest.raises(StoreFailed, match="log"):
            await work(store, "t", patience=0.3)
        await work(store, "t")
        assert files_with(tmp_path, CANARY) == []

    with_store(lambda: SqliteStore(tmp_path / "a.db", busy_seconds=0.05), test)


KEYS = [
    (),
    pytest.param((b"k" * 32,), marks=pytest.mark.skipif(not importlib.util.find_spec("cryptography"), reason="")),
]
Open = Callable[[str], ManagedStore]


@pytest.fixture(params=["sqlite", "redis"])
def opened_as(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Open the store as a version of the proxy does."""
    if request.param == "sqlite":
        return lambda version: SqliteStore(tmp_path / "store.db")
    redis: RedisServer = request.getfixturevalue("redis")
    return lambda version: RedisStore(redis.url, version=version)


@pytest.mark.parametrize("keys", KEYS)
def test_each_version_has_its_own_summary_and_both_are_forgotten(
    opened_as: Open, keys: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def store_of(version: str) -> ManagedStore:
        backend = opened_as(version)
        return SealedStore(backend, keys) if keys else backend  # type: ignore[arg-type]

    async def summary(version: str, kind: str, text: str) -> str:
        """Return the text of the summary that a new replica of a version uses. It would make ``text``."""

        async def make(previous: StoredSummary | None, position: int, progress: Progress) -> StoredSummary:
            return StoredSummary(text, b"{}", {})

        monkeypatch.setattr(module, "KIND", kind)
        store = store_of(version)
        replica = Summaries(store)
        try:
            return (await replica.obtain(SimpleOrder("team:a", [Checkpoint(1, "k")], make)))[0].text
        finally:
            await replica.aclose()
            await store.aclose()

    async def test(store: ManagedStore) -> None:
        for version, kind, text in (("1", "summary.2", "A"), ("1", "summary.3", "B"), ("2", "summary.3", "C")):
            own = "B" if text == "C" and isinstance(opened_as(version), SqliteStore) else text
            for attempt in (text, "another"):
                assert await summary(version, kind, attempt) == own
        assert await summary("1", "summary.2", "another") == "A"
        assert (await forget(store, "team:a")).total() == (2 if isinstance(opened_as("1"), SqliteStore) else 3)
        for version, kind in (("1", "summary.2"), ("1", "summary.3"), ("2", "summary.3")):
            assert await summary(version, kind, "new") == "new"

    with_store(lambda: store_of("1"), test)


def test_records_of_all_versions_are_removed(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> int:
        records = RedisRecords(redis.url)
        for prefix in ("{compaction-records}:2", "{compaction-records}:1"):
            monkeypatch.setattr(redis_records, "PREFIX", prefix)
            await records.write([record("team:gone"), record("team:other")], 60)
            assert len(await records.select(RecordQuery())) == 2
        removed = await records.remove("team:gone")
        await records.aclose()
        return removed.total()

    assert asyncio.run(test()) == 4  # a record and a row of each version
    assert b"team:gone" not in redis.raw()
    assert redis.raw().count(b"team:other") > 0
