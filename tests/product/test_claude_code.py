"""Sessions like those of Claude Code in small windows, with large tools and most of the output for thinking."""

import itertools
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.kit.agent_script import Step
from tests.kit.messages import words
from tests.kit.scripted import behind
from tests.kit.strict_messages import StrictMessages
from tests.kit.upstream import ToolCall

TURNS = 40
TOOLS = [
    {"name": f"Tool{number}", "description": words(450, f"t{number}x"), "input_schema": {"type": "object"}}
    for number in range(40)
]
"""18,000 tokens, like those of Claude Code."""

FIELDS = {
    "max_tokens": 32_000,
    "thinking": {"type": "enabled", "budget_tokens": 31_999},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "tools": TOOLS,
}
HEADERS = {"x-api-key": "k", "anthropic-version": "2023-06-01", "user-agent": "claude-cli/2.1.197 (external, cli)"}


def calls() -> Any:
    """The script of a model that calls a tool in each answer."""
    numbers = itertools.count(1)

    def script(text: str | None, call_id: str | None) -> Step:
        number = next(numbers)
        return Step(calls=(ToolCall(f"call_{number}", "Tool0", "{}"),), thinking=f"Call number {number} comes next.")

    return script


def session(upstream: StrictMessages, profile: dict[str, Any], model: str, tmp_path: Path) -> list[str]:
    """Run a session. Return the outcome of each request, none of which is refused."""
    history: list[Any] = [{"role": "user", "content": "Work through the whole task with the tool, please."}]
    outcomes = []
    with (
        behind(upstream.app, tmp_path, profile=profile) as url,
        httpx.Client(base_url=url, headers=HEADERS, trust_env=False, timeout=60) as http,
    ):
        for turn in range(TURNS):
            response = http.post("/v1/messages", json={**FIELDS, "model": model, "messages": history})
            assert response.status_code == 200, response.text
            outcomes.append(response.headers["x-compaction"])
            content = response.json()["content"]
            call = next(block for block in content if block["type"] == "tool_use")
            result = {"type": "tool_result", "tool_use_id": call["id"], "content": words(1_500, f"r{turn}x")}
            history += [{"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
    return outcomes


@pytest.mark.long
@pytest.mark.parametrize(
    ("window", "counts_output"), [(34_000, True), (41_000, False), pytest.param(64_000, True, marks=pytest.mark.full)]
)
def test_a_session_in_a_small_window(window: int, counts_output: bool, tmp_path: Path) -> None:
    """The proxy assumes 1.27 tokens for each that this upstream counts, until the usage shows its ratio."""
    upstream = StrictMessages(window, check="off", script=calls(), counts_output=counts_output)
    profile = {"context_window": window, "max_output_tokens": 32_000, "tokenizer": "o200k_base"}
    outcomes = session(upstream, profile, "claude-sonnet-4-5", tmp_path)
    assert upstream.refused == []
    assert upstream.faults == []
    compacted, summaries = outcomes.count("compacted"), sum(received.summary for received in upstream.requests)
    summaries += len(upstream.chat.summaries)
    assert compacted > TURNS // 4
    assert summaries * 3 <= compacted, (summaries, json.dumps(outcomes))
