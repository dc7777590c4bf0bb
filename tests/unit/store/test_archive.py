"""Test that removed messages are written once, found by their tenant only, and never fail a request."""

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from proxy.store import Entry, Store, StoreFailed, tenant_cache
from proxy.store import archive as module
from proxy.store.archive import FIRST_KIND, KIND, Archive, Found, Removed
from proxy.telemetry.metrics import REGISTRY
from tests.kit.stores import Clock

MONTH = 30 * 86_400.0


def message(text: str) -> bytes:
    """A message in a spelling that no encoder gives."""
    return b'{ "role":"user",  "content":"\\u00e9 %s" }' % text.encode()


def removed(digit: str, *texts: str, previous: str | None = None) -> Removed:
    """An entry whose id is one digit, repeated."""
    return Removed(digit * 20, tuple(message(text) for text in texts), previous and previous * 20)


A, B, C = removed("a", "one", "two"), removed("b", "three", previous="a"), removed("c", "four", previous="b")


def texts(*words: str) -> list[bytes]:
    return [message(word) for word in words]


class Shelf(Store):
    """A store in memory that can fail, and be slow."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, str, str], bytes] = {}
        self.puts: list[tuple[str, str, float]] = []
        self.failing: Exception | None = None
        self.gate: asyncio.Event | None = None

    async def get_many(self, tenant: str, kind: str, keys: Sequence[str]) -> dict[str, bytes]:
        if self.failing is not None:
            raise self.failing
        return {key: self.kept[tenant, kind, key] for key in keys if (tenant, kind, key) in self.kept}

    async def put_many(self, entries: Sequence[Entry]) -> None:
        self.puts += [(entry.tenant, entry.key[0], entry.seconds) for entry in entries]
        if self.gate is not None:
            await self.gate.wait()
        if self.failing is not None:
            raise self.failing
        self.kept |= {(entry.tenant, entry.kind, entry.key): entry.value for entry in entries}

    async def add(self, tenant: str, kind: str, key: str, value: bytes, seconds: float) -> bytes:
        raise NotImplementedError

    async def replace(self, tenant: str, kind: str, key: str, old: bytes, new: bytes, seconds: float) -> bool:
        raise NotImplementedError

    async def aclose(self) -> None:
        pass

    def written(self) -> str:
        """The first digits of what was put since the last time, in order."""
        put, self.puts = self.puts, []
        return "".join(key for _, key, _ in put)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_cache, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(tenant_cache, "LONGEST_PAUSE", 0.02)


def run(test: Callable[[Archive, Shelf, Clock], Awaitable[None]]) -> None:
    async def whole() -> None:
        shelf, clock = Shelf(), Clock()
        await test(Archive(shelf, clock), shelf, clock)

    asyncio.run(whole())


async def kept(archive: Archive, entries: Sequence[Removed], seconds: float = MONTH, tenant: str = "t") -> None:
    archive.keep(tenant, entries, seconds)
    assert await archive.writes.drained()


def counted(outcome: str) -> float:
    return REGISTRY.get_sample_value("compaction_archive_entries_total", {"outcome": outcome}) or 0.0


def named(logs: Sequence[Any], event: str) -> list[Any]:
    return [entry for entry in logs if entry["event"] == event]


def test_what_was_kept_is_found_in_its_own_spelling() -> None:
    async def test(archive: Archive, shelf: Shelf, clock: Clock) -> None:
        await kept(archive, [A])
        assert await archive.fetch("t", A.id) == Found(texts("one", "two"), complete=True)
        assert await archive.fetch("t", C.id) is None
        assert shelf.puts == [("t", "a", MONTH)]

    run(test)


def test_each_entry_is_written_once_by_a_process_and_tenant() -> None:
    async def test(archive: Archive, shelf: Shelf, clock: Clock) -> None:
        archive.keep("t", [A, B, B], MONTH)
        archive.keep("t", [A, B], MONTH)  # while they are being written
        await archive.writes.drained()
        assert shelf.written() == "ab"
        await kept(archive, [A, B, C])
        assert shelf.written() == "c"
        await kept(archive, [A, B, C])
        await kept(archive, [])
        assert shelf.written() == ""
        await kept(archive, [A], tenant="u")
        assert shelf.puts == [("u", "a", MONTH)]
        await kept(Archive(shelf), [A])
        assert shelf.written() == "aa"

    run(test)


def test_an_entry_in_use_is_written_anew_at_half_of_its_time() -> None:
    async def test(archive: Archive, shelf: Shelf, clock: Clock) -> None:
        await kept(archive, [A], 100)
        await kept(archive, [B], 1000)
        clock.now += 49
        await kept(archive, [A, B], 100)
        assert shelf.written() == "ab"
        clock.now += 2
        await kept(archive, [A, B], 100)
        assert shelf.written() == "a"
        clock.now += 48
        await kept(archive, [A], 100)
        assert shelf.written() == "", "the time begins anew"

    run(test)


def test_a_broken_chain_says_so() -> None:
    async def test(archive: Archive, shelf: Shelf, clock: Clock) -> None:
        await kept(archive, [A, C])
        assert await archive.fetch("t", C.id) == Found(texts("four"), complete=False)
        await kept(archive, [B])
        assert (await archive.fetch("t", C.id)) == Found(texts("one", "two", "three", "four"), complete=True)
        circle = [removed("d", "five", previous="e"), removed("e", "six", previous="d")]
        await kept(archive, circle)
        assert await archive.fetch("t", "d" * 20) == Found(texts("six", "five"), complete=False)

    run(test)


@pytest.mark.parametrize(
    "value",
    [b"", b"garbage", module._packed([A])[0][:-5], b"\x28\xb5\x2f\xfd" + b"\xff" * 12, zlib.compress(b"\xc1"),
     zlib.compress(msgspec.msgpack.encode({"messages": 5})),
     zlib.compress(b"\x82\xa8messages\x90\xa8previous\xa2\xff\xfe")],
)  # fmt: skip
def test_what_cannot_be_read_counts_as_missing_and_is_written_again(value: bytes) -> None:
    async def test(archive: Archive, shelf: Shelf, clock: Clock) -> None:
        await kept(archive, [A, B])
        shelf.kept["t", KIND, A.id] = value
        with capture_logs() as logs:
            assert await archive.fetch("t", A.id) is None
            assert await archive.fetch("t", B.id) == Found(texts("three"), complete=False)
        assert len(named(logs, "archive.entry_unreadable")) == 2
        await kept(archive, [A, B])
        assert await archive.fetch("t", B.id) == Found(texts("one", "two", "three"), complete=True)

    run(test)


def test_what_a_failing_store_did_not_take_is_written_as_soon_as_it_works() -> None:
    async def test(archive: Archive, shelf: Shelf, clock: Clock) -> None:
        shelf.failing = StoreFailed("disk full")
        failed, dropped, written = counted("failed"), counted("dropped"), counted("written")
        with capture_logs() as logs:
            archive.keep("t", [A, B, C], MONTH)
            assert not await archive.writes.drained(0.3)
        lines = named(logs, "archive.write_failed")
        assert (lines[0]["reason"], lines[0]["entries"]) == ("disk full", 3)
        assert len(lines) > 2
        assert await archive.fetch("t", C.id) == Found(texts("one", "two", "three", "four"), complete=True)
        shelf.failing = None
        assert await archive.writes.drained()
        assert await archive.fetch("t", C.id) == Found(texts("one", "two", "three", "four"), complete=True)
        assert (counted("dropped") - dropped, counted("written") - written) == (0, 3)
        assert counted("failed") - failed == sum(line["entries"] for line in lines)
        assert len(asyncio.all_tasks()) == 1

    run(test)


def test_entries_of_version_0_1_are_read() -> None:
    async def test(archive: Archive, shelf: Shelf, clock: Clock) -> None:
        stored = msgspec.msgpack.encode({"messages": texts("one", "two"), "previous": None})
        shelf.kept["t", FIRST_KIND, A.id] = zlib.compress(stored, 1)
        await kept(archive, [B])
        assert await archive.fetch("t", B.id) == Found(texts("one", "two", "three"), complete=True)

    run(test)


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PENDING_BYTES", 1000)
    large, small, late = removed("1", "x" * 600), removed("2", "y" * 200), removed("3", "z" * 600)

    async def test(archive: Archive, shelf: Shelf, clock: Clock) -> None:
        skipped = counted("skipped")
        shelf.gate = asyncio.Event()
        with capture_logs() as logs:
            archive.keep("t", [large, late, small], MONTH)
            archive.keep("u", [late], MONTH)
        assert [entry["entries"] for entry in named(logs, "archive.skipped")] == [1, 1]
        assert counted("skipped") - skipped == 2
        shelf.gate.set()
        await archive.writes.drained()
        assert shelf.written() == "12"
        await kept(archive, [large, late, small])
        assert shelf.written() == "3", "room again, so it is written now"
        await kept(archive, [removed("4", "x" * 5000)])
        assert shelf.written() == "4", "one that is larger than the bound is written where it waits alone"

    run(test)
