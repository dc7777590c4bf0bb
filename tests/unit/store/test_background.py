"""Test that what waits is written many at a time, again after a failure, and that a bad value fails alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest
from structlog.testing import capture_logs

from proxy.store import Entry, StoreFailed, background
from proxy.store.background import Place, Waiting, WriteBehind
from proxy.store.interface import Refused
from proxy.telemetry.metrics import REGISTRY
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


class Writer(WriteBehind[bytes]):
    """A writer that records what it reports."""

    def __init__(self, store: Shelf, most: int = 10_000_000) -> None:
        self.failures: list[tuple[int, str]] = []
        self.dropped: list[str] = []
        self.has_failed = asyncio.Event()
        super().__init__(store, "kind", list, most, self._report, self._note)

    def _report(self, entries: int, reason: str) -> None:
        self.failures.append((entries, reason))
        self.has_failed.set()

    def _note(self, place: Place, waiting: Waiting[bytes], written: bool) -> None:
        if not written:
            self.dropped.append(place[1])

    def add(self, *keys: str, size: int = 1, tenant: str = "t") -> bool:
        return all(self.put((tenant, key), key.encode(), size, 60) for key in keys)


Test = Callable[[Writer, Shelf], Awaitable[None]]


def run(test: Test, most: int = 10_000_000) -> None:
    async def whole() -> None:
        shelf = Shelf()
        await test(Writer(shelf, most), shelf)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(whole())


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(background, "LONGEST_PAUSE", 0.02)


def numbered(count: int) -> list[str]:
    return [f"k{number}" for number in range(count)]


def test_what_waits_is_written_in_few_calls_by_one_task() -> None:
    async def test(writer: Writer, shelf: Shelf) -> None:
        for key in numbered(1_200):
            assert writer.add(key)
        assert len(asyncio.all_tasks()) == 2
        assert await writer.drained()
        assert [len(keys) for keys in shelf.writes] == [500, 500, 200]
        assert shelf.keys == set(numbered(1_200))

    run(test)


def test_large_values_are_written_in_more_calls() -> None:
    async def test(writer: Writer, shelf: Shelf) -> None:
        writer.add(*numbered(5), size=2_000_000)
        assert await writer.drained()
        assert [len(keys) for keys in shelf.writes] == [2, 2, 1]

    run(test)


def test_a_newer_value_replaces_one_that_waits() -> None:
    async def test(writer: Writer, shelf: Shelf) -> None:
        shelf.gate = asyncio.Event()
        writer.put(("t", "k"), b"one", 100, 60)
        await asyncio.sleep(0)
        writer.put(("t", "k"), b"two", 50, 60)
        writer.put(("t", "k"), b"three", 70, 60)
        assert (writer.get(("t", "k")), writer.bytes, len(writer)) == (b"three", 70, 1)
        shelf.gate.set()
        assert await writer.drained()
        assert list(shelf.entries.values()) == [b"three"]
        assert (writer.bytes, len(shelf.writes)) == (0, 2)

    run(test)


def test_there_is_no_room_over_the_maximum_but_for_a_single_value() -> None:
    async def test(writer: Writer, shelf: Shelf) -> None:
        assert writer.add("large", size=5_000)
        assert not writer.add("small", size=1)
        assert await writer.drained()
        assert writer.add("one", "two", size=500)
        assert not writer.add("three")
        assert await writer.drained()
        assert shelf.keys == {"large", "one", "two"}

    run(test, most=1_000)


def test_a_store_that_was_down_gets_everything_when_it_works() -> None:
    async def test(writer: Writer, shelf: Shelf) -> None:
        shelf.down = True
        writer.add(*numbered(700))
        assert not await writer.drained(0.2)
        assert writer.failures[0] == (500, "disk full")
        assert len(writer) == 700
        shelf.down = False
        assert await writer.drained()
        assert shelf.keys == set(numbered(700))
        assert writer.dropped == []

    run(test)


@pytest.mark.parametrize("error", [Refused("too large"), StoreFailed("said no"), LookupError("a fault of ours")])
def test_a_bad_value_fails_alone_and_all_others_are_written(error: Exception) -> None:
    async def test(writer: Writer, shelf: Shelf) -> None:
        shelf.bad = {"k7": error, "k511": error}
        with capture_logs() as logs:
            writer.add(*numbered(600))
            while shelf.keys != {*numbered(600)} - {"k7", "k511"}:
                await writer.drained(0.01)
            while len(writer):  # the store takes other values, so those that fail alone again are bad
                writer.add("later")
                await writer.drained(0.05)
        assert {"k7", "k511"}.isdisjoint(shelf.keys)
        assert sorted(writer.dropped) == ["k511", "k7"]
        assert len(writer) == writer.bytes == 0
        assert {line["event"] for line in logs} == ({"store.write_failed"} if isinstance(error, LookupError) else set())

    run(test)


def test_a_value_that_cannot_be_encoded_is_dropped_alone() -> None:
    def pack(values: Sequence[bytes]) -> list[bytes]:
        if b"k3" in values:
            raise ValueError("a fault of ours")
        return list(values)

    async def test(writer: Writer, shelf: Shelf) -> None:
        writer._pack = pack
        with capture_logs() as logs:
            writer.add(*numbered(9))
            assert await writer.drained()
        assert shelf.keys == set(numbered(9)) - {"k3"}
        assert writer.dropped == ["k3"]
        assert {(line["event"], line["log_level"]) for line in logs} == {("store.write_failed", "error")}

    run(test)


def test_forgotten_tenants_leave_nothing_that_waits() -> None:
    async def test(writer: Writer, shelf: Shelf) -> None:
        shelf.gate = asyncio.Event()
        writer.add("first", tenant="a")
        await asyncio.sleep(0)
        writer.add("k", tenant="a")
        writer.add("k", tenant="b")
        assert writer.forget(lambda tenant: tenant == "a") == {"a"}
        assert (len(writer), writer.bytes) == (1, 1)
        shelf.gate.set()
        await writer.settled()
        assert await writer.drained()
        assert {(tenant, key) for tenant, _, key in shelf.entries} == {("a", "first"), ("b", "k")}
        assert shelf.writes == [["first"], ["k"]]

    run(test)


def test_requests_wait_for_a_writer_that_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "LATE_SECONDS", 0.0)

    async def test(writer: Writer, shelf: Shelf) -> None:
        await writer.room()
        shelf.gate = asyncio.Event()
        writer.add("k")
        await asyncio.sleep(0.01)
        waiting = asyncio.create_task(writer.room())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        shelf.gate.set()
        await waiting
        assert shelf.keys == {"k"}

    run(test)


def test_no_request_waits_for_a_writer_that_is_in_time_or_for_a_store_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(writer: Writer, shelf: Shelf) -> None:
        shelf.gate = asyncio.Event()
        writer.add("k")
        await writer.room()
        assert shelf.keys == set()
        monkeypatch.setattr(background, "LATE_SECONDS", 0.0)
        monkeypatch.setattr(background, "STUCK_SECONDS", 0.01)
        await writer.room()  # it hangs
        shelf.down = True
        shelf.gate.set()
        assert not await writer.drained(0.05)
        monkeypatch.setattr(background, "STUCK_SECONDS", 60.0)
        await writer.room()
        shelf.down = False
        assert await writer.drained()

    run(test)


def test_closing_writes_what_waits_and_reports_what_it_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "LONGEST_PAUSE", 60.0)
    monkeypatch.setattr(background, "FIRST_PAUSE", 60.0)

    async def test(writer: Writer, shelf: Shelf) -> None:
        shelf.down = True
        writer.add(*numbered(10))
        assert await writer.has_failed.wait()
        shelf.down = False
        assert await writer.aclose() == 0, "it doesn't wait for the pause"
        assert shelf.keys == set(numbered(10))
        monkeypatch.setattr(background, "CLOSING_SECONDS", 0.05)
        shelf.down = True
        writer.add("late")
        assert await writer.aclose() == 1

    run(test)


def test_a_gauge_shows_what_waits() -> None:
    def gauge() -> float | None:
        return REGISTRY.get_sample_value("compaction_store_waiting", {"kind": "kind"})

    async def test(writer: Writer, shelf: Shelf) -> None:
        shelf.down = True
        writer.add(*numbered(3))
        assert await writer.has_failed.wait()
        await asyncio.sleep(0)
        assert gauge() == 3
        shelf.down = False
        assert await writer.drained()
        assert gauge() == 0

    run(test)
