"""The requested output doesn't fit next to the conversation: the proxy lowers it and changes nothing else."""

import itertools
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from proxy.dialects.chat.request import parse
from proxy.limits.budget import CAUTION_PART, clamp_output, lower_thinking, output_reserve
from tests.kit.combinations import combined
from tests.kit.messages import words
from tests.kit.scripted import behind, chat, protected
from tests.kit.strict_messages import StrictMessages
from tests.kit.upstream import StandIn, text_tokens

WINDOW = 16_000


def sent(upstream: StandIn, tmp_path: Path, body: bytes, **policy: Any) -> httpx.Response:
    with protected(upstream, tmp_path, WINDOW, policy) as caller, httpx.Client(trust_env=False, timeout=60) as http:
        return http.post(f"{caller.base_url}chat/completions", content=body, headers={"authorization": "Bearer k"})


def written(turns: int, **fields: Any) -> bytes:
    return json.dumps({"model": "m", "temperature": 0.50, **fields, "messages": chat(turns, 500), "seed": 7}).encode()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("turns", [0, 4, 8])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_output_is_lowered_to_what_is_left(name: str, turns: int, stream: bool, tmp_path: Path) -> None:
    upstream = StandIn(window=WINDOW, max_output=WINDOW)
    body = written(turns, **{name: WINDOW, "stream": stream})
    answer = sent(upstream, tmp_path, body)
    assert answer.status_code == 200
    assert (answer.headers["x-compaction"], answer.headers["x-compaction-output"]) == ("none", "clamped")
    (received,) = upstream.requests
    left = WINDOW - received.tokens
    output = received.body[name]
    assert left * 0.95 <= output <= left
    fields = json.loads(body)
    assert list(received.body) == list(fields)
    assert {**received.body, name: WINDOW} == fields


NARROW = 40_960
TOOLS = [
    {"name": f"tool_{number}", "description": words(100, f"t{number}x"), "input_schema": {"type": "object"}}
    for number in range(80)
]


def narrow_session(
    tmp_path: Path, upstream: StrictMessages, window: int, bodies: Iterable[dict[str, Any]], **policy: Any
) -> list[httpx.Response]:
    """Return the responses to Messages requests that ask for 32,000 tokens of output."""
    profile = {"context_window": window, "max_output_tokens": 32_000, "tokenizer": "o200k_base"}
    sent = []
    with (
        behind(upstream.app, tmp_path, profile=profile, policy=policy) as url,
        httpx.Client(base_url=url, trust_env=False, timeout=60) as http,
    ):
        for body in bodies:
            given = {"model": "claude-sonnet-4-5", "max_tokens": 32_000, "tools": TOOLS[:40], **body}
            headers = {"x-api-key": "k", "anthropic-version": "2023-06-01"}
            sent.append(http.post("/v1/messages", json=given, headers=headers))
    return sent


@pytest.mark.parametrize(
    ("counts_output", "budget", "window"), combined(3, [False, True], [16_000, 31_999], [34_000, NARROW, 64_000])
)
def test_thinking_for_most_of_the_window_leaves_room_for_the_prompt(
    window: int, budget: int, counts_output: bool, tmp_path: Path
) -> None:
    """Claude Code reserves 32,000 tokens of output, nearly all for thinking, next to large tools."""
    upstream = StrictMessages(window, check="off", counts_output=counts_output)
    thinking = {"type": "enabled", "budget_tokens": budget}
    history = chat(30, 1_100)[1:]
    bodies = [{"thinking": thinking, "messages": history[: 2 * turns - 1]} for turns in range(1, 31, 3)]
    responses = narrow_session(tmp_path, upstream, window, bodies)
    assert {response.status_code for response in responses} == {200}
    assert upstream.refused == []
    assert upstream.faults == []
    assert responses[-1].headers["x-compaction"] == "compacted"
    first = upstream.conversations[0]
    assert max(received.tokens for received in upstream.conversations) > 0.45 * window
    if first.tokens + 32_000 < window:
        assert (first.body["max_tokens"], first.body["thinking"]) == (32_000, thinking)


def test_an_output_that_changes_from_turn_to_turn_moves_no_checkpoint(tmp_path: Path) -> None:
    turns = 60
    history = chat(turns, 100)

    def breaks(asked: tuple[int, ...]) -> int:
        """The prompts of a session that don't begin with the one before."""
        upstream = StandIn(window=WINDOW, max_output=WINDOW)
        folder = tmp_path / str(len(asked))
        folder.mkdir()
        with protected(upstream, folder, WINDOW) as caller:
            for turn in range(turns):
                limit = asked[turn % len(asked)]
                # The client transforms ``messages``, which takes time. It sends ``extra_body`` unchanged.
                extra = {"messages": history[: 2 + 2 * turn]}
                caller.chat.completions.create(model="m", messages=[], extra_body=extra, max_tokens=limit)
        assert {received.status for received in upstream.requests} == {200}
        prompts = [received.body["messages"] for received in upstream.conversations]
        broken = sum(new[: len(old)] != old for old, new in itertools.pairwise(prompts))
        # One more may have been prepared and not used yet.
        assert broken <= sum(received.summary for received in upstream.requests) <= broken + 1
        return broken

    constant = breaks((4_000,))
    assert constant > 0
    for outputs in (500, 4_000), tuple(random.Random(3).randrange(500, 4_001) for _ in range(turns)):
        assert breaks(outputs) == constant


def test_both_names_are_lowered_and_each_other_value_keeps_its_bytes() -> None:
    raw = b'{ "max_tokens" : 9e3, "x":1.0e-7,"max_completion_tokens":5, "n":  1, "messages":[{"role":"user"}]}'
    body = parse(raw)
    assert body.max_output == 5
    assert body.rewritten(max_output=5) == (
        b'{"max_tokens":5,"x":1.0e-7,"max_completion_tokens":5,"n":1,"messages":[{"role":"user"}]}'
    )


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(0, 10**6))
def test_a_lowered_output_always_fits(window: int, asked: int, prompt: int) -> None:
    output = clamp_output(window, asked, prompt)
    kept = output_reserve(window, asked)
    assert kept == output_reserve(window, asked + 1), "whatever the request asks for"
    if prompt + asked <= window or prompt > window - min(asked, kept):
        assert output is None
    else:
        assert output is not None
        assert 1 <= output < asked
        assert prompt + output <= window
        assert output >= min(asked, kept) - 1 - prompt // CAUTION_PART
    assert output_reserve(None, asked) == asked
    assert output_reserve(window, asked, 10) <= 10


@given(st.integers(8_192, 10**6), st.integers(2_048, 10**5), st.integers(0, 10**6), st.data())
def test_thinking_always_fits_into_a_lowered_output(window: int, asked: int, prompt: int, data: st.DataObject) -> None:
    thinking = data.draw(st.integers(1_024, asked - 1))
    kept = output_reserve(window, asked, thinking=thinking)
    assert kept <= max(window // 4, 2_048)
    output = clamp_output(window, asked, prompt, thinking=thinking)
    if prompt <= window - kept and prompt + asked > window:
        assert output is not None
    if output is not None:
        assert prompt + output <= window
        assert 1_024 <= lower_thinking(thinking, output) < output


BOTH_COUNT = {
    "SGLang": "Requested token count exceeds the model's maximum context length of {w} tokens. You requested a total "
    "of {t} tokens: {p} tokens from the input messages and {o} tokens for the completion.",
    "OpenRouter": "This endpoint's maximum context length is {w} tokens. However, you requested about {t} tokens ({p} "
    "of text input, {o} in the output). Please reduce the length of either one.",
    "Anthropic": "input length and `max_tokens` exceed context limit: {p} + {o} > {w}, decrease input length or "
    "`max_tokens` and try again",
    "vLLM": "'max_tokens' or 'max_completion_tokens' is too large: {o}. This model's maximum context length is {w} "
    "tokens and your request has {p} input tokens ({o} > {w} - {p}).",
    "vLLM, older": "This model's maximum context length is {w} tokens. However, you requested {t} tokens ({p} in the "
    "messages, {o} in the completion). Please reduce the length of the messages or completion.",
    "Cerebras": "Please reduce the length of the messages or completion. Current length is {t} while limit is {w}",
    "with a sum": "prompt tokens + max_tokens = {t} exceeds the maximum context length {w}",
    "with the output": "max_tokens ({o}) plus the prompt exceeds the context window of {w} tokens.",
    "without figures": "The prompt plus max_tokens exceeds the model's context window.",
}
"""Refusals of a prompt of ``p`` tokens with an output of ``o``, ``t`` together, in a window of ``w``."""


@pytest.mark.parametrize(("wording", "ratio"), combined(2, BOTH_COUNT, [0.8, 1.25]))
def test_a_smaller_output_comes_before_a_smaller_prompt(wording: str, ratio: float, tmp_path: Path) -> None:
    """The upstream counts ``ratio`` times as many tokens as the proxy, which takes its window for larger than it is."""
    asked: list[int] = []

    async def answer(request: Request) -> JSONResponse:
        body = json.loads(await request.body())
        prompt, output = int(ratio * text_tokens(json.dumps(body["messages"]))), body["max_tokens"]
        asked.append(output)
        if prompt + output > WINDOW:
            message = BOTH_COUNT[wording].format(p=prompt, o=output, t=prompt + output, w=WINDOW)
            return JSONResponse({"error": {"message": message, "type": "invalid_request_error"}}, 400)
        choice = {"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}
        usage = {"prompt_tokens": prompt, "completion_tokens": 3, "total_tokens": prompt + 3}
        return JSONResponse({"object": "chat.completion", "choices": [choice], "usage": usage})

    app = Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])
    with protected(app, tmp_path, 8 * WINDOW) as caller, httpx.Client(trust_env=False) as http:
        for part in (10, 40, 60, 75, 90):
            for turns in (1, 3, 7):
                body = written(turns, max_tokens=WINDOW * part // 100)
                response = http.post(f"{caller.base_url}chat/completions", content=body, headers={"x-api-key": "k"})
                assert (response.status_code, response.headers["x-compaction"]) == (200, "none"), (part, turns)
    assert min(asked) >= WINDOW // 20


@pytest.mark.parametrize(
    ("known", "budget"),
    combined(
        2,
        [WINDOW, 8 * WINDOW],
        [
            {"thinking": {"type": "enabled", "budget_tokens": 6_000}},
            {"reasoning": {"effort": "high", "max_tokens": 6_000}},
            {"thinking_budget": 6_000},
            {"extra_body": {"google": {"thinking_config": {"thinkingBudget": 6_000}}}},
            {"chat_template_kwargs": {"reasoning_budget": 6_000}},
            {"nvext": {"max_thinking_tokens": 6_000}},
        ],
    ),
)
def test_a_lowered_output_stays_above_each_budget_for_thinking(
    known: int, budget: dict[str, Any], tmp_path: Path
) -> None:
    upstream = StandIn(window=WINDOW, max_output=WINDOW)
    with protected(upstream, tmp_path, known) as caller, httpx.Client(trust_env=False) as http:
        for turns in (4, 6, 9, 13):
            body = written(turns, max_tokens=12_000, **budget)
            response = http.post(f"{caller.base_url}chat/completions", content=body, headers={"x-api-key": "k"})
            assert response.status_code == 200
    outputs = [received.body["max_tokens"] for received in upstream.conversations]
    assert min(outputs) >= 6_000 + WINDOW // 8
    assert min(outputs) < 12_000
