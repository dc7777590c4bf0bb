"""Leases on real stores, with workers that are paused for longer than a lease lasts."""

import asyncio
import importlib.util
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from proxy.store import ManagedStore, open_store
from proxy.store.redis_store import RedisStore
from proxy.store.sealing import SealedStore
from proxy.store.sqlite import SqliteStore
from proxy.summary import times
from proxy.summary.single_flight import NothingToAsk, Progress, Summaries
from proxy.summary.store import LEASES, Checkpoint, Lease, StoredSummary
from tests.kit.redis_server import RedisServer
from tests.kit.stores import Clock, with_store
from tests.kit.summary_conversation import SimpleOrder

ENCRYPTED = [
    False,
    pytest.param(True, marks=pytest.mark.skipif(not importlib.util.find_spec("cryptography"), reason="")),
]
KEY = b"k" * 32


class Paused:
    """A worker's view of a store. ``go`` resumes a worker that pauses before it renews its lease."""

    def __init__(self, store: ManagedStore) -> None:
        self._store = store
        self.pausing, self.go = asyncio.Event(), asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def replace(self, *arguments: Any) -> bool:
        self.pausing.set()
        await self.go.wait()
        return await self._store.replace(*arguments)


class Slow:
    """A worker's view of a store. ``go`` lets it take a lease."""

    def __init__(self, store: ManagedStore) -> None:
        self._store = store
        self.go = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def add(self, *arguments: Any) -> bytes:
        await self.go.wait()
        return await self._store.add(*arguments)


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, no lease expires on its own, and no worker starts without one."""
    monkeypatch.setattr(times, "LEASE", 600.0)
    monkeypatch.setattr(times, "TAKING", 60.0)


@pytest.fixture(params=["sqlite", "redis"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Callable[[], Any], Callable[[], object]]:
    """Return a function that opens a store, and one that ends its leases."""
    if request.param == "sqlite":
        clock = Clock()

        def later() -> None:
            clock.now += times.LEASE

        return lambda: SqliteStore(tmp_path / "store.db", clock=clock), later
    redis: RedisServer = request.getfixturevalue("redis")

    def expire() -> None:
        with redis.client() as client:
            for key in client.keys("compaction:entry:*"):
                client.unlink(key)

    return lambda: RedisStore(redis.url), expire


@pytest.mark.parametrize("encrypted", ENCRYPTED)
def test_a_worker_that_was_paused_leaves_the_lease_of_another_one_alone(
    backend: tuple[Callable[[], Any], Callable[[], object]], encrypted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, end = backend
    monkeypatch.setattr(times, "RENEWING", 0.001)

    async def overtaken(store: ManagedStore) -> None:
        paused = Paused(store)
        first, second, third = Lease(paused, "t", "k"), Lease(store, "t", "k"), Lease(store, "t", "k")
        assert [await first.take(), await second.take()] == [True, False]
        await paused.pausing.wait()
        end()
        assert await second.take()
        token = await store.get("t", LEASES, "k")
        with capture_logs() as logs:
            paused.go.set()
            assert first._renewing is not None
            await first._renewing
        assert [line["event"] for line in logs] == ["summary.lease_lost"]
        await first.release()
        assert await store.get("t", LEASES, "k") == token
        assert not await third.take()
        await second.release()
        assert await third.take()
        await third.release()
        assert await store.get("t", LEASES, "k") is None

    async def alone(store: ManagedStore) -> None:
        paused = Paused(store)
        first, second = Lease(paused, "t", "k"), Lease(store, "t", "k")
        assert await first.take()
        await paused.pausing.wait()
        end()
        assert await store.get("t", LEASES, "k") is None
        paused.go.set()
        while await store.get("t", LEASES, "k") is None:  # noqa: ASYNC110 - the store has no event
            await asyncio.sleep(0)
        assert not await second.take()
        await first.release()

    with_store(lambda: SealedStore(make(), [KEY]) if encrypted else make(), overtaken, alone)


def test_a_worker_keeps_a_lease_that_a_slow_store_gives_it_late(
    backend: tuple[Callable[[], Any], Callable[[], object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, _ = backend
    monkeypatch.setattr(times, "TAKING", 0.001)

    async def test(store: ManagedStore) -> None:
        slow = Slow(store)
        first, second = Lease(slow, "t", "k"), Lease(store, "t", "k")
        assert await first.take(), "it doesn't wait for the store any longer"
        assert (first.held, first.pending) == (False, True)
        slow.go.set()
        while first.pending:  # noqa: ASYNC110 - the lease has no event
            await asyncio.sleep(0)
        assert first.held
        monkeypatch.setattr(times, "TAKING", 60.0)
        assert not await second.take()
        await first.release()
        assert await second.take()
        await second.release()

    async def cancelled(store: ManagedStore) -> None:
        monkeypatch.setattr(times, "TAKING", 0.001)
        slow = Slow(store)
        first = Lease(slow, "t", "k")
        assert await first.take()
        first.lapse()
        while first.pending:  # noqa: ASYNC110 - the lease has no event
            await asyncio.sleep(0)
        assert not first.held

    with_store(make, test, cancelled)


def test_of_several_processes_that_find_a_damaged_entry_all_use_the_same_new_one(
    backend: tuple[Callable[[], Any], Callable[[], object]],
) -> None:
    pytest.importorskip("cryptography")
    make, _ = backend

    async def test(store: Any) -> None:
        row = SealedStore(store, [KEY])._codecs[0].row("t", "summary", "k")
        await store.put(*row, b"damaged", 60)

        async def add(number: int) -> bytes:
            own = make()
            try:
                return await SealedStore(own, [KEY]).add("t", "summary", "k", b"%d" % number, 60)
            finally:
                await own.aclose()

        added = await asyncio.gather(*map(add, range(5)))
        assert set(added) == {await SealedStore(store, [KEY]).get("t", "summary", "k")}

    tests: Callable[[Any], Awaitable[None]] = test
    with_store(make, tests)


@pytest.mark.anyio
@pytest.mark.parametrize("passes", range(6))
async def test_a_caller_may_arrive_at_any_moment_of_a_task_that_ends_without_a_result(passes: int) -> None:
    store = open_store("sqlite://")
    summaries = Summaries(store)
    calls = 0

    async def make(previous: StoredSummary | None, start: int, progress: Progress) -> StoredSummary:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise NothingToAsk
        return StoredSummary("made", b"{}", {})

    wanted = SimpleOrder("t", [Checkpoint(1, "key")], make)
    summaries.begin(wanted)
    while not calls:  # noqa: ASYNC110 - the task has no event
        await asyncio.sleep(0)
    for _ in range(passes):
        await asyncio.sleep(0)
    assert (await summaries.obtain(wanted))[0].text == "made"
    assert calls == 2
    await summaries.aclose()
    await store.aclose()
