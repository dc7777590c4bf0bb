"""An agent's session over Messages and Responses through the SDKs, at upstreams that reject malformed input."""

from pathlib import Path
from typing import Any, get_args

import anthropic
import pytest

from tests.kit.agent_script import TURNS, Step
from tests.kit.agent_sessions import Style, messages_session, responses_session
from tests.kit.combinations import combined
from tests.kit.scripted import behind, client
from tests.kit.strict_messages import Check, StrictMessages
from tests.kit.strict_responses import StrictResponses

WINDOW = 16_000
PROFILE = {"context_window": WINDOW, "max_input_tokens": WINDOW, "max_output_tokens": 2_000, "tokenizer": "o200k_base"}
ADAPTIVE = {"type": "adaptive"}
MANUAL = {"type": "enabled", "budget_tokens": 1_024}


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "ratio", "check", "thinking", "believed"),
    [
        ("claude-sonnet-5-5", 1.5, "error", ADAPTIVE, 128_000),
        ("claude-sonnet-5-5", 1.5, "drop_block", ADAPTIVE, WINDOW),
        ("claude-haiku-4-5", 1.2, "off", MANUAL, WINDOW),
    ],
)
def test_an_agent_never_fails_at_16k(
    model: str, ratio: float, check: Check, thinking: Any, believed: int, tmp_path: Path
) -> None:
    """If the window is unknown, it's learned from one refusal. After it, all thinking belongs to its prompt."""
    upstream = StrictMessages(WINDOW, check=check, ratio=ratio)
    known = {**PROFILE, "context_window": believed, "max_input_tokens": believed}
    with (
        behind(upstream.app, tmp_path, profile=known) as url,
        anthropic.Anthropic(base_url=url, api_key="sk-client", max_retries=0) as caller,
    ):
        assert len(list(messages_session(caller, TURNS, model, thinking=thinking))) == TURNS
    assert upstream.faults == []
    assert upstream.chat.faults == []
    assert len(upstream.refused) == 1 if believed > WINDOW else len(upstream.refused) <= 1
    assert len(upstream.conversations) == TURNS + len(upstream.refused)
    assert len(upstream.chat.summaries) + sum(received.summary for received in upstream.requests) > 0
    assert not [received for received in upstream.conversations if received.dropped]
    assert sum(len(received.reasoning) for received in upstream.conversations) > TURNS


@pytest.mark.long
@pytest.mark.parametrize(
    "policy",
    [
        {"pinned": ["part_7"]},
        pytest.param(
            {"trigger": [{"messages": 6, "fraction": 0.5}, {"fraction": 0.9}], "keep": {"tokens": 300}},
            marks=pytest.mark.full,
        ),
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
        assert len(list(messages_session(caller, 25, "claude-sonnet-5-5", thinking=ADAPTIVE))) == 25
    assert upstream.faults == []
    assert len(upstream.refused) <= 1


def test_a_field_for_delivery_moves_no_checkpoint(tmp_path: Path) -> None:
    """Some clients add it to each tool in the requests that they stream."""
    plain, varied = (delivered(tmp_path / str(len(names)), names) for names in ((), ("eager_input_streaming",)))
    assert len(plain.chat.summaries) == len(varied.chat.summaries) > 2
    assert [received.body["messages"] for received in plain.requests] == [
        received.body["messages"] for received in varied.requests
    ]
    assert len({str(received.body["tools"]) for received in varied.requests}) == 2


def delivered(folder: Path, fields: tuple[str, ...]) -> StrictMessages:
    """Return the upstream of a session that sets these fields of its tools in every second turn."""
    upstream = StrictMessages(8_000, check="off", script=lambda *_: Step(text="An answer. " * 40))
    tools = [{"name": f"tool_{n}", "description": "A tool.", "input_schema": {"type": "object"}} for n in range(12)]
    history: list[Any] = []
    folder.mkdir()
    with (
        behind(upstream.app, folder, profile={**PROFILE, "context_window": 8_000, "max_input_tokens": 8_000}) as url,
        anthropic.Anthropic(base_url=url, api_key="sk-client", max_retries=0) as caller,
    ):
        for turn in range(60):
            history.append({"role": "user", "content": f"Question {turn}: {'what is it? ' * 40}"})
            defined: Any = [{**tool, **dict.fromkeys(fields, True)} for tool in tools] if turn % 2 else tools
            body: Any = {"model": "claude-haiku-4-5", "max_tokens": 500, "messages": history, "tools": defined}
            answer = caller.messages.create(**body)
            history.append({"role": "assistant", "content": answer.content[0].to_dict()["text"]})
    return upstream


MODEL = "gpt-4.1"


@pytest.mark.long
@pytest.mark.parametrize("style", combined(2, get_args(Style)))
def test_an_agent_over_responses_never_fails_at_16k(style: Style, tmp_path: Path) -> None:
    upstream = StrictResponses(WINDOW)
    with behind(upstream.app, tmp_path, profile=PROFILE) as url, client(url) as caller:
        assert len(list(responses_session(caller, TURNS, style, MODEL))) == TURNS
    assert upstream.faults == []
    assert upstream.chat.faults == []
    assert len(upstream.refused) <= 1
    assert len(upstream.conversations) == TURNS + len(upstream.refused)
    assert upstream.chat.summaries, "the session must be long enough for a summary"
    # The open round of a checkpoint keeps its reasoning, and the server drops it.
    dropped = {id_ for received in upstream.conversations for id_ in received.dropped}
    assert len(dropped) <= 2 * (len(upstream.chat.summaries) + 1)
    if style != "without_ids":
        kept = sum(len(received.reasoning) - len(received.dropped) for received in upstream.conversations)
        assert kept > TURNS, "reasoning since the last checkpoint stays"
