"""Two versions of the proxy on one store, with different formats of entries."""

from __future__ import annotations

import asyncio
import importlib.util
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import zstandard

from proxy.compaction.identifiers import Mention
from proxy.records import redis as redis_records
from proxy.records.model import RecordQuery
from proxy.records.redis import RedisRecords
from proxy.store import ManagedStore, archive
from proxy.store.forgetting import forget
from proxy.store.redis_store import RedisStore
from proxy.store.sealing import SealedStore
from proxy.store.sqlite import SqliteStore
from proxy.summary import store as module
from proxy.summary.single_flight import Progress
from proxy.summary.store import Checkpoint, StoredSummary, Summaries
from tests.kit.records import record
from tests.kit.redis_server import RedisServer
from tests.kit.stores import with_store

KEYS = [
    (),
    pytest.param((b"k" * 32,), marks=pytest.mark.skipif(not importlib.util.find_spec("cryptography"), reason="")),
]
Open = Callable[[str], ManagedStore]


@pytest.fixture(params=["sqlite", "redis"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Open the store as a version of the proxy does."""
    if request.param == "sqlite":
        return lambda version: SqliteStore(tmp_path / "store.db")
    redis: RedisServer = request.getfixturevalue("redis")
    return lambda version: RedisStore(redis.url, version=version)


@pytest.mark.parametrize("keys", KEYS)
def test_each_version_has_its_own_summary_and_both_are_forgotten(
    opened: Open, keys: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def store_of(version: str) -> ManagedStore:
        backend = opened(version)
        return SealedStore(backend, keys) if keys else backend  # type: ignore[arg-type]

    async def summary(version: str, kind: str, text: str) -> str:
        """Return the text of the summary that a new replica of a version uses. It would make ``text``."""

        async def make(previous: StoredSummary | None, position: int, progress: Progress) -> StoredSummary:
            return StoredSummary(text, b"{}", {})

        monkeypatch.setattr(module, "KIND", kind)
        store = store_of(version)
        replica = Summaries(store)
        try:
            return (await replica.obtain("team:a", [Checkpoint(1, "k")], make))[0].text
        finally:
            await replica.aclose()
            await store.aclose()

    async def test(store: ManagedStore) -> None:
        for version, kind, text in (("1", "summary.2", "A"), ("1", "summary.3", "B"), ("2", "summary.3", "C")):
            own = "B" if text == "C" and isinstance(opened(version), SqliteStore) else text
            for attempt in (text, "another"):
                assert await summary(version, kind, attempt) == own
        assert await summary("1", "summary.2", "another") == "A"
        assert (await forget(store, "team:a")).total() == (2 if isinstance(opened("1"), SqliteStore) else 3)
        for version, kind in (("1", "summary.2"), ("1", "summary.3"), ("2", "summary.3")):
            assert await summary(version, kind, "new") == "new"

    with_store(lambda: store_of("1"), test)


def test_a_forgotten_tenant_leaves_no_names_of_any_version_on_redis(redis: RedisServer) -> None:
    async def write(store: RedisStore) -> None:
        await store.put("team:gone", "summary", "its-key", b"CANARY", 60)
        await store.put("other", "team:gone", "k", b"stays", 60)

    async def test(store: RedisStore) -> None:
        assert await forget(store, "team:gone") == {"summary": 2}
        assert await store.get("other", "team:gone", "k") == b"stays"

    for version in ("1", "2"):
        with_store(lambda version=version: RedisStore(redis.url, version=version), write)  # type: ignore[misc]
    with_store(lambda: RedisStore(redis.url), test)
    raw = redis.raw()
    assert b"CANARY" not in raw
    assert b"its-key" not in raw


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


def test_the_formats_of_these_kinds() -> None:
    """If this test fails, give the kind another name, such as ``summary.3``. See ``Store``."""
    stored = bytes.fromhex(
        "8aa474657874a14ea76d657373616765c4027b7da5666f756e6481a22f6196a4706174680102030405a8696e6465785f617409a6"
        "646967657374c2a5756e74696ccb0000000000000000a7756e61736b6564c2a8676976656e5f7570c2ab6f7665725f6275646765"
        "74c2a56361757365c0"
    )
    summary = StoredSummary("N", b"{}", {"/a": Mention("path", 1, 2, 3, 4, 5)}, 9)
    assert msgspec.msgpack.decode(stored, type=StoredSummary) == summary
    assert msgspec.msgpack.encode(summary) == stored
    assert module.KIND == "summary.2"
    entry = bytes.fromhex("82a86d6573736167657391c4027b7da870726576696f7573a3616263")
    assert msgspec.msgpack.decode(entry, type=archive._Entry) == archive._Entry([b"{}"], "abc")
    assert msgspec.msgpack.encode(archive._Entry([b"{}"], "abc")) == entry
    packed = "28b52ffd241ce1000082a86d6573736167657391c4027b7da870726576696f7573a3616263b55f29d7"
    assert archive._unpacked(bytes.fromhex(packed)) == archive._Entry([b"{}"], "abc")
    assert archive._packed([archive._Entry([b"{}"], "abc")])[0].startswith(zstandard.FRAME_HEADER)
    assert archive._unpacked(zlib.compress(entry, 1)) == archive._Entry([b"{}"], "abc")
    assert (archive.FIRST_KIND, archive.KIND) == ("archive", "archive.2")
