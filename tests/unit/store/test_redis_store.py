"""The store on a real Redis server: expiry, versions, and failures. ``test_backends.py`` has the common tests."""

import time
from collections.abc import Awaitable, Callable

import pytest

from proxy.store import StoreFailed
from proxy.store.redis_store import RedisStore
from tests.kit.redis_server import RedisServer
from tests.kit.stores import with_store


def run(server: RedisServer, *tests: Callable[[RedisStore], Awaitable[None]]) -> None:
    """Run tests one after the other, each with a store of its own on the same server."""
    with_store(lambda: RedisStore(server.url), *tests)


def test_the_name_of_a_removed_entry_leaves_the_index_unless_it_was_added_again(redis: RedisServer) -> None:
    async def test(store: RedisStore) -> None:
        for key in ("replaced", "expired", "again"):
            await store.put("t", "summary", key, b"1", 60)
        assert await store.replace("t", "summary", "replaced", b"1", b"", 0)
        await store.put("t", "summary", "expired", b"2", -1)
        await store._leave_index("", "summary", [("t", "again")])  # another process has just added it
        with redis.client() as client:
            ((name, until),) = client.zrange("compaction:index:1::summary", 0, -1, withscores=True)
        assert name == b"t:again"
        assert 50 < until - time.time() <= 61
        assert [entry.key for entry in await store.entries("summary")] == ["again"]

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
            lambda: store.replace("t", "summary", "k", b"1", b"2", 60),
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
