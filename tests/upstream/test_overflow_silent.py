"""What a finished answer tells of a prompt that did not fit, and what it doesn't."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.upstream.overflow import Overflow, recognise
from proxy.upstream.overflow.silent import (
    Finished,
    Sent,
    empty_stream,
    output_tokens,
    prompt_tokens,
    silent_overflow,
)


def silent(limit: int | None, counted: int | None = None, output: int | None = None) -> Overflow:
    return Overflow("silent", limit, "total" if limit else None, counted, output, "compact")


def stopped(prompt: int | None, output: int = 100, reason: str = "stop", *, empty: bool = False) -> Finished:
    return Finished(reason, prompt, output, empty)


# One row: the case, the answer, our count, what else is known, and what it tells.
FOUND: list[tuple[str, Finished, int, dict[str, Any], Overflow]] = [
    (
        "the finish reason says it",
        stopped(199_870, 130, "model_context_window_exceeded"),
        190_000,
        {},
        silent(200_000, 199_870, 130),
    ),
    (
        "and leaves some tokens unused",
        stopped(999_990, 1, "model_context_window_exceeded", empty=True),
        900_000,
        {},
        silent(1_000_000, 999_990, 1),
    ),
    ("or says nothing else", stopped(None, 3, "model_context_window_exceeded"), 5_000, {}, silent(None, None, 3)),
    (
        "a full window",
        stopped(262_144, 0, "length", empty=True),
        300_000,
        {"window": 262_144},
        silent(262_144, 262_144, 0),
    ),
    ("one token", stopped(8_191, 1, "length", empty=True), 8_000, {"asked": 500}, silent(8_192, 8_191, 1)),
    ("cut to a power of two", stopped(8_192, 3), 25_000, {}, silent(8_192)),
    ("cut to a round size", stopped(10_000), 40_000, {}, silent(10_000)),
    ("whole messages dropped", stopped(4_050), 20_000, {}, silent(4_050)),
    (
        "the same size while the prompt grows",
        stopped(11_111),
        16_000,
        {"before": [Sent(12_500, 11_150), Sent(14_000, 11_100)]},
        silent(11_150),
    ),
    (
        "a size that falls behind, message by message",
        stopped(3_900),
        4_800,
        {"before": [Sent(3_600, 3_590), Sent(4_300, 4_050)]},
        silent(4_050),
    ),
    (
        "nothing written, in a window that may be smaller",
        stopped(30_000, 1, "length", empty=True),
        30_000,
        {"window": 128_000},
        silent(None, 30_000, 1),
    ),
    ("no usage for far more than fits", stopped(0, 120, "length"), 20_000, {"window": 8_192}, silent(8_192)),
    ("aborted", stopped(0, 0, "abort", empty=True), 40_000, {"window": 32_768}, silent(None)),
]


@pytest.mark.parametrize(("answer", "counted", "known", "told"), [r[1:] for r in FOUND], ids=[r[0] for r in FOUND])
def test_silent_overflows(answer: Finished, counted: int, known: dict[str, Any], told: Overflow) -> None:
    assert silent_overflow(answer, counted, **known) == told


NOT_FOUND: list[tuple[str, Finished, int, dict[str, Any]]] = [
    ("an answer", stopped(5_000), 5_200, {"window": 8_192}),
    ("another tokenizer", stopped(8_192), 11_500, {}),
    ("all the other way", stopped(16_000), 10_000, {"window": 8_192}),
    ("far below, but no window", stopped(7_310), 20_000, {}),
    ("thoughts took the output", stopped(1_200, 4_096, "length", empty=True), 1_190, {"window": 400_000}),
    ("one token was asked for", stopped(5_000, 1, "length", empty=True), 5_000, {"asked": 1}),
    ("nothing written far under the window", stopped(1_000, 1, "length", empty=True), 1_000, {"window": 128_000}),
    ("nothing written, and not for its length", stopped(8_192, 0, "stop", empty=True), 8_000, {"window": 8_192}),
    ("the end of a long answer", stopped(5_000, 3_000, "length"), 5_000, {"window": 8_192}),
    ("the same prompt again", stopped(11_111), 12_500, {"before": [Sent(12_500, 11_150)]}),
    ("a prompt that grows, and is counted so", stopped(13_000), 16_000, {"before": [Sent(12_500, 10_150)]}),
    ("what the cache held is left out", stopped(5_200), 20_000, {"before": [Sent(10_000, 10_000)]}),
    ("and it says so", Finished("stop", 8_192, 3, empty=False, cached=14_000), 22_000, {}),
    ("no usage for what fits", stopped(None), 8_000, {"window": 8_192}),
    ("aborted, though it fits", stopped(0, 0, "abort", empty=True), 4_000, {"window": 32_768}),
    ("more than the window", stopped(201_500, 20), 200_900, {"window": 200_000}),
]


@pytest.mark.parametrize(("answer", "counted", "known"), [r[1:] for r in NOT_FOUND], ids=[r[0] for r in NOT_FOUND])
def test_answers(answer: Finished, counted: int, known: dict[str, Any]) -> None:
    assert silent_overflow(answer, counted, **known) is None


@pytest.mark.parametrize("prompt", [2_047, 2_048, 4_000, 4_050, 6_144, 8_191, 12_000, 16_200, 24_576, 40_960, 131_000])
def test_what_is_taught_was_taken(prompt: int) -> None:
    """Where a prompt is cut, the limit is never above what the upstream said it took."""
    told = silent_overflow(stopped(prompt), 4 * prompt)
    assert told is not None
    assert told.limit == prompt


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


def test_a_finished_answer_is_no_error() -> None:
    body = {"choices": [{"message": {"content": "x"}, "finish_reason": "model_context_window_exceeded"}]}
    assert recognise(200, json.dumps(body).encode()) is None
