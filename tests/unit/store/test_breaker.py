"""Test the circuit breaker."""

from collections.abc import Hashable
from contextlib import AbstractContextManager, suppress

import pytest

from proxy.store.guarded import FAILURES, CircuitBreaker

KEY = ("tenant", "main small")


class Calls:
    """A breaker with its own clock. ``changes`` is its reports."""

    def __init__(self, remembered: int = 10) -> None:
        self.now = 1_000.0
        self.changes: list[tuple[str, Hashable, float]] = []
        self.breaker = CircuitBreaker(
            60.0,
            600.0,
            is_failure=lambda error: isinstance(error, TimeoutError),
            report=lambda *change: self.changes.append(change),
            clock=lambda: self.now,
            remembered=remembered,
        )

    def allowed(self, error: BaseException | None = None, key: Hashable = KEY) -> bool:
        """Make a call that ends with the error. Return whether the breaker allowed it."""
        attempt = self.breaker.attempt(key)
        if attempt is not None:
            end(attempt, error)
        return attempt is not None


def end(attempt: AbstractContextManager[None], error: BaseException | None = None) -> None:
    with suppress(TimeoutError, LookupError, KeyboardInterrupt), attempt:
        if error is not None:
            raise error


@pytest.fixture
def calls() -> Calls:
    """A breaker that has just opened for ``KEY``."""
    calls = Calls()
    for _ in range(FAILURES):
        assert calls.allowed(TimeoutError())
    return calls


def test_it_opens_after_consecutive_failures_of_one_key() -> None:
    calls = Calls()
    for _ in range(FAILURES - 1):
        calls.allowed(TimeoutError())
    calls.allowed()
    for _ in range(FAILURES):
        assert calls.breaker.attempt(KEY) is not None
        assert calls.allowed(TimeoutError())
    assert calls.breaker.attempt(KEY) is None
    assert not calls.allowed()
    assert calls.allowed(key=("other", "main small"))
    assert calls.allowed(key=("tenant", "main large"))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), LookupError()], ids=repr)
def test_other_errors_do_not_count(calls: Calls, error: BaseException) -> None:
    closed = Calls()
    for _ in range(2 * FAILURES):
        assert closed.allowed(error)
    calls.now += 60
    assert calls.allowed(error)
    assert calls.allowed(), "the probe is free again"


def test_pauses_double_up_to_the_longest(calls: Calls) -> None:
    for pause in (60, 120, 240, 480, 600, 600):
        calls.now += pause - 1
        assert not calls.allowed()
        calls.now += 1
        assert calls.allowed(TimeoutError())
    calls.now += 600
    assert calls.allowed()
    for _ in range(FAILURES):
        assert calls.allowed(TimeoutError()), "a success resets the count"
    calls.now += 60
    assert calls.allowed()
    pauses = [60, 120, 240, 480, 600, 600, 600, 0, 60, 0]
    assert [pause for _, _, pause in calls.changes] == pauses
    assert [change for change, _, _ in calls.changes] == ["opened" if pause else "closed" for pause in pauses]


def test_one_probe_at_a_time(calls: Calls) -> None:
    calls.now += 60
    probe = calls.breaker.attempt(KEY)
    assert probe is not None
    assert not calls.allowed()
    end(probe)
    assert calls.allowed()


def test_calls_that_began_before_the_pause_do_not_lengthen_it() -> None:
    calls = Calls()
    attempts = [calls.breaker.attempt(KEY) for _ in range(20)]
    for attempt in attempts:
        assert attempt is not None
        end(attempt, TimeoutError())
    calls.now += 60
    assert calls.allowed()


def test_the_oldest_failing_keys_are_dropped() -> None:
    calls = Calls(remembered=10)
    for number in range(100):
        calls.allowed(TimeoutError(), number)
    assert len(calls.breaker) == 10
