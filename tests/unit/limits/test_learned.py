"""Test learned limits and token ratios."""

import json
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from proxy.compaction.settings import Clause
from proxy.dialects.chat.answers import ChatAnswers
from proxy.dialects.chat.counting import ChatEvidence
from proxy.limits import calibration
from proxy.limits import learned as limits
from proxy.limits.budget import budget, reserved_output
from proxy.limits.calibration import BOUNDS, LEAST_OBSERVATIONS, OBSERVATIONS, PAUSE, TRIES, Calibration
from proxy.limits.learned import SMALLEST_PART, LearnedLimit, LearnedLimits, limit_from_overflow, published
from proxy.limits.profiles import Profile
from proxy.overflow import Overflow
from proxy.overflow.general import Scope
from proxy.store.interface import UNSTORED_TENANT


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


def noted(*ratios: float, counted: int = 10_000) -> float:
    """The factor after these ratios."""
    known = Calibration()
    for ratio in ratios:
        known.note("u", "m", "t", counted, int(ratio * counted))
    return known.factor("u", "m", "t")


@pytest.mark.parametrize(
    ("ratios", "factor"),
    [
        ([], 1.0),
        ([1.5, 1.5], 1.0),
        ([1.5, 1.5, 1.5], 1.5),
        ([1.05] * 9, 1.0),
        ([0.95] * 9, 1.0),
        ([1.06] * 9, 1.0),
        ([1.1] * 9, 1.1),
        ([1.13] * 9, 1.15),
        ([0.9] * 9, 0.9),
        ([0.55] * 9, BOUNDS[0]),
        ([2.9] * 9, BOUNDS[1]),
        ([10.0] * 9, 1.0),
        ([0.1] * 9, 1.0),
        ([0.0] * 9, 1.0),
    ],
)
def test_the_factor_is_bounded_and_needs_some_observations(ratios: list[float], factor: float) -> None:
    assert noted(*ratios) == factor


def test_small_requests_do_not_count() -> None:
    assert noted(*[1.5] * 9, counted=500) == 1.0
    assert noted(*[1.5] * 9, counted=502) == 1.5


def test_an_upstream_whose_usage_shows_nothing_is_compared_less_often() -> None:
    now = 0.0
    known = Calibration(clock=lambda: now)
    place = ("u", "m", "t")
    for _ in range(OBSERVATIONS):
        assert known.wants(*place)
        known.miss(*place, 500)  # too small to show a ratio, so it says nothing
        known.miss(*place, 10_000)
    assert not known.wants(*place)
    now = PAUSE
    assert known.wants(*place)
    known.miss(*place, 10_000)
    now += PAUSE
    assert not known.wants(*place), "twice as long after each further miss"
    now += PAUSE
    assert known.wants(*place)
    known.note(*place, 10_000, 12_000)
    for _ in range(OBSERVATIONS - 1):
        known.miss(*place, 10_000)
    assert known.wants(*place), "one that is comparable begins the count again"


def test_it_does_not_move_for_little() -> None:
    known = Calibration()
    factors = []
    for ratio in (1.20, 1.24, 1.16, 1.23, 1.20, 1.18, 1.24, 1.16, 1.24, 1.17) * 5:
        known.note("u", "m", "t", 10_000, int(ratio * 10_000))
        factors.append(known.factor("u", "m", "t"))
    assert set(factors[LEAST_OBSERVATIONS - 1 :]) == {1.2}


def test_upstreams_models_and_tenants_are_kept_apart_and_no_more_than_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "PLACES", 2)
    known = Calibration()
    for model in ("a", "b"):
        for _ in range(3):
            known.note("u", model, "t", 1_000, 1_500)
    places = [("u", "a", "t"), ("u", "b", "t"), ("v", "a", "t"), ("u", "c", "t"), ("u", "a", "s")]
    assert [known.factor(*place) for place in places] == [1.5, 1.5, 1.0, 1.0, 1.0]
    known.note("u", "c", "t", 1_000, 1_500)
    assert [known.factor("u", model, "t") for model in "ab"] == [1.0, 1.5]


def test_nothing_is_learned_for_callers_who_are_nobody() -> None:
    known = Calibration()
    assert not known.worth_counting("u", "m", UNSTORED_TENANT)
    for _ in range(5):
        known.note("u", "m", UNSTORED_TENANT, 1_000, 1_500)
    assert known.factor("u", "m", UNSTORED_TENANT) == 1.0


def test_a_tenant_that_is_forgotten_begins_again() -> None:
    known = Calibration()
    for tenant in ("t", "s"):
        for _ in range(OBSERVATIONS):
            known.worth_counting("u", "m", tenant)
            known.note("u", "m", tenant, 1_000, 1_500)
    assert known.forget(lambda tenant: tenant == "t") == {"t"}
    assert (known.factor("u", "m", "t"), known.factor("u", "m", "s")) == (1.0, 1.5)
    assert known.wants("u", "m", "t")
    assert not known.wants("u", "m", "s")


@pytest.mark.parametrize(("steps", "factor"), [(1_000, BOUNDS[1]), (-3, BOUNDS[0]), (0, BOUNDS[0])])
def test_a_stored_ratio_that_was_changed_stays_within_bounds(steps: int, factor: float) -> None:
    assert calibration.TokenRatios("u", "m", (1.0,), steps).factor == factor


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.mark.parametrize(
    ("message", "fields", "counts"),
    [
        ({}, {}, True),
        ({"refusal": None, "audio": None, "annotations": [], "reasoning_content": ""}, {}, True),
        ({"content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}, {}, True),
        ({}, {"stream": True, "max_tokens": 5, "temperature": 0, "response_format": {"type": "text"}}, True),
        ({}, {"documents": ["a"]}, False),
        ({}, {"chat_template_kwargs": {"documents": ["a"]}}, False),
        ({}, {"tools": [TOOL, {"type": "web_search"}]}, False),
        ({}, {"response_format": {"type": "json_schema", "json_schema": {"name": "a" * 500}}}, False),
        ({"reasoning": "Hm."}, {}, False),
        ({"thinking_blocks": [{}]}, {}, False),
        ({"content": [{"type": "thinking", "thinking": "Hm."}]}, {}, False),
        ({"content": [{"type": "text", "text": "a", "more": "b"}]}, {}, False),
        ({"content": {"text": "a"}}, {}, False),
    ],
)
def test_requests_that_the_two_sides_count_differently_are_left_out(
    message: dict[str, Any], fields: dict[str, Any], counts: bool
) -> None:
    messages = [{"role": "user", "content": "word " * 40}, {"role": "assistant", "content": "a", **message}]
    assert ChatEvidence().comparable(json.dumps({"model": "m", "messages": messages, **fields}).encode()) is counts


def test_once_there_are_enough_it_looks_now_and_then() -> None:
    now = 5.0
    known = Calibration(clock=lambda: now)
    for _ in range(OBSERVATIONS):
        assert known.wants("u", "m", "t")
        known.note("u", "m", "t", 1_000, 1_500)
    assert not known.wants("u", "m", "t")
    assert known.wants("u", "n", "t")
    now += PAUSE
    assert known.wants("u", "m", "t")


def test_requests_are_counted_for_their_ratio_alone_until_there_are_enough() -> None:
    known = Calibration()
    for _ in range(LEAST_OBSERVATIONS):
        assert known.worth_counting("u", "m", "t")
        known.note("u", "m", "t", 1_000, 1_500)
    assert not known.worth_counting("u", "m", "t")
    assert [known.worth_counting("u", "silent", "t") for _ in range(TRIES + 5)] == [True] * TRIES + [False] * 5


def test_a_published_limit_is_converted_and_a_learned_one_is_not() -> None:
    model = Profile("m", context_window=10_000, max_input_tokens=9_000)
    assert budget(model, 2_000, None) == 8_000
    assert budget(model, 2_000, None, 1.6) == 5_000
    assert budget(model, 2_000, LearnedLimit(input=4_000), 1.6) == 4_000
    assert budget(model, 2_000, LearnedLimit(total=8_000), 1.6) == 5_000
    assert budget(Profile("m"), 2_000, LearnedLimit(total=8_000), 1.6) == 6_000
    assert budget(Profile("m"), 2_000, None, 1.6) is None


def test_a_refusal_that_names_its_limit_but_no_count_is_converted() -> None:
    refused = Overflow("input", 8_000, "input", None, None, "compact")
    assert limit_from_overflow(refused, 10_000, 0) == LearnedLimit(input=7_760)
    assert limit_from_overflow(refused, 10_000, 0, 1.6) == LearnedLimit(input=4_850)
    counted = Overflow("input", 8_000, "input", 20_000, None, "compact")
    assert limit_from_overflow(counted, 10_000, 0, 1.6) == LearnedLimit(input=3_880), "what the refusal says goes first"


LIE = 'Then say "usage": {"prompt_tokens": 5, "total_tokens": 5} and "usage":{"prompt_tokens":5}}\n\ndata: {'


def told(*chunks: bytes) -> int | None:
    """The size of the prompt that an answer reports."""
    answers = ChatAnswers().tail()
    for chunk in chunks:
        answers.add(chunk)
    return answers.finished().prompt


@given(st.text(max_size=200), st.integers(1, 60))
def test_no_content_can_report_anything(text: str, size: int) -> None:
    """However the answer is cut, and wherever its kept end begins."""
    body = json.dumps({"choices": [{"message": {"content": LIE + text + LIE}}]}, ensure_ascii=False).encode()
    chunks = [body[start : start + size] for start in range(0, len(body), size)]
    for kept in range(1, len(chunks) + 1):
        assert told(*chunks[:kept]) is None
    assert told(*chunks[:-1], chunks[-1][:-1] + b',"usage":{"prompt_tokens":77}}') == 77
