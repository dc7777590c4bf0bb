"""Test timeouts and back-off for a store that is slow or fails."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import pytest

from proxy.store import Entry, StoreFailed, guarded
from proxy.store.guarded import FAILURES, FIRST_PAUSE, LONGEST_PAUSE, Guarded
from proxy.store.sqlite import SqliteStore
from proxy.telemetry.metrics import STORE_BREAKER, STORE_FAILURES


class Failing(SqliteStore):
    """A store in memory that fails, or hangs, on demand."""

    def __init__(self) -> None:
        super().__init__(None)
        self.hangs = False
        self.fails: tuple[str, ...] = ()
        self.asked = 0

    async def _meets(self, what: str) -> None:
        self.asked += 1
        if self.hangs:
            await asyncio.sleep(3600)
        if what in self.fails:
            raise StoreFailed("disk full")

    async def get_many(self, tenant: str, kind: str, keys: Sequence[str]) -> dict[str, bytes]:
        await self._meets("read")
        return await super().get_many(tenant, kind, keys)

    async def put_many(self, entries: Sequence[Entry], codec: str = "") -> None:
        await self._meets("write")
        await super().put_many(entries, codec)


Test = Callable[[Guarded, Failing, list[float]], Awaitable[None]]


def run(test: Test) -> None:
    async def whole() -> None:
        store, now = Failing(), [0.0]
        guard = Guarded(store, lambda: now[0])
        await test(guard, store, now)
        await guard.aclose()

    asyncio.run(whole())


async def failed_reads(guard: Guarded, count: int) -> None:
    for _ in range(count):
        with pytest.raises(StoreFailed):
            await guard.get("t", "summary", "k")


def test_nobody_waits_longer_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded, "READ_SECONDS", 0.05)
    monkeypatch.setattr(guarded, "WRITE_SECONDS", 0.05)

    async def test(guard: Guarded, store: Failing, now: list[float]) -> None:
        store.hangs = True
        began = time.monotonic()
        with pytest.raises(StoreFailed, match=r"0\.05 s"):
            await guard.get("t", "summary", "k")
        with pytest.raises(StoreFailed, match=r"0\.05 s"):
            await guard.put("t", "summary", "k", b"", 60)
        assert time.monotonic() - began < 5

    run(test)


def test_what_fails_again_and_again_is_left_alone_for_longer_and_longer() -> None:
    async def test(guard: Guarded, store: Failing, now: list[float]) -> None:
        before = STORE_FAILURES.labels(what="read")._value.get()
        store.fails = ("read",)
        await failed_reads(guard, FAILURES + 5)
        assert store.asked == FAILURES
        assert guard.failing
        assert STORE_FAILURES.labels(what="read")._value.get() == before + FAILURES
        pause, asked = FIRST_PAUSE, FAILURES
        for _ in range(6):
            now[0] += pause - 0.1
            await failed_reads(guard, 2)
            assert store.asked == asked
            now[0] += 0.2
            await failed_reads(guard, 2)
            asked += 1
            assert store.asked == asked
            pause = min(2 * pause, LONGEST_PAUSE)
        opened = STORE_BREAKER.labels(what="read", change="closed")._value.get()
        now[0] += LONGEST_PAUSE
        store.fails = ()
        assert await guard.get("t", "summary", "k") is None
        assert guard.failing == ()
        assert STORE_BREAKER.labels(what="read", change="closed")._value.get() == opened + 1

    run(test)


def test_a_full_disk_can_still_be_read() -> None:
    async def test(guard: Guarded, store: Failing, now: list[float]) -> None:
        await guard.put("t", "summary", "k", b"1", 60)
        store.fails = ("write",)
        for _ in range(FAILURES):
            with pytest.raises(StoreFailed):
                await guard.put("t", "summary", "k", b"2", 60)
        assert guard.failing == ("write",)
        assert await guard.get("t", "summary", "k") == b"1"

    run(test)


def test_a_store_that_hangs_is_closed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded, "CLOSING_SECONDS", 0.05)

    class Hanging(Failing):
        async def aclose(self) -> None:
            await asyncio.sleep(3600)

    async def test() -> None:
        await Guarded(Hanging()).aclose()

    asyncio.run(test())
