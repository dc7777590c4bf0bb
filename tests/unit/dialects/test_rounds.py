"""Sums of usage, and bodies with further values."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.dialects.chat.rounds import ChatTool
from proxy.dialects.messages.rounds import MessagesTool
from proxy.dialects.responses.rounds import ResponsesTool
from proxy.dialects.rounds import HiddenTool, VisibleResponse, WholeRound, add_usage


def test_a_usage_is_the_sum_of_its_numbers() -> None:
    total: dict[str, Any] = {"in": 1, "details": {"cached": 2, "tier": "x"}, "tier": "flex", "late": None, "flag": True}
    add_usage(
        total, {"in": 2, "details": {"cached": 3, "audio": 1}, "tier": None, "late": 4, "flag": False, "new": None}
    )
    details = {"cached": 5, "tier": "x", "audio": 1}
    assert total == {"in": 3, "details": details, "tier": "flex", "late": 4, "flag": False, "new": None}


def test_a_usage_has_the_iterations_of_all_rounds() -> None:
    total: dict[str, Any] = {}
    for number in (1, 2):
        add_usage(total, {"iterations": [{"type": "compaction", "input_tokens": number}]})
    assert [one["input_tokens"] for one in total["iterations"]] == [1, 2]


TOOLS: list[HiddenTool] = [ChatTool(), MessagesTool(), ResponsesTool()]
FIELDS = (
    *(
        "type",
        "index",
        "output_index",
        "item_id",
        "sequence_number",
        "item",
        "content_block",
        "delta",
        "usage",
        "error",
    ),
    *("message", "response", "output", "content", "choices", "tool_calls", "function", "arguments", "input", "id"),
    *("name", "text", "partial_json", "citation", "finish_reason", "stop_reason", "call_id", "stop", "part"),
)
VALUES = (
    *("tool", "tool_use", "function_call", "text", "text_delta", "input_json_delta", "citations_delta", "message"),
    *("message_start", "message_delta", "message_stop", "content_block_start", "content_block_delta", "error"),
    *("response.created", "response.output_item.added", "response.output_item.done", "response.completed"),
    *("response.failed", "tool_calls", "assistant", "", "{", 0, 1, -1, 0.5, None, True),
)
ODD = st.recursive(
    st.sampled_from(VALUES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=6),
    max_leaves=12,
)


@pytest.mark.parametrize("tool", TOOLS)
@given(events=st.lists(st.dictionaries(st.sampled_from(FIELDS), ODD, max_size=6), max_size=6))
def test_any_events_and_bodies_are_read(tool: HiddenTool, events: list[dict[str, Any]]) -> None:
    response = VisibleResponse()
    for first in (True, False):
        round = tool.round("tool", response, first=first)
        for event in events:
            round.feed(b"data: " + json.dumps(event).encode() + b"\n\n")
        round.finish()
        assert isinstance(json.loads(round.unit or b"[]"), dict | list)
        assert isinstance(response.text, str)
    for event in events:
        whole = WholeRound(tool, "tool", json.dumps(event).encode(), VisibleResponse())
        assert isinstance(json.loads(whole.body()), dict)
        assert isinstance(json.loads(whole.unit or b"[]"), dict | list)
