"""Test that what waits is written many at a time, again after a failure, and that a bad value fails alone."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest
from cachetools import LRUCache
from structlog.testing import capture_logs

from proxy.store import Entry, StoreFailed, tenant_cache
from proxy.store.interface import Refused
from proxy.store.tenant_cache import Codec, Place, TenantCache, Waiting
from tests.kit.engine import Plain


class Shelf(Plain):
    """A store that takes as long as ``gate``, and fails if a write has one of the ``bad`` keys."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[list[str]] = []
        self.bad: dict[str, Exception] = {}
        self.down = False
        self.gate: asyncio.Event | None = None

    async def put_many(self, entries: Sequence[Entry]) -> None:
        self.writes.append([entry.key for entry in entries])
        if self.gate is not None:
            await self.gate.wait()
        if self.down:
            raise StoreFailed("disk full")
        for entry in entries:
            if entry.key in self.bad:
                raise self.bad[entry.key]
        await super().put_many(entries)

    @property
    def keys(self) -> set[str]:
        return {key for _, _, key in self.entries}


def decode(raw: bytes) -> bytes:
    if raw.startswith(b"damaged"):
        raise ValueError("damaged")
    return raw


class Cache(TenantCache[bytes]):
    """A cache that records what it reports. Values have the sizes that the test gives them."""

    def __init__(self, store: Shelf | None, most: int = 10_000_000) -> None:
        self.failures: list[tuple[int, str]] = []
        self.dropped: list[str] = []
        self.damaged: list[Place] = []
        self.given_up = 0
        self.has_failed = asyncio.Event()
        super().__init__(
            store, "kind", Codec(self.encode, decode, damaged=(ValueError,), inline_bytes=1_000), LRUCache(100), most
        )

    def add(self, *keys: str, size: int = 1, tenant: str = "t") -> bool:
        return all(self.save((tenant, key), key.encode().ljust(size), 60) for key in keys)

    def encode(self, values: Sequence[bytes]) -> list[bytes]:
        return list(values)

    def _size(self, value: bytes) -> int:
        return len(value)

    def _failed(self, entries: int, reason: str) -> None:
        self.failures.append((entries, reason))
        self.has_failed.set()

    def _given_up(self, entries: int) -> None:
        self.given_up = entries

    def _unreadable(self, place: Place, error: Exception) -> None:
        self.damaged.append(place)

    def _ended(self, place: Place, waiting: Waiting[bytes], written: bool) -> None:
        if not written:
            self.dropped.append(place[1])


Test = Callable[[Cache, Shelf], Awaitable[None]]


def run(test: Test, most: int = 10_000_000) -> None:
    async def whole() -> None:
        shelf = Shelf()
        await test(Cache(shelf, most), shelf)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(whole())


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_cache, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(tenant_cache, "LONGEST_PAUSE", 0.02)


def numbered(count: int) -> list[str]:
    return [f"k{number}" for number in range(count)]


def test_what_waits_is_written_in_few_calls_by_one_task() -> None:
    async def test(cache: Cache, shelf: Shelf) -> None:
        for key in numbered(1_200):
            assert cache.add(key)
        assert len(asyncio.all_tasks()) == 2
        assert await cache.writes.drained()
        assert [len(keys) for keys in shelf.writes] == [500, 500, 200]
        assert shelf.keys == set(numbered(1_200))

    run(test)


def test_a_newer_value_replaces_one_that_waits() -> None:
    async def test(cache: Cache, shelf: Shelf) -> None:
        shelf.gate = asyncio.Event()
        cache.save(("t", "k"), b"one".ljust(100), 60)
        await asyncio.sleep(2 * tenant_cache.GATHER_SECONDS)
        cache.save(("t", "k"), b"two".ljust(50), 60)
        cache.save(("t", "k"), b"three".ljust(70), 60)
        assert (cache.get("t", "k"), cache.writes.bytes, len(cache.writes)) == (b"three".ljust(70), 70, 1)
        shelf.gate.set()
        assert await cache.writes.drained()
        assert list(shelf.entries.values()) == [b"three".ljust(70)]
        assert (cache.writes.bytes, len(shelf.writes)) == (0, 2)

    run(test)


def test_there_is_no_room_over_the_maximum_but_for_a_single_value() -> None:
    async def test(cache: Cache, shelf: Shelf) -> None:
        assert cache.add("large", size=5_000)
        assert not cache.add("small", size=1)
        assert await cache.writes.drained()
        assert cache.add("one", "two", size=500)
        assert not cache.add("three")
        assert await cache.writes.drained()
        assert shelf.keys == {"large", "one", "two"}

    run(test, most=1_000)


def test_a_store_that_was_down_gets_everything_when_it_works() -> None:
    async def test(cache: Cache, shelf: Shelf) -> None:
        shelf.down = True
        cache.add(*numbered(700))
        assert not await cache.writes.drained(0.2)
        assert cache.failures[0] == (500, "disk full")
        assert len(cache.writes) == 700
        shelf.down = False
        assert await cache.writes.drained()
        assert shelf.keys == set(numbered(700))
        assert cache.dropped == []

    run(test)


@pytest.mark.parametrize("error", [Refused("too large"), StoreFailed("said no"), LookupError("a fault of ours")])
def test_a_bad_value_fails_alone_and_all_others_are_written(error: Exception) -> None:
    async def test(cache: Cache, shelf: Shelf) -> None:
        shelf.bad = {"k7": error, "k511": error}
        with capture_logs() as logs:
            cache.add(*numbered(600))
            while shelf.keys != {*numbered(600)} - {"k7", "k511"}:
                await cache.writes.drained(0.01)
            while len(cache.writes):  # the store takes other values, so those that fail alone again are bad
                cache.add("later")
                await cache.writes.drained(0.05)
        assert {"k7", "k511"}.isdisjoint(shelf.keys)
        assert sorted(cache.dropped) == ["k511", "k7"]
        assert len(cache.writes) == cache.writes.bytes == 0
        assert {line["event"] for line in logs} == ({"store.write_failed"} if isinstance(error, LookupError) else set())

    run(test)


def test_a_value_that_cannot_be_encoded_is_dropped_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(cache: Cache, values: Sequence[bytes]) -> list[bytes]:
        if b"k3" in values:
            raise ValueError("a fault of ours")
        return list(values)

    monkeypatch.setattr(Cache, "encode", encode)

    async def test(cache: Cache, shelf: Shelf) -> None:
        with capture_logs() as logs:
            cache.add(*numbered(9))
            assert await cache.writes.drained()
        assert shelf.keys == set(numbered(9)) - {"k3"}
        assert cache.dropped == ["k3"]
        assert {(line["event"], line["log_level"]) for line in logs} == {("store.write_failed", "error")}

    run(test)


def test_who_waits_for_a_value_does_not_wait_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_cache, "GATHER_SECONDS", 3_600.0)

    async def test(cache: Cache, shelf: Shelf) -> None:
        cache.add("a")
        await asyncio.sleep(0)
        assert await cache.writes.written(("t", "a"))
        cache.add("b")
        await cache.aclose()
        assert shelf.writes == [["a"], ["b"]]

    run(test)


def test_forgotten_tenants_leave_nothing_that_waits() -> None:
    async def test(cache: Cache, shelf: Shelf) -> None:
        shelf.gate = asyncio.Event()
        cache.add("first", tenant="a")
        await asyncio.sleep(2 * tenant_cache.GATHER_SECONDS)
        cache.add("k", tenant="a")
        cache.add("k", tenant="b")
        assert cache.forget(lambda tenant: tenant == "a") == {"a"}
        assert (len(cache.writes), cache.writes.bytes) == (1, 1)
        shelf.gate.set()
        await cache.settled()
        assert await cache.writes.drained()
        assert {(tenant, key) for tenant, _, key in shelf.entries} == {("a", "first"), ("b", "k")}
        assert shelf.writes == [["first"], ["k"]]

    run(test)


def test_requests_wait_for_a_writer_that_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_cache, "LATE_SECONDS", 0.0)

    async def test(cache: Cache, shelf: Shelf) -> None:
        await cache.writes.room()
        shelf.gate = asyncio.Event()
        cache.add("k")
        await asyncio.sleep(0.01)
        waiting = asyncio.create_task(cache.writes.room())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        shelf.gate.set()
        await waiting
        assert shelf.keys == {"k"}

    run(test)


def test_no_request_waits_for_a_writer_that_is_in_time_or_for_a_store_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(cache: Cache, shelf: Shelf) -> None:
        shelf.gate = asyncio.Event()
        cache.add("k")
        await cache.writes.room()
        assert shelf.keys == set()
        monkeypatch.setattr(tenant_cache, "LATE_SECONDS", 0.0)
        monkeypatch.setattr(tenant_cache, "STUCK_SECONDS", 0.01)
        await cache.writes.room()  # it hangs
        shelf.down = True
        shelf.gate.set()
        assert not await cache.writes.drained(0.05)
        monkeypatch.setattr(tenant_cache, "STUCK_SECONDS", 60.0)
        await cache.writes.room()
        shelf.down = False
        assert await cache.writes.drained()

    run(test)


def test_closing_writes_what_waits_and_reports_what_it_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_cache, "LONGEST_PAUSE", 60.0)
    monkeypatch.setattr(tenant_cache, "FIRST_PAUSE", 60.0)

    async def test(cache: Cache, shelf: Shelf) -> None:
        shelf.down = True
        cache.add(*numbered(10))
        assert await cache.has_failed.wait()
        shelf.down = False
        await cache.aclose()  # it doesn't wait for the pause
        assert cache.given_up == 0
        assert shelf.keys == set(numbered(10))
        monkeypatch.setattr(tenant_cache, "CLOSING_SECONDS", 0.05)
        shelf.down = True
        cache.add("late")
        await cache.aclose()
        assert cache.given_up == 1

    run(test)


def test_values_are_found_in_memory_among_those_that_wait_and_in_the_store() -> None:
    async def test(cache: Cache, shelf: Shelf) -> None:
        shelf.gate = asyncio.Event()
        cache.add("waits")
        cache.remember(("t", "remembered"), b"1")
        assert (cache.get("t", "waits"), cache.get("t", "remembered"), cache.get("t", "no")) == (b"waits", b"1", None)
        shelf.gate.set()
        assert await cache.writes.drained()
        assert (cache.get("t", "waits"), await cache.read("t", "waits")) == (None, b"waits")
        assert await cache.read("u", "waits") is None
        assert cache.forget(lambda tenant: tenant == "t") == {"t"}
        assert cache.get("t", "remembered") is None

    run(test)


@pytest.mark.parametrize("size", [10, 2_000])
def test_a_damaged_value_counts_as_missing_and_is_reported(size: int) -> None:
    async def test(cache: Cache, shelf: Shelf) -> None:
        await shelf.put_many([Entry("t", "kind", key, key.encode().ljust(size), 60) for key in ("good", "damaged")])
        places = [("t", "good"), ("t", "damaged"), ("t", "missing")]
        assert await cache.read_many("t", places) == {("t", "good"): b"good".ljust(size)}
        assert cache.damaged == [("t", "damaged")]

    run(test)


def test_a_caller_can_wait_until_a_value_is_written_but_not_for_a_store_that_fails() -> None:
    async def test(cache: Cache, shelf: Shelf) -> None:
        assert await cache.writes.written(("t", "never saved"))
        cache.add("k")
        assert await cache.writes.written(("t", "k"))
        assert shelf.keys == {"k"}
        shelf.down = True
        cache.add("later")
        assert not await cache.writes.written(("t", "later"))
        assert not await cache.writes.written(("t", "later"))
        shelf.down = False
        assert await cache.writes.drained()
        cache.add("last")
        assert await cache.writes.written(("t", "last"))

    run(test)


def test_nothing_is_written_if_all_was_forgotten_before_the_write() -> None:
    async def test(cache: Cache, shelf: Shelf) -> None:
        cache.add("k")
        await asyncio.sleep(0)  # the write waits for more values
        assert cache.forget(lambda tenant: True) == {"t"}
        await asyncio.sleep(2 * tenant_cache.GATHER_SECONDS)
        assert shelf.writes == []

    run(test)
