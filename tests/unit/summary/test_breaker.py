"""Models that fail again and again are left alone for a while."""

from __future__ import annotations

import asyncio

import pytest

from proxy.summary import breaker
from proxy.summary.breaker import Attempt, Breaker
from proxy.summary.chunking import SummaryFailed, SummaryTooLong, SummaryUnasked
from proxy.summary.quality import SummaryRejected
from proxy.telemetry.metrics import REGISTRY

KEY = ("tenant", "main small")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def tried(attempt: Attempt | None, error: BaseException | None = None) -> bool:
    """Whether an attempt was allowed; it ends with the error."""
    if attempt is None:
        return False
    if error is None:
        with attempt:
            pass
        return True
    with pytest.raises(type(error)), attempt:
        raise error
    return True


def changes() -> list[float]:
    names = ("opened", "closed")
    return [REGISTRY.get_sample_value("compaction_summary_breaker_total", {"change": name}) or 0 for name in names]


def opened() -> tuple[Breaker, Clock]:
    clock = Clock()
    found = Breaker(clock)
    for _ in range(3):
        assert tried(found.attempt(KEY), SummaryFailed("status 500"))
    return found, clock


@pytest.mark.parametrize(
    "error",
    [SummaryFailed("x"), SummaryTooLong("x"), SummaryRejected("x"), TimeoutError()],
    ids=lambda e: type(e).__name__,
)
def test_after_three_failures_in_a_row_it_is_left_alone(error: Exception) -> None:
    found = Breaker(Clock())
    for _ in range(2):
        tried(found.attempt(KEY), error)
    tried(found.attempt(KEY))
    for _ in range(3):
        assert tried(found.attempt(KEY), error)
    assert found.attempt(KEY) is None
    assert tried(found.attempt(("other", "main small")))
    assert tried(found.attempt(("tenant", "main large")))


@pytest.mark.parametrize("error", [asyncio.CancelledError(), SummaryUnasked("too small")], ids=("left", "unasked"))
def test_what_says_nothing_of_the_model_is_no_failure(error: BaseException) -> None:
    found = Breaker(Clock())
    for _ in range(5):
        assert tried(found.attempt(KEY), error)
    assert found.attempt(KEY) is not None
    found, clock = opened()
    clock.now += 61
    assert tried(found.attempt(KEY), error)
    assert tried(found.attempt(KEY)), "the probe is free again"


def test_pauses_double_up_to_ten_minutes() -> None:
    found, clock = opened()
    for pause in (60, 120, 240, 480, 600, 600):
        clock.now += pause - 1
        assert found.attempt(KEY) is None
        clock.now += 1
        assert tried(found.attempt(KEY), TimeoutError())
    clock.now += 600
    assert tried(found.attempt(KEY))
    for _ in range(3):
        assert tried(found.attempt(KEY), TimeoutError()), "a success forgets everything"
    clock.now += 60
    assert found.attempt(KEY) is not None


def test_one_probe_at_a_time() -> None:
    found, clock = opened()
    clock.now += 60
    probe = found.attempt(KEY)
    assert probe is not None
    assert found.attempt(KEY) is None
    assert tried(probe)
    assert found.attempt(KEY) is not None


def test_what_began_before_the_pause_does_not_lengthen_it() -> None:
    clock = Clock()
    found = Breaker(clock)
    attempts = [found.attempt(KEY) for _ in range(20)]
    for attempt in attempts:
        assert tried(attempt, TimeoutError())
    clock.now += 60
    assert tried(found.attempt(KEY))


def test_it_is_counted_and_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaker, "REMEMBERED", 10)
    before = changes()
    found, clock = opened()
    clock.now += 60
    tried(found.attempt(KEY))
    assert changes() == [number + 1 for number in before]
    for number in range(100):
        tried(found.attempt(number), TimeoutError())
    assert len(found._states) == 10
