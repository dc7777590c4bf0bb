"""Test deadlines that start a timer only after the work has taken a while."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

import pytest
import uvloop

from proxy.http.timers import FAR_TICK, TICK, Deadline, coarse_timer

LONG = 30.0


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def runner(request: pytest.FixtureRequest) -> Any:
    """Runs a coroutine on either event loop."""

    def run(work: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(asyncio.wait_for(work, LONG))

    return run


def within(seconds: float) -> Deadline:
    clock = coarse_timer()
    return clock.until(clock.now() + seconds)


def test_work_that_takes_too_long_is_ended(runner: Any) -> None:
    async def work() -> None:
        limit = within(0.1)
        with pytest.raises(TimeoutError), limit:
            await asyncio.sleep(LONG)
        assert limit.expired
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling(), "nothing of it is left with the task"
        await asyncio.sleep(0)

    runner(work())


def test_a_limit_that_is_over_already_ends_the_work(runner: Any) -> None:
    async def work() -> None:
        with pytest.raises(TimeoutError), within(-1):
            await asyncio.sleep(LONG)

    runner(work())


def test_work_that_ends_in_time_is_left_alone_and_nothing_comes_after_it(runner: Any) -> None:
    async def work() -> None:
        with within(40 * TICK) as quick:
            await asyncio.sleep(0)
        with within(40 * TICK) as slower:  # long enough for a timer to be there
            await asyncio.sleep(3 * TICK)
        await asyncio.sleep(45 * TICK)
        assert not quick.expired
        assert not slower.expired

    runner(work())


def test_a_limit_that_is_far_away_ends_the_work_in_time(runner: Any) -> None:
    async def work() -> None:
        clock = coarse_timer()
        end = clock.now() + 3.5 * FAR_TICK
        with clock.until(clock.now() + LONG) as later, pytest.raises(TimeoutError), clock.until(end):
            await asyncio.sleep(LONG)
        assert 0 <= clock.now() - end < 2 * FAR_TICK
        assert not later.expired

    runner(work())


def test_a_limit_that_is_far_away_sets_no_timer_of_its_own(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        armed: list[Deadline] = []
        monkeypatch.setattr(Deadline, "arm", armed.append)
        with within(LONG):
            await asyncio.sleep(3 * FAR_TICK)
        assert not armed

    runner(work())


def test_a_limit_may_be_moved_on(runner: Any) -> None:
    async def work() -> None:
        clock = coarse_timer()
        began = clock.now()
        limit = clock.until(began + 30 * TICK)

        async def moving() -> None:
            with limit:
                await asyncio.sleep(5 * TICK)
                limit.when = began + 50 * TICK
                await asyncio.sleep(LONG)

        with pytest.raises(TimeoutError):
            await moving()
        assert clock.now() - began >= 50 * TICK

    runner(work())


def test_the_inner_of_two_limits_says_nothing_of_the_outer(runner: Any) -> None:
    async def work() -> None:
        with within(LONG) as outer:
            with pytest.raises(TimeoutError), within(3 * TICK):
                await asyncio.sleep(LONG)
            await asyncio.sleep(0)
        assert not outer.expired

    runner(work())


def test_the_outer_of_two_limits_ends_the_work_in_the_inner(runner: Any) -> None:
    async def work() -> None:
        inner = within(LONG)
        with pytest.raises(TimeoutError), within(3 * TICK) as outer, inner:
            await asyncio.sleep(LONG)
        assert outer.expired
        assert not inner.expired

    runner(work())


def test_who_is_cancelled_by_somebody_else_has_not_run_out_of_time(runner: Any) -> None:
    async def limited() -> None:
        with within(3 * TICK):
            try:
                await asyncio.sleep(LONG)
            except asyncio.CancelledError:
                await asyncio.sleep(LONG)  # clearing up takes its time; then somebody else has had enough of it

    async def work() -> None:
        task = asyncio.create_task(limited())
        await asyncio.sleep(10 * TICK)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()

    runner(work())


def test_an_error_of_the_work_stays_what_it_is(runner: Any) -> None:
    async def failing() -> None:
        with within(3 * TICK):
            try:
                await asyncio.sleep(LONG)
            finally:
                raise ValueError("mine")

    async def work() -> None:
        with pytest.raises(ValueError, match="mine"):
            await failing()

    runner(work())


def test_what_is_to_be_done_late_is_done_for_work_that_takes_long_alone(runner: Any) -> None:
    async def work() -> None:
        clock = coarse_timer()
        said: list[str] = []
        with clock.until(clock.now() + LONG, lambda: said.append("quick")):
            await asyncio.sleep(0)
        with clock.until(clock.now() + LONG, lambda: said.append("slow")):
            await asyncio.sleep(10 * TICK)
        assert said == ["slow"]

    runner(work())
