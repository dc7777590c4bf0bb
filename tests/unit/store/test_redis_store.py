"""The store on a real Redis server: expiry, versions, and failures. ``test_backends.py`` has the common tests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from proxy.store import StoreFailed
from proxy.store.redis_store import RedisStore
from tests.kit.redis_server import RedisServer
from tests.kit.stores import with_store


def run(server: RedisServer, *tests: Callable[[RedisStore], Awaitable[None]]) -> None:
    """Run tests one after the other, each with a store of its own on the same server."""
    with_store(lambda: RedisStore(server.url), *tests)


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
