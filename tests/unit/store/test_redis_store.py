"""The store on a real Redis server: names, expiry, encryption, removal, and failures."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from proxy.store import ManagedStore, StoreFailed, open_store
from proxy.store.forgetting import forget, forgotten
from proxy.store.redis_store import KEYS, RedisStore
from proxy.store.sealing import SealedStore
from tests.kit.redis_server import RedisServer
from tests.kit.stores import with_store

KEY, NEW_KEY = b"k" * 32, b"n" * 32
ODD = "team:a*b?[c]\\:ü\n"
"""A tenant whose name has characters with a meaning in patterns and in keys."""


def run(server: RedisServer, *tests: Callable[[RedisStore], Awaitable[None]]) -> None:
    """Run tests one after the other, each with a store of its own on the same server."""
    with_store(lambda: RedisStore(server.url), *tests)


def sealed(server: RedisServer, *keys: bytes) -> ManagedStore:
    store = open_store(server.url, keys)
    assert isinstance(store, SealedStore) == bool(keys)
    return store


@pytest.mark.parametrize("keys", [(), (KEY,)])
def test_entries_are_found_by_tenant_kind_and_key(redis: RedisServer, keys: tuple[bytes, ...]) -> None:
    async def write(store: ManagedStore) -> None:
        await store.put(ODD, "summary", "k", b"one\x00\n\xff", 60)
        assert await store.get(ODD, "summary", "k") == b"one\x00\n\xff"
        for other in (("u", "summary", "k"), (ODD, "limit", "k"), (ODD, "summary", "j"), (f"{ODD}:", "summary", "k")):
            assert await store.get(*other) is None
        await store.put(ODD, "summary", "k", b"two", 60)
        assert await store.add(ODD, "summary", "k", b"three", 60) == b"two"
        assert await store.add(ODD, "making", "k", b"token", 60) == b"token"
        await store.delete(ODD, "making", "k")
        assert await store.add(ODD, "making", "k", b"next", 60) == b"next"
        await asyncio.gather(*(store.put("t", "item", f"{n}", b"%d" % n, 60 if n % 2 else -1) for n in range(2 * KEYS)))
        several = await store.get_many("t", "item", ["no", *map(str, range(2 * KEYS))])
        assert several == {f"{n}": b"%d" % n for n in range(1, 2 * KEYS, 2)}
        assert await store.get_many("t", "item", []) == {}

    async def read(store: ManagedStore) -> None:
        assert await store.get(ODD, "summary", "k") == b"two"
        (entry,) = await store.entries("summary")
        assert (entry.tenant, entry.key, entry.value) == (ODD, "k", b"two")
        assert 50 < entry.seconds <= 60

    with_store(lambda: sealed(redis, *keys), write, read)


def test_entries_end_with_their_time(redis: RedisServer) -> None:
    async def test(store: RedisStore) -> None:
        await store.put("t", "summary", "short", b"1", 0.05)
        await store.put("t", "summary", "long", b"2", 60)
        await asyncio.sleep(0.1)
        assert await store.get("t", "summary", "short") is None
        assert [entry.key for entry in await store.entries("summary")] == ["long"]
        assert await store.add("t", "summary", "short", b"3", 60) == b"3"
        await store.put("t", "summary", "gone", b"4", 0.01)
        await asyncio.sleep(0.05)
        await store.maintain()
        with redis.client() as client:
            assert client.zcard("compaction:index::summary") == 2

    run(redis, test)


def test_one_of_many_who_add_succeeds(redis: RedisServer) -> None:
    async def add(number: int) -> bytes:
        store = RedisStore(redis.url)
        try:
            return await store.add("t", "making", "k", b"%d" % number, 60)
        finally:
            await store.aclose()

    async def test(store: RedisStore) -> None:
        assert len(set(await asyncio.gather(*map(add, range(20))))) == 1

    run(redis, test)


@pytest.mark.parametrize("keys", [(), (KEY,)])
def test_a_forgotten_tenant_leaves_nothing_on_the_server(redis: RedisServer, keys: tuple[bytes, ...]) -> None:
    async def test(store: ManagedStore) -> None:
        for number in range(1_200):
            await store.put(ODD, "summary" if number % 2 else "archive", f"k{number}", b"CANARY", 60)
        await store.put("other", "summary", "k", b"stays", 60)
        before = redis.raw()
        assert (b"CANARY" in before) is not bool(keys)
        assert await forget(store, ODD) == {"summary": 600, "archive": 600}
        raw = redis.raw()
        assert b"CANARY" not in raw
        assert b"k77" not in raw
        assert b"team" not in raw
        assert await store.get("other", "summary", "k") == b"stays"
        assert await store.remove(ODD) == {}
        assert len(await forgotten(store)) == 1

    with_store(lambda: sealed(redis, *keys), test)


def test_entries_under_an_old_key_are_encrypted_again(redis: RedisServer) -> None:
    async def old(store: ManagedStore) -> None:
        for number in range(450):
            await store.put("t", "summary", f"k{number}", b"%d" % number, 60)

    async def plain(store: ManagedStore) -> None:
        assert await store.unknown() == 450
        await store.put("t", "summary", "plain", b"not encrypted", 60)

    async def new(store: ManagedStore) -> None:
        assert await store.unknown() == 1
        await store.maintain()
        assert await store.unknown() == 0
        assert b"not encrypted" not in redis.raw()

    async def renewed(store: ManagedStore) -> None:
        assert await store.get("t", "summary", "k7") == b"7"
        assert len(await store.entries("summary")) == 450

    with_store(lambda: sealed(redis, KEY), old)
    with_store(lambda: sealed(redis), plain)
    with_store(lambda: sealed(redis, NEW_KEY, KEY), new)
    with_store(lambda: sealed(redis, NEW_KEY), renewed)


def test_values_of_another_version_are_skipped_and_replaced(redis: RedisServer) -> None:
    async def test(store: RedisStore) -> None:
        await store.put("t", "summary", "k", b"mine", 60)
        with redis.client() as client:
            client.set("compaction:entry:t:summary:k", b"2\nfrom the future", ex=60)
        assert await store.get("t", "summary", "k") is None
        assert await store.entries("summary") == []
        await store.put("t", "summary", "k", b"mine", 60)
        assert await store.get("t", "summary", "k") == b"mine"

    run(redis, test)


def test_a_server_that_is_down_raises_and_works_again_without_a_new_client(redis: RedisServer) -> None:
    async def test(store: RedisStore) -> None:
        await store.put("t", "summary", "k", b"1", 60)
        redis.stop()
        for work in (
            lambda: store.get("t", "summary", "k"),
            lambda: store.get_many("t", "summary", ["k"]),
            lambda: store.put("t", "summary", "k", b"1", 60),
            lambda: store.add("t", "summary", "k", b"1", 60),
            lambda: store.delete("t", "summary", "k"),
            lambda: store.entries("summary"),
            lambda: store.remove("t"),
            lambda: store.maintain(),
            lambda: store.unknown(),
        ):
            with pytest.raises(StoreFailed, match="Redis: ConnectionError"):
                await work()
        redis.start()
        assert await store.get("t", "summary", "k") is None
        await store.put("t", "summary", "k", b"2", 60)
        assert [entry.value for entry in await store.entries("summary")] == [b"2"]

    run(redis, test)


def test_a_server_without_memory_raises(redis: RedisServer) -> None:
    async def test(store: RedisStore) -> None:
        await store.put("t", "summary", "k", b"1", 60)
        with redis.client() as client:
            client.config_set("maxmemory", "1mb")
        try:
            with pytest.raises(StoreFailed, match="OutOfMemory"):
                await store.put("t", "summary", "k", b"1", 60)
            assert await store.get("t", "summary", "k") == b"1"
        finally:
            with redis.client() as client:
                client.config_set("maxmemory", "0")

    run(redis, test)
