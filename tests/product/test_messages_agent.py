"""An agent's session over ``/v1/messages`` through the official SDK, at an upstream that rejects malformed input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.kit.agent_script import TURNS
from tests.kit.agent_sessions import messages_session
from tests.kit.scripted import behind
from tests.kit.strict_messages import Check, StrictMessages

WINDOW = 16_000
PROFILE = {"context_window": WINDOW, "max_input_tokens": WINDOW, "max_output_tokens": 2_000, "tokenizer": "o200k_base"}
ADAPTIVE = {"type": "adaptive"}
MANUAL = {"type": "enabled", "budget_tokens": 1_024}


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "ratio", "check", "thinking"),
    [
        ("claude-sonnet-5-5", 1.5, "error", ADAPTIVE),
        ("claude-sonnet-5-5", 1.5, "drop_block", ADAPTIVE),
        ("claude-haiku-4-5", 1.2, "off", MANUAL),
    ],
)
def test_an_agent_never_fails_at_16k(model: str, ratio: float, check: Check, thinking: Any, tmp_path: Path) -> None:
    upstream = StrictMessages(WINDOW, check=check, ratio=ratio)
    with (
        behind(upstream.app, tmp_path, profile=PROFILE) as url,
        anthropic.Anthropic(base_url=url, api_key="sk-client", max_retries=0) as caller,
    ):
        assert len(list(messages_session(caller, TURNS, model, thinking=thinking))) == TURNS
    assert upstream.faults == []
    assert upstream.chat.faults == []
    assert len(upstream.refused) <= 1
    assert len(upstream.conversations) == TURNS + len(upstream.refused)
    assert len(upstream.chat.summaries) + sum(received.summary for received in upstream.requests) > 0
    assert not [received for received in upstream.conversations if received.dropped]
    assert sum(len(received.reasoning) for received in upstream.conversations) > TURNS


@pytest.mark.long
def test_an_agent_never_fails_while_the_limit_is_learned(tmp_path: Path) -> None:
    """The proxy learns the window from one refusal. After it, no thinking is sent that belongs to another prompt."""
    upstream = StrictMessages(WINDOW, check="error", ratio=1.5)
    known = {**PROFILE, "context_window": 128_000, "max_input_tokens": 128_000}
    with (
        behind(upstream.app, tmp_path, profile=known) as url,
        anthropic.Anthropic(base_url=url, api_key="sk-client", max_retries=0) as caller,
    ):
        assert len(list(messages_session(caller, TURNS, "claude-sonnet-5-5", thinking=ADAPTIVE))) == TURNS
    assert len(upstream.refused) == 1
    assert upstream.faults == []


@pytest.mark.long
@pytest.mark.parametrize(
    "policy",
    [
        {"pinned": ["part_7"]},
        {"trigger": [{"messages": 6, "fraction": 0.5}, {"fraction": 0.9}], "keep": {"tokens": 300}},
        {"summary": {"max_tokens": 3_000}, "trigger": {"tokens": 2_000}, "keep": {"messages": 2}},
    ],
)
def test_an_agent_never_fails_under_unusual_policies(policy: dict[str, Any], tmp_path: Path) -> None:
    """If requests must be fitted, or a summary saves too little at first, more than checkpoints changes prompts."""
    upstream = StrictMessages(6_000, check="error", ratio=1.2)
    known = {**PROFILE, "context_window": 6_000, "max_input_tokens": 6_000, "max_output_tokens": 500}
    with (
        behind(upstream.app, tmp_path, profile=known, policy=policy) as url,
        anthropic.Anthropic(base_url=url, api_key="sk-client", max_retries=0) as caller,
    ):
        assert len(list(messages_session(caller, TURNS, "claude-sonnet-5-5", thinking=ADAPTIVE))) == TURNS
    assert upstream.faults == []
    assert len(upstream.refused) <= 1
