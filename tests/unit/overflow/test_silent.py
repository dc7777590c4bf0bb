"""Detect overflows by finished answers, without false alarms."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.overflow import Overflow
from proxy.overflow.silent import (
    EarlierPrompt,
    Filled,
    Finished,
    cut_prompt,
    empty_stream,
    output_tokens,
    prompt_tokens,
    silent_overflow,
)


def silent(limit: int | None, counted: int | None = None, output: int | None = None) -> Overflow:
    return Overflow("silent", limit, "total" if limit else None, counted, output, "compact")


def stopped(prompt: int | None, output: int = 100, reason: str = "stop", *, empty: bool = False) -> Finished:
    return Finished(reason, prompt, output, empty)


EXCEEDED = "model_context_window_exceeded"

# One row: the case, the answer, our count, other known figures, and the result.
FOUND: list[tuple[str, Finished, int, dict[str, Any], Overflow]] = [
    ("the finish reason says it", stopped(199_870, 130, EXCEEDED), 190_000, {}, silent(200_000, 199_870, 130)),
    (
        "and leaves some tokens unused",
        stopped(999_990, 1, EXCEEDED, empty=True),
        900_000,
        {"window": 1_048_576},
        silent(1_000_000, 999_990, 1),
    ),
    (
        "it says so twice, far below the window",
        stopped(4_000, 96, EXCEEDED),
        3_800,
        {"window": 128_000, "filled": [Filled(3_600, 4_097)]},
        silent(4_096, 4_000, 96),
    ),
    ("one token", stopped(8_191, 1, "length", empty=True), 8_000, {"asked": 500}, silent(8_192, 8_191, 1)),
    ("no usage for far more than fits", stopped(0, 120, "length"), 20_000, {"window": 8_192}, silent(8_192)),
]


@pytest.mark.parametrize(("answer", "counted", "known", "told"), [r[1:] for r in FOUND], ids=[r[0] for r in FOUND])
def test_silent_overflows(answer: Finished, counted: int, known: dict[str, Any], told: Overflow) -> None:
    assert silent_overflow(answer, counted, **known) == told


NOT_FOUND: list[tuple[str, Finished, int, dict[str, Any]]] = [
    ("an answer", stopped(5_000), 5_200, {"window": 8_192}),
    ("thoughts took the output", stopped(1_200, 4_096, "length", empty=True), 1_190, {"window": 400_000}),
    ("thoughts took it, and aren't counted", stopped(60_000, 0, "length", empty=True), 60_000, {"window": 128_000}),
    (
        "the same prompt again",
        stopped(60_000, 0, "length", empty=True),
        60_000,
        {"window": 128_000, "filled": [Filled(60_000, 60_000)]},
    ),
    ("what was asked for fits", stopped(8_050, 0, "length", empty=True), 8_000, {"window": 8_192, "asked": 64}),
    ("the finish reason says it once, far below", stopped(4_000, 96, EXCEEDED), 3_800, {"window": 128_000}),
    ("and without usage", stopped(None, 0, EXCEEDED), 3_800, {"window": 128_000}),
    ("one token was asked for", stopped(5_000, 1, "length", empty=True), 5_000, {"asked": 1}),
    ("nothing written, and not for its length", stopped(8_192, 0, "stop", empty=True), 8_000, {"window": 8_192}),
    ("no usage for what fits", stopped(None), 8_000, {"window": 8_192}),
    ("aborted, though it fits", stopped(0, 0, "abort", empty=True), 4_000, {"window": 32_768}),
]


@pytest.mark.parametrize(("answer", "counted", "known"), [r[1:] for r in NOT_FOUND], ids=[r[0] for r in NOT_FOUND])
def test_answers(answer: Finished, counted: int, known: dict[str, Any]) -> None:
    assert silent_overflow(answer, counted, **known) is None


# One row: the case, the reported size, our count, that of the newest messages, the earlier turns, the published window,
# and the limit.
CUT: list[tuple[str, int, int, int, list[EarlierPrompt], int | None, int]] = [
    ("to a power of two", 8_192, 25_000, 900, [EarlierPrompt(8_192, 1_700), EarlierPrompt(8_192, 900)], None, 8_192),
    ("under a window", 4_050, 20_000, 900, [EarlierPrompt(4_060, 1_800), EarlierPrompt(4_060, 900)], 128_000, 4_060),
    (
        "three times the same",
        11_111,
        16_000,
        900,
        [EarlierPrompt(11_150, 2_400), EarlierPrompt(11_100, 1_200)],
        None,
        11_150,
    ),
    (
        "after it was counted in full",
        3_333,
        4_800,
        400,
        [EarlierPrompt(2_000, 2_800, True), EarlierPrompt(3_340, 800), EarlierPrompt(3_335, 400)],
        32_000,
        3_340,
    ),
    (
        "another size in between",
        8_192,
        25_000,
        900,
        [EarlierPrompt(8_192, 1_900), EarlierPrompt(7_000, 900)],
        None,
        8_192,
    ),
]


@pytest.mark.parametrize(
    ("reported", "counted", "newest", "before", "window", "limit"), [r[1:] for r in CUT], ids=[r[0] for r in CUT]
)
def test_cut_prompts(
    reported: int, counted: int, newest: int, before: list[EarlierPrompt], window: int | None, limit: int
) -> None:
    assert cut_prompt(stopped(reported), counted, newest, before, window) == silent(limit)


NOT_CUT: list[tuple[str, Finished, int, int, list[EarlierPrompt], int | None]] = [
    ("the first turn", stopped(8_192), 25_000, 900, [], None),
    ("another size before", stopped(8_192), 25_000, 900, [EarlierPrompt(7_000, 900)], None),
    (
        "the template drops the reasoning of earlier turns",
        stopped(6_000),
        9_000,
        900,
        [EarlierPrompt(8_900, 1_900, True, 4_000), EarlierPrompt(5_500, 900, False, 4_000)],
        None,
    ),
    ("the newest text alone", stopped(1_024), 20_000, 1_000, [EarlierPrompt(1_024, 1_000)], None),
]


@pytest.mark.parametrize(
    ("answer", "counted", "newest", "before", "window"), [r[1:] for r in NOT_CUT], ids=[r[0] for r in NOT_CUT]
)
def test_prompts_that_may_be_whole(
    answer: Finished, counted: int, newest: int, before: list[EarlierPrompt], window: int | None
) -> None:
    assert cut_prompt(answer, counted, newest, before, window) is None


@given(
    st.integers(256, 200_000),
    st.integers(0, 400_000),
    st.integers(0, 100_000),
    st.lists(st.builds(EarlierPrompt, st.integers(1, 200_000), st.integers(0, 200_000), st.booleans()), max_size=8),
    st.none() | st.integers(1_000, 1_000_000),
)
def test_a_cut_takes_repetition_and_its_limit_was_taken(
    reported: int, counted: int, newest: int, before: list[EarlierPrompt], window: int | None
) -> None:
    """Check that the limit is a reported size, and at least this one."""
    told = cut_prompt(stopped(reported), counted, newest, before, window)
    if told is not None:
        assert told.limit in {reported, *(sent.reported for sent in before)}
        assert told.limit is not None
        assert told.limit >= reported
        assert len(before) > 1


def test_an_empty_stream_is_an_overflow_unless_the_prompt_is_small() -> None:
    assert empty_stream(9_000, window=8_192) == silent(None)
    assert empty_stream(9_000) == silent(None)
    assert empty_stream(1_000, window=8_192) is None
    assert empty_stream(100) is None


@pytest.mark.parametrize(
    ("usage", "prompt", "output"),
    [
        ({"prompt_tokens": 10, "completion_tokens": 2}, 10, 2),
        ({"input_tokens": 12, "cache_read_input_tokens": 181_000, "cache_creation_input_tokens": 900}, 181_912, None),
        ({"prompt_tokens": 1_800, "prompt_tokens_details": {"cached_tokens": 88_000}}, 89_800, None),
        ({"prompt_tokens": 90_000, "prompt_tokens_details": {"cached_tokens": 88_000}}, 90_000, None),
        ({"promptTokenCount": 5, "candidatesTokenCount": 6}, 5, 6),
        ({"prompt_eval_count": 7, "eval_count": 8}, 7, 8),
        ({"prompt_tokens": None, "completion_tokens": True}, None, None),
        ({}, None, None),
    ],
)
def test_usage(usage: dict[str, object], prompt: int | None, output: int | None) -> None:
    assert prompt_tokens(usage) == prompt
    assert output_tokens(usage) == output
