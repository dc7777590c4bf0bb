"""Test token ratios learned from the usage that an upstream reports."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.dialects.chat.answers import ChatAnswers
from proxy.dialects.chat.counting import ChatEvidence
from proxy.limits import calibration
from proxy.limits.budget import budget
from proxy.limits.calibration import BOUNDS, LEAST_OBSERVATIONS, OBSERVATIONS, PAUSE, TRIES, Calibration
from proxy.limits.learned import LearnedLimit, limit_from_overflow
from proxy.limits.profiles import Profile
from proxy.overflow import Overflow
from proxy.store.interface import UNSTORED_TENANT


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
