"""Two versions of the proxy on one store, with different formats of entries."""

import asyncio
import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from proxy.records import redis as redis_records
from proxy.records.model import RecordQuery
from proxy.records.redis import RedisRecords
from proxy.store import ManagedStore
from proxy.store.forgetting import forget
from proxy.store.redis_store import RedisStore
from proxy.store.sealing import SealedStore
from proxy.store.sqlite import SqliteStore
from proxy.summary import store as module
from proxy.summary.single_flight import Progress, Summaries
from proxy.summary.store import Checkpoint, StoredSummary
from tests.kit.records import record
from tests.kit.redis_server import RedisServer
from tests.kit.stores import with_store
from tests.kit.summary_conversation import SimpleOrder

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
            return (await replica.obtain(SimpleOrder("team:a", [Checkpoint(1, "k")], make)))[0].text
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
