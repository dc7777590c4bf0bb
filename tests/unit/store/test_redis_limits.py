"""Rates and concurrent requests on a real Redis server."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from proxy.store import StoreFailed
from proxy.store.redis_store import Admission, RedisLimits
from tests.kit.redis_server import RedisServer


def used(server: RedisServer, work: Callable[[RedisLimits, RedisLimits], Awaitable[None]]) -> None:
    """Run a test with the limits of two replicas."""

    async def run() -> None:
        replicas = RedisLimits(server.url), RedisLimits(server.url)
        try:
            await work(*replicas)
        finally:
            for one in replicas:
                await one.aclose()

    asyncio.run(run())


def test_a_burst_of_the_rate_is_admitted_and_then_one_at_a_time(redis: RedisServer) -> None:
    async def work(one: RedisLimits, two: RedisLimits) -> None:
        asked = [replica.admit("t", f"{n}", 6, None) for n in range(5) for replica in (one, two)]
        decisions = await asyncio.gather(*asked)
        assert Counter(one.decision for one in decisions) == {"admitted": 6, "rate": 4}
        assert await one.admit("t", "later", 6, None) == Admission("rate", 10)
        assert (await two.admit("other", "x", 6, None)).decision == "admitted"
        with redis.client() as client:
            client.flushall()
        assert (await one.admit("t", "later", 6, None)).decision == "admitted"

    used(redis, work)


def test_a_place_is_free_when_it_is_released_or_its_lease_ends(redis: RedisServer) -> None:
    async def work(one: RedisLimits, two: RedisLimits) -> None:
        assert (await one.admit("t", "a", None, 2)).decision == "admitted"
        assert (await two.admit("t", "b", None, 2)).decision == "admitted"
        assert await one.admit("t", "c", 1, 2) == Admission("concurrency", 1)
        await two.release("t", ["a"])
        assert (await one.admit("t", "c", 1, 2)).decision == "admitted", "a refused request doesn't count"
        with redis.client() as client:
            (key,) = client.keys("*:running")
            before = client.zscore(key, "b")
            await asyncio.sleep(0.01)
            await two.renew({"t": ["b", "ended"]})
            assert client.zscore(key, "b") > before
            assert client.zscore(key, "ended") is None
            assert 50 < client.ttl(key) <= 60
            client.zadd(key, {"c": 1})
        assert (await two.admit("t", "d", None, 2)).decision == "admitted", "c's process was killed"

    used(redis, work)


def test_names_of_teams_are_digests(redis: RedisServer) -> None:
    async def work(one: RedisLimits, two: RedisLimits) -> None:
        await one.admit("canary", "a", 5, 5)
        assert b"canary" not in redis.raw()

    used(redis, work)


def test_a_server_that_is_down_raises(redis: RedisServer) -> None:
    async def work(one: RedisLimits, two: RedisLimits) -> None:
        redis.stop()
        for call in (one.admit("t", "a", 1, 1), one.release("t", ["a"]), one.renew({"t": ["a"]})):
            with pytest.raises(StoreFailed):
                await call
        redis.start()

    used(redis, work)
