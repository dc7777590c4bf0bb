"""Test slots and memory leases, and the requests that wait for them."""

import asyncio
import functools
import gzip
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from proxy.access.quotas import BodyMemory, ConcurrencyLimit, Resource
from proxy.config.server import ServerSettings
from proxy.errors import BodyTooLarge, Overloaded
from proxy.http.request_body import read_body

LONG, SHORT = 30.0, 0.02


def in_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run a test on an event loop."""

    @functools.wraps(test)
    def run() -> None:
        asyncio.run(test())

    return run


async def turn() -> None:
    """Let everybody else have a turn or two."""
    for _ in range(3):
        await asyncio.sleep(0)


@in_loop
async def test_those_who_wait_are_served_in_their_order() -> None:
    pool = Resource(lambda: 1)
    assert pool.take(1)
    served: list[int] = []

    async def waiter(number: int) -> None:
        assert await pool.wait(1, LONG)
        served.append(number)

    tasks = [asyncio.create_task(waiter(number)) for number in range(3)]
    await turn()
    assert (pool.waiting, served) == (3, [])
    for number in range(3):
        assert not pool.take(1), "nobody comes before those who wait"
        pool.give(1)
        await turn()
        assert served == list(range(number + 1))
    await asyncio.gather(*tasks)
    pool.give(1)
    assert (pool.used, pool.waiting) == (0, 0)


@in_loop
async def test_who_waits_too_long_or_leaves_takes_nothing_and_holds_up_nobody() -> None:
    pool = Resource(lambda: 10)
    assert pool.take(6)
    assert not await pool.wait(5, SHORT)
    large = asyncio.create_task(pool.wait(5, LONG))
    small = asyncio.create_task(pool.wait(4, LONG))
    await turn()
    assert (pool.waiting, pool.used) == (2, 6)
    large.cancel()
    await turn()
    assert small.done()
    assert small.result() is True
    assert (pool.waiting, pool.used) == (0, 10)


@in_loop
async def test_who_leaves_in_the_moment_of_being_served_gives_it_back() -> None:
    pool = Resource(lambda: 1)
    assert pool.take(1)
    waiting = asyncio.create_task(pool.wait(1, LONG))
    await turn()
    pool.give(1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (pool.waiting, pool.used) == (0, 0)


@in_loop
async def test_the_queue_is_bounded_and_so_is_the_wait() -> None:
    limit = ConcurrencyLimit(lambda: ServerSettings(max_concurrent=1, max_queue=1, queue_timeout=0.2))
    assert limit.take(1)
    waiting = asyncio.create_task(limit.wait_for_slot())
    await turn()
    with pytest.raises(Overloaded):
        await limit.wait_for_slot()
    assert not waiting.done(), "the second was refused at once"
    with pytest.raises(Overloaded):
        await waiting
    limit.give(1)
    assert limit.take(1)


def settings(**server: Any) -> ServerSettings:
    return ServerSettings(**{"body_limit": 1_000_000, "max_body_memory": 2_000_000, "queue_timeout": SHORT, **server})


class Sender:
    """Sends a body in parts, and then waits for ever unless it is whole."""

    def __init__(self, parts: list[bytes], *, whole: bool = True) -> None:
        self._parts = parts
        self._whole = whole
        self.read = 0

    async def receive(self) -> dict[str, Any]:
        if not self._parts:
            await asyncio.Event().wait()
        part = self._parts.pop(0)
        self.read += len(part)
        return {"type": "http.request", "body": part, "more_body": bool(self._parts) or not self._whole}


def scope(**headers: str) -> dict[str, Any]:
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "headers": named}


@in_loop
async def test_a_body_takes_its_memory_before_it_is_read() -> None:
    memory = BodyMemory(settings)
    sender = Sender([b"x" * 100_000], whole=False)
    with memory.lease() as first, memory.lease() as second:
        reading = asyncio.create_task(read_body(scope(content_length="1000000"), sender.receive, 1_000_000, first))
        await turn()
        assert memory.used == 1_000_000
        assert second.grown(1_000_000)
        other = Sender([b"x"])
        with memory.lease() as third, pytest.raises(Overloaded):
            await read_body(scope(content_length="1000"), other.receive, 1_000_000, third)
        assert other.read == 0
        reading.cancel()
    assert memory.used == 0


@in_loop
async def test_a_body_without_a_length_takes_it_as_it_comes() -> None:
    memory = BodyMemory(settings)
    with memory.lease() as other, memory.lease() as held:
        assert other.grown(1_900_000)
        sender = Sender([b"x" * 50_000] * 10)
        with pytest.raises(Overloaded):
            await read_body(scope(), sender.receive, 1_000_000, held)
        assert sender.read == 150_000
        assert held.size == 100_000
    assert memory.used == 0


@in_loop
async def test_a_compressed_body_keeps_what_it_became() -> None:
    memory = BodyMemory(settings)
    packed = gzip.compress(b"x" * 300_000)
    headers = scope(content_length=str(len(packed)), content_encoding="gzip")
    with memory.lease() as held:
        assert len(await read_body(headers, Sender([packed]).receive, 1_000_000, held)) == 300_000
        assert held.size == memory.used == 300_000
    with memory.lease() as other, memory.lease() as held:
        assert other.grown(1_800_000)
        with pytest.raises(Overloaded):
            await read_body(headers, Sender([packed]).receive, 1_000_000, held)
    assert memory.used == 0


@in_loop
async def test_a_small_body_does_not_wait_behind_a_large_one() -> None:
    memory = BodyMemory(lambda: settings(queue_timeout=LONG))
    with memory.lease() as most, memory.lease() as large, memory.lease() as small:
        assert most.grown(1_500_000)
        waiting = asyncio.create_task(large.wait(600_000))
        await turn()
        assert not memory.lease().grown(70_000)
        assert small.grown(60_000)
        most.shrink(0)
        await waiting
        assert memory.used == 660_000
    assert memory.used == 0


@in_loop
async def test_what_is_over_the_limit_takes_nothing() -> None:
    memory = BodyMemory(settings)
    with memory.lease() as held:
        with pytest.raises(BodyTooLarge):
            await read_body(scope(content_length="1000001"), Sender([b""]).receive, 1_000_000, held)
        assert memory.used == 0
