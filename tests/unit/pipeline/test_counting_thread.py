"""The thread that counts for all tenants: its order, its pauses, and its end."""

import asyncio
import math
import threading
from collections.abc import Callable
from itertools import accumulate, chain, repeat
from itertools import count as count_from

import pytest

from proxy.pipeline.facts_cache import BUSY_SECONDS, DEEPEST, LONGEST_SECONDS, SLEEP_SECONDS, CountingThread
from proxy.tokens.text import PIECE, count, encoding

ENCODING = encoding("o200k_base")


def pause(number: int = 0) -> None:
    count(ENCODING, "x")


async def started(thread: CountingThread, work: Callable[[], None], size: int = 100) -> asyncio.Task[None]:
    """Begin a job that holds the thread until its work ends."""
    begun = threading.Event()

    def held() -> None:
        begun.set()
        work()

    task = asyncio.create_task(thread.run(held, "first", size))
    await asyncio.to_thread(begun.wait, 30)
    return task


@pytest.mark.parametrize("pauses", [0, 100])
def test_tenants_take_turns_and_smaller_jobs_run_at_pauses(pauses: int) -> None:
    async def check() -> list[str]:
        thread, go, order = CountingThread(), threading.Event(), list[str]()

        def first() -> None:
            go.wait(30)
            for _ in range(pauses):
                pause()
            order.append("first")

        held = await started(thread, first)
        jobs = [
            ("a1", "a", 100),
            ("a2", "a", 100),
            ("a3", "a", 100),
            ("b1", "b", 100),
            ("c1", "c", 1),
            ("c2", "c", 49),
            ("d1", "d", 51),
        ]
        waiting = [asyncio.create_task(thread.run(lambda name=name: order.append(name), tenant, size))  # type: ignore[misc]
                   for name, tenant, size in jobs]  # fmt: skip
        await asyncio.sleep(0)
        go.set()
        await asyncio.gather(held, *waiting)
        thread.close()
        return order

    small = ["c1", "c2"]
    usual = ["a1", "b1", "d1", "a2", "a3"] if pauses else ["a1", "b1", "c1", "d1", "a2", "c2", "a3"]
    assert asyncio.run(check()) == [*(small if pauses else []), "first", *usual]


@pytest.mark.parametrize("end", ["cancel", "close"])
def test_a_job_ends_at_a_pause(end: str) -> None:
    async def check() -> None:
        thread, ended = CountingThread(), threading.Event()

        def endless() -> None:
            try:
                while True:
                    pause()
            finally:
                ended.set()

        held = await started(thread, endless)
        waiting = asyncio.create_task(thread.run(lambda: None, "other", 1_000))
        await asyncio.sleep(0)
        if end == "cancel":
            held.cancel()
            await waiting
        else:
            thread.close()
        ended.wait(30)
        for one in (held, waiting):
            if one.cancelled() or not one.done():
                with pytest.raises(asyncio.CancelledError):
                    await one
        thread.close()

    asyncio.run(check())


def test_jobs_within_each_other_are_bounded() -> None:
    async def check() -> int:
        thread, go, depths = CountingThread(), threading.Event(), list[int]()

        def work() -> None:
            go.wait(30)
            depths.append(len(thread._running))
            pause()

        held = await started(thread, work, 2**41)
        waiting = [asyncio.create_task(thread.run(work, "t", 2**power)) for power in range(40, 0, -1)]
        await asyncio.sleep(0)
        go.set()
        await asyncio.gather(held, *waiting)
        thread.close()
        return max(depths)

    assert asyncio.run(check()) == DEEPEST


@pytest.mark.parametrize(
    ("more", "sleeps"),
    [
        pytest.param([9, BUSY_SECONDS / 2, 1, 0], 1, id="until-it-is-idle"),
        pytest.param([9, *9 * [1]], 2 * math.ceil(LONGEST_SECONDS / 0.0015), id="at-most-so-long"),
    ],
)
def test_the_thread_sleeps_while_the_event_loop_is_busy(
    monkeypatch: pytest.MonkeyPatch, more: list[float], sleeps: int
) -> None:
    """``more`` is the CPU time that the loop uses before each pause of a job, and before the end of each sleep."""
    slept, clock, own, others = list[float](), count_from(0), count_from(0), accumulate(chain(more, repeat(1)))
    monkeypatch.setattr("proxy.pipeline.facts_cache._cpu", lambda: (next(own), next(others)))
    monkeypatch.setattr("proxy.pipeline.facts_cache.time.perf_counter", lambda: 0.0015 * next(clock))
    monkeypatch.setattr("proxy.pipeline.facts_cache.time.sleep", slept.append)

    async def check() -> None:
        thread = CountingThread()
        await thread.run(lambda: any(map(pause, range(3))), "t", 0)
        thread.close()

    asyncio.run(check())
    assert slept == sleeps * [SLEEP_SECONDS]


def test_an_error_reaches_its_caller() -> None:
    async def check() -> None:
        thread = CountingThread()
        with pytest.raises(KeyError):
            await thread.run({}.popitem, "t", 0)
        thread.close()

    asyncio.run(check())


@pytest.mark.long
@pytest.mark.parametrize("name", ["o200k_base", "cl100k_base", "p50k_base"])
@pytest.mark.parametrize("text", ["the quick brown_fox jumps over 12 dogs. ", "x = {\n\n    'aB': [1, 2],\n}\nend\n"])
def test_a_long_text_is_counted_in_pieces_like_the_whole(name: str, text: str) -> None:
    long, whole = text * (5 * PIECE // len(text)), encoding(name)
    assert count(whole, long) == len(whole.encode_ordinary(long))
    assert count(whole, "x" * 3 * PIECE) <= len(whole.encode_ordinary("x" * 3 * PIECE)) + 4
