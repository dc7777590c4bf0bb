"""Test that items are remembered within bounds, written in the background, and read at once."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from proxy.store import Entry, StoreFailed
from proxy.store.items import KIND, ItemMemory
from proxy.store.sqlite import SqliteStore
from tests.kit.stores import Clock

MONTH = 30 * 86_400.0


class Watched(SqliteStore):
    """A store in memory that records reads and writes, and can fail."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(None, clock=clock)
        self.read: list[Sequence[str]] = []
        self.written: list[str] = []
        self.fails = False

    async def get_many(self, tenant: str, kind: str, keys: Sequence[str]) -> dict[str, bytes]:
        self.read.append(keys)
        if self.fails:
            raise StoreFailed("disk full")
        return await super().get_many(tenant, kind, keys)

    async def put_many(self, entries: Sequence[Entry], codec: str = "") -> None:
        if self.fails:
            raise StoreFailed("disk full")
        self.written += [entry.key for entry in entries]
        await super().put_many(entries, codec)


def run(test: Callable[[Watched, Clock], Awaitable[None]]) -> None:
    async def whole() -> None:
        clock = Clock(1_000_000.0)
        store = Watched(clock)
        try:
            await test(store, clock)
        finally:
            await store.aclose()

    asyncio.run(whole())


def test_a_process_keeps_items_in_memory_and_others_read_all_at_once() -> None:
    async def test(store: Watched, clock: Clock) -> None:
        first, second = ItemMemory(store, clock), ItemMemory(store, clock)
        for n in range(3):
            first.keep("a", f"msg_{n}", b"item %d" % n, MONTH)
        assert await first.find("a", ["msg_0", "msg_2"], MONTH) == {"msg_0": b"item 0", "msg_2": b"item 2"}
        assert store.read == []
        assert await first.writes.drained()
        found = await second.find("a", ["msg_0", "msg_1", "msg_9"], MONTH)
        assert found == {"msg_0": b"item 0", "msg_1": b"item 1"}
        assert store.read == [["msg_0", "msg_1", "msg_9"]]
        assert await second.find("b", ["msg_0"], MONTH) == {}
        assert await second.find("a", ["msg_0", "msg_1"], MONTH) == {"msg_0": b"item 0", "msg_1": b"item 1"}
        assert len(store.read) == 2, "the second time they are in memory"

    run(test)


def test_an_item_in_use_is_written_again_after_half_of_its_lifetime() -> None:
    async def test(store: Watched, clock: Clock) -> None:
        memory = ItemMemory(store, clock)
        memory.keep("a", "msg_0", b"item", MONTH)
        memory.keep("a", "msg_0", b"item", MONTH)
        await memory.find("a", ["msg_0"], MONTH)
        assert await memory.writes.drained()
        assert store.written == ["msg_0"]
        clock.now += 0.6 * MONTH
        other = ItemMemory(store, clock)
        assert await other.find("a", ["msg_0"], MONTH) == {"msg_0": b"item"}
        assert await other.writes.drained()
        assert store.written == ["msg_0", "msg_0"]
        clock.now += 0.6 * MONTH
        assert await ItemMemory(store, clock).find("a", ["msg_0"], MONTH) == {"msg_0": b"item"}
        clock.now += 1.1 * MONTH
        assert await ItemMemory(store, clock).find("a", ["msg_0"], MONTH) == {}

    run(test)


def test_an_id_of_several_items_is_forgotten() -> None:
    async def test(store: Watched, clock: Clock) -> None:
        memory = ItemMemory(store, clock)
        for item in (b"item", b"another", b"item"):
            memory.keep("a", "msg_0", item, MONTH)
        memory.keep("b", "msg_0", b"item", MONTH)
        assert await memory.find("a", ["msg_0"], MONTH) == {}
        assert await memory.find("b", ["msg_0"], MONTH) == {"msg_0": b"item"}
        assert await memory.writes.drained()
        assert await ItemMemory(store, clock).find("a", ["msg_0"], MONTH) == {}

    run(test)


def test_sizes_of_unknown_items_are_shared_equally() -> None:
    async def test(store: Watched, clock: Clock) -> None:
        memory = ItemMemory(store, clock)
        memory.note_size("a", ["msg_0", "msg_1"], 201)
        assert memory.sizes("a", ["msg_0", "msg_1", "msg_2"]) == {"msg_0": 100, "msg_1": 100}
        assert memory.sizes("b", ["msg_0"]) == {}

    run(test)


@pytest.mark.parametrize("value", [b"", b"no time", b"x\nitem", b"9" * 5_000 + b"\nitem"])
def test_a_damaged_entry_is_unknown(value: bytes) -> None:
    async def test(store: Watched, clock: Clock) -> None:
        await store.put("a", KIND, "msg_0", value, MONTH)
        assert await ItemMemory(store, clock).find("a", ["msg_0"], MONTH) == {}

    run(test)
