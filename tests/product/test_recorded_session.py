"""A real coding session, replayed turn by turn: every answer is the recorded one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.demo.upstream import Reply, StandIn, ToolCall
from tests.kit.scripted import common_prefix, protected

SESSION = Path(__file__).parents[3] / "shared" / "data" / "sessions" / "coding-a.json"

pytestmark = [pytest.mark.long, pytest.mark.skipif(not SESSION.exists(), reason="the recorded session is not at hand")]

MOST_SUMMARIES = {32_768: 10, 65_536: 5, 131_072: 4}
LEAST_SHARED = 0.97
"""Of the prompts' tokens, this share must be a common prefix with the prompt before, over the session."""


def recorded_reply(message: dict[str, Any]) -> Reply:
    calls = tuple(
        ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    )
    return Reply(content=message.get("content"), tool_calls=calls)


@pytest.mark.parametrize("window", [32_768, *(pytest.param(w, marks=pytest.mark.full) for w in (65_536, 131_072))])
def test_every_turn_fits_and_most_of_each_prompt_is_the_one_before(window: int, tmp_path: Path) -> None:
    """Replay the session at the smallest window, and at all three with ``--full``."""
    messages = json.loads(SESSION.read_text())["messages"]
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i]
    answers = iter(recorded_reply(messages[i]) for i in turns)
    upstream = StandIn(window=window, max_output=window // 4, responder=lambda body: next(answers))
    with protected(upstream, tmp_path, window) as client:
        url = f"{client.base_url}chat/completions"
        with httpx.Client(trust_env=False, timeout=120) as http:
            for i in turns:
                answer = http.post(
                    url, json={"model": "m", "messages": messages[:i]}, headers={"authorization": "Bearer k"}
                )
                assert answer.status_code == 200, answer.text[:500]
    assert len(upstream.conversations) == len(turns)
    assert all(request.tokens <= window for request in upstream.requests)
    assert upstream.faults == []
    assert len(upstream.summaries) <= MOST_SUMMARIES[window]
    share = cacheable(upstream)
    print(f"\n{window}: {len(upstream.summaries)} summaries, {share:.2%} of the prompt a common prefix")
    assert share >= LEAST_SHARED


def cacheable(upstream: StandIn) -> float:
    """The share of all prompts' tokens that is a common prefix with the prompt before."""
    shared = total = 0
    previous: list[bytes] = []
    for request in upstream.conversations:
        current = [json.dumps(message).encode() for message in request.body["messages"]]
        tokens = {
            raw: upstream.counter.message(message)
            for raw, message in zip(current, request.body["messages"], strict=True)
        }
        if previous:
            shared += common_prefix(previous, current, tokens)
            total += request.tokens
        previous = current
    return shared / total
