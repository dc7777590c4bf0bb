"""Test the token limits of requests."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from proxy.compaction.settings import Clause
from proxy.limits import learned as limits
from proxy.limits.budget import budget, reserved_output
from proxy.limits.learned import SMALLEST_PART, LearnedLimit, LearnedLimits, limit_from_overflow, published
from proxy.limits.profiles import Profile
from proxy.overflow import Overflow
from proxy.overflow.general import Scope


def profile(window: int | None = None, most_input: int | None = None, most_output: int | None = None) -> Profile:
    return Profile("m", context_window=window, max_input_tokens=most_input, max_output_tokens=most_output)


def refusal(
    limit: int | None, *, scope: Scope = "total", counted: int | None = None, output: int | None = None
) -> Overflow:
    return Overflow("input", limit, scope, counted, output, "compact")


@pytest.mark.parametrize(
    ("model", "asked", "policy", "reserved"),
    [
        (profile(128_000), 500, Clause(tokens=9), 500),
        (profile(128_000), None, Clause(tokens=9), 9),
        (profile(128_000), None, Clause(fraction=0.25), 32_000),
        (profile(None), None, Clause(fraction=0.25), 0),
        (profile(None), None, None, 0),
        (profile(128_000), None, None, 4000),
        (profile(128_000, most_output=100), None, None, 100),
        (profile(2048), None, None, 256),
    ],
)
def test_what_is_kept_for_the_answer(model: Profile, asked: int | None, policy: Clause | None, reserved: int) -> None:
    assert reserved_output(model, asked, policy) == reserved


@pytest.mark.parametrize(
    ("model", "reserved", "learned", "room"),
    [
        (profile(), 100, None, None),
        (profile(8000), 1000, None, 7000),
        (profile(None, 6000), 1000, None, 6000),
        (profile(8000, 6000), 1000, None, 6000),
        (profile(8000, 7500), 1000, None, 7000),
        (profile(8000), 7999, None, 1000),
        (profile(8000), 1000, LearnedLimit(input=3000), 3000),
        (profile(8000), 1000, LearnedLimit(total=5000), 4000),
        (profile(), 1000, LearnedLimit(total=5000), 4000),
        (profile(8000), 1000, LearnedLimit(input=90_000, total=90_000), 7000),
    ],
)
def test_the_budget_is_the_lowest_of_what_is_known(
    model: Profile, reserved: int, learned: LearnedLimit | None, room: int | None
) -> None:
    assert budget(model, reserved, learned) == room


def test_a_refusal_that_names_nothing_aims_at_a_part_of_the_refused_size() -> None:
    assert limit_from_overflow(refusal(None), 10_000, 500) == LearnedLimit(input=7000)


overflows = st.builds(
    refusal,
    st.none() | st.integers(1, 300_000),
    scope=st.sampled_from(("total", "input")),
    counted=st.none() | st.integers(0, 500_000),
    output=st.none() | st.integers(0, 100_000),
)


@given(overflows, st.integers(1000, 300_000), st.floats(0, 0.9), st.none() | st.integers(1000, 300_000))
def test_after_a_refusal_the_budget_is_below_what_was_refused(
    overflow: Overflow, counted_here: int, part: float, window: int | None
) -> None:
    """Each attempt must be smaller than the one before.

    If the request is tiny compared to the window and only its output is too large, compaction can't help.
    """
    assume(overflow.limit is None or overflow.limit // SMALLEST_PART < counted_here)
    reserved = int(part * counted_here)
    learned = limit_from_overflow(overflow, counted_here, reserved)
    room = budget(profile(window), reserved, learned)
    told_nothing = not learned.input and not learned.total
    assert told_nothing or (room is not None and room < counted_here)


def test_of_two_limits_the_lower_holds_and_both_are_forgotten_after_a_while() -> None:
    now = 0.0
    known = LearnedLimits(clock=lambda: now)
    known.learn("u", "m", "t", LearnedLimit(input=5000))
    known.learn("u", "m", "t", LearnedLimit(input=9000, total=8000))
    assert known.get("u", "m", "t") == LearnedLimit(5000, 8000)
    now = limits.NAMED_SECONDS
    assert known.get("u", "m", "t") == LearnedLimit(5000, 8000)
    now += 1
    assert known.get("u", "m", "t") is None
    known.learn("u", "m", "t", LearnedLimit(input=9000))
    assert known.get("u", "m", "t") == LearnedLimit(9000)


def test_a_guess_is_forgotten_sooner_than_what_was_named() -> None:
    now = 0.0
    known = LearnedLimits(clock=lambda: now)
    known.learn("u", "m", "t", LearnedLimit(total=8000))
    known.learn("u", "m", "t", LearnedLimit(input=5000, source="guess"))
    now = limits.GUESS_SECONDS + 1
    assert known.get("u", "m", "t") == LearnedLimit(total=8000)


GUESS = LearnedLimit(input=5_000, source="guess")
NAMED = LearnedLimit(input=8_000, named=8_200)


def test_a_guess_takes_the_place_of_nothing_that_was_named_and_holds() -> None:
    now = 0.0
    known = LearnedLimits(clock=lambda: now)
    known.learn("u", "m", "t", NAMED)
    now = limits.NAMED_SECONDS - 60
    known.learn("u", "m", "t", GUESS)
    assert known.get("u", "m", "t") == LearnedLimit(8_000)
    now = limits.NAMED_SECONDS + 1
    assert known.get("u", "m", "t") is None, "neither does it live longer, nor does the guess come back"
    known.learn("u", "m", "t", GUESS)
    assert known.get("u", "m", "t") == LearnedLimit(5_000)
    now += limits.GUESS_SECONDS + 1
    assert known.get("u", "m", "t") is None


def test_what_is_named_takes_the_place_of_a_guess_be_it_higher() -> None:
    now = 0.0
    known = LearnedLimits(clock=lambda: now)
    known.learn("u", "m", "t", GUESS)
    known.learn("u", "m", "t", NAMED)
    assert known.get("u", "m", "t") == LearnedLimit(8_000)
    now = limits.NAMED_SECONDS
    assert known.get("u", "m", "t") == LearnedLimit(8_000), "for as long as what was named, not as the guess"


@pytest.mark.parametrize(
    ("guessed", "disproved", "left"),
    [(1_000.0, False, 8_000), (limits.NAMED_SECONDS + 1, False, 5_000), (1_000.0, True, 5_000)],
)
def test_what_one_process_guessed_gives_way_to_what_another_was_told(
    guessed: float, disproved: bool, left: int
) -> None:
    named = limits.LimitRecord(8_000, "refusal", 0.0, limits.NAMED_SECONDS, 8_200, disproved)
    guess = limits.LimitRecord(5_000, "guess", guessed, guessed + limits.GUESS_SECONDS)
    one, other = limits.Limits("u", "m", named), limits.Limits("u", "m", guess)
    for merged in (one.merged(other), other.merged(one)):
        assert merged.input is not None
        assert merged.input.tokens == left


@pytest.mark.parametrize(
    "told", [LearnedLimit(input=255), LearnedLimit(total=16_000), LearnedLimit(input=12_000), LearnedLimit()]
)
def test_what_is_no_limit_is_not_learned(told: LearnedLimit) -> None:
    """Less than any model takes, or no less than the profile allows."""
    known = LearnedLimits()
    known.learn("u", "m", "t", told, published(profile(16_000, 12_000)))
    assert known.get("u", "m", "t") is None


def test_the_limits_of_a_profile_in_tokens_as_counted_here() -> None:
    assert published(profile(16_000, 12_000), 1.6) == LearnedLimit(7_500, 10_000)
    assert published(profile(16_000)) == LearnedLimit(16_000, 16_000)
    assert published(profile()) == LearnedLimit()


@pytest.mark.parametrize(
    ("sent", "reported", "factor", "left"),
    [
        (5_000, None, 1.0, 5_000),
        (4_000, 4_000, 1.0, 5_000),
        (6_000, None, 1.0, 6_000),
        (6_000, 6_601, 1.1, 6_000),
        # The upstream left out a part of what was sent, and so took no more.
        (9_000, 4_900, 1.0, 5_000),
        (9_000, None, 1.0, None),
        (9_000, 9_000, 1.0, None),
    ],
)
def test_what_was_answered_raises_a_limit_or_drops_it(
    sent: int, reported: int | None, factor: float, left: int | None
) -> None:
    now = 0.0
    known = LearnedLimits(clock=lambda: now)
    known.learn("u", "m", "t", LearnedLimit(input=5_000, source="guess"))
    now = 10
    known.confirm("u", "m", "t", sent, reported, factor)
    assert known.get("u", "m", "t") == (None if left is None else LearnedLimit(left))
    now = limits.GUESS_SECONDS + 1
    assert known.get("u", "m", "t") is None, "it lives no longer for that"


def test_a_usage_beyond_the_number_that_was_named_shows_that_it_is_no_limit_any_more() -> None:
    known = LearnedLimits()
    for reported, left in ((8_100, LearnedLimit(total=5_000)), (8_500, None)):
        known.learn("u", "m", "t", LearnedLimit(total=5_000, named=8_000))
        known.confirm("u", "m", "t", 4_900, reported, 1.6)
        assert known.get("u", "m", "t") == left


def test_what_usage_showed_only_usage_can_raise() -> None:
    """An upstream that leaves out what is too long, without a word, takes a request of any size."""
    known = LearnedLimits()
    known.learn("u", "m", "t", LearnedLimit(input=5_000, source="usage"))
    known.confirm("u", "m", "t", 9_000, None, 1.0)
    assert known.get("u", "m", "t") == LearnedLimit(5_000)
    known.confirm("u", "m", "t", 5_500, 5_600, 1.0)
    assert known.get("u", "m", "t") == LearnedLimit(5_500)


def test_no_more_than_so_many_are_kept_the_latest_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LEARNED_ENTRIES", 2)
    known = LearnedLimits()
    for model in ("a", "b", "a", "c"):
        known.learn("u", model, "t", LearnedLimit(input=1_000))
    assert [known.get("u", model, "t") is not None for model in "abc"] == [True, False, True]
