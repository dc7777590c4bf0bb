"""Test the values that processes share through one store."""

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import ParamSpec

import pytest
from structlog.testing import capture_logs

from proxy.limits import learned as limits
from proxy.limits.learned import LearnedLimit, LearnedLimits
from proxy.store import Entry, StoreFailed, tenant_cache
from proxy.store import replicated_map as shared
from proxy.store.replicated_map import FIRST_READ_SECONDS, name_of
from proxy.store.sqlite import SqliteStore

P = ParamSpec("P")

KEY = ("u", "m", "t")


class Slow(SqliteStore):
    """A store that takes its time to answer, or fails."""

    def __init__(self, path: Path, seconds: float = 0.0) -> None:
        super().__init__(path)
        self.seconds = seconds
        self.fails = False
        self.reads = 0

    async def get_many(self, tenant: str, kind: str, keys: Sequence[str]) -> dict[str, bytes]:
        self.reads += 1
        await asyncio.sleep(self.seconds)
        if self.fails:
            raise StoreFailed("gone")
        return await super().get_many(tenant, kind, keys)

    async def put_many(self, entries: Sequence[Entry], codec: str = "") -> None:
        if self.fails:
            raise StoreFailed("gone")
        await super().put_many(entries, codec)


def in_a_loop(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """The test in an event loop of its own."""

    @functools.wraps(test)
    def run(*arguments: P.args, **named: P.kwargs) -> None:
        async def whole() -> None:
            await test(*arguments, **named)

        asyncio.run(whole())

    return run


async def read(known: LearnedLimits) -> LearnedLimit | None:
    """Return the value after a read from the store, if a read is due."""
    task = known.first_read(*KEY)
    if task is not None:
        await task
    for _ in range(200):  # a refresh is nobody's to wait for
        await asyncio.sleep(0.005)
        if known.first_read(*KEY) is None:
            break
    return known.get(*KEY)


async def comes_true(what: Callable[[], Awaitable[bool]]) -> bool:
    """Whether it is true within a while, as long as that is on a busy machine."""
    for _ in range(6_000):
        if await what():
            return True
        await asyncio.sleep(0.005)
    return False


@in_a_loop
async def test_it_is_read_once_and_again_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Slow(tmp_path / "s.db")
    first, second = LearnedLimits(store), LearnedLimits(store)
    assert await read(second) is None
    first.learn(*KEY, LearnedLimit(total=8_000))
    await first.aclose()
    reads = store.reads
    for _ in range(20):
        assert await read(second) is None
    assert store.reads == reads
    monkeypatch.setattr(shared, "REFRESH_SECONDS", 0.0)
    second = LearnedLimits(store)
    assert await read(second) == LearnedLimit(total=8_000)
    first.confirm(*KEY, 20_000, 20_000, 1.0)
    await first.aclose()
    assert second.get(*KEY) == LearnedLimit(total=8_000)

    async def disproved() -> bool:
        second.first_read(*KEY)
        return second.get(*KEY) is None

    assert await comes_true(disproved), "what was disproved to one is disproved to all"
    await second.aclose()
    await store.aclose()


@in_a_loop
async def test_a_slow_store_is_waited_for_once_and_not_for_long(tmp_path: Path) -> None:
    store = Slow(tmp_path / "s.db", seconds=30)
    known = LearnedLimits(store)
    task = known.first_read(*KEY)
    assert task is not None
    await asyncio.wait({task}, timeout=FIRST_READ_SECONDS)
    assert not task.done()
    assert known.first_read(*KEY) is None, "the next request does not wait"
    started = time.perf_counter()
    await known.aclose()
    assert time.perf_counter() - started < tenant_cache.CLOSING_SECONDS, "reads are given up at the end"
    await store.aclose()


@in_a_loop
async def test_a_store_that_fails_costs_nothing_but_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "REFRESH_SECONDS", 0.0)
    store = Slow(tmp_path / "s.db")
    store.fails = True
    known = LearnedLimits(store)
    with capture_logs() as logs:
        assert await read(known) is None
        reads = store.reads
        known.learn(*KEY, LearnedLimit(total=8_000))

        async def tried() -> bool:
            return store.reads > reads and "shared.not_written" in {line["event"] for line in logs}

        assert await comes_true(tried)
        assert known.get(*KEY) == LearnedLimit(total=8_000)
    assert {line["event"] for line in logs} == {"shared.not_read", "shared.not_written", "limit.learned"}
    store.fails = False

    async def written() -> bool:
        known.first_read(*KEY)
        return await store.get(KEY[2], limits.KIND, name_of(*KEY[:2])) is not None

    assert await comes_true(written), "it is written once the store is back"
    await known.aclose()
    assert await read(LearnedLimits(store)) == LearnedLimit(total=8_000)
    await store.aclose()


@in_a_loop
async def test_what_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    store = Slow(tmp_path / "s.db")
    unlike = b'{"upstream": "u", "model": "m", "input": {"tokens": "many"}}'
    for value in (b"", b"{}", b"[1]", unlike, b"\xff", b'{"upstream": "\xff"}', b'{"x":' * 5_000):
        await store.put("t", limits.KIND, name_of("u", "m"), value, 60)
        known = LearnedLimits(store)
        with capture_logs() as logs:
            assert await read(known) is None
            known.learn(*KEY, LearnedLimit(total=8_000))
            await known.aclose()
        assert [line["event"] for line in logs] == ["shared.unreadable", "limit.learned"], "it is logged once"
        assert await read(LearnedLimits(store)) == LearnedLimit(total=8_000)
    await store.aclose()
