"""Requests to compact, and their results, on Anthropic's API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.dialects.messages.native import MessagesCompaction

API = MessagesCompaction()
BODY = {"model": "m", "max_tokens": 10, "stream": True, "messages": [{"role": "user", "content": "Hi"}]}
BLOCK = {"type": "compaction", "content": "Notes.", "signature": "c2ln", "encrypted_content": None}


def asked(**fields: Any) -> dict[str, Any] | None:
    made = API.request(json.dumps({**BODY, **fields}).encode(), "Write notes.", 500)
    return None if made is None else dict(json.loads(made))


def test_a_request_keeps_all_fields_of_the_prompt() -> None:
    tools = [{"name": "read", "input_schema": {}}]
    made = asked(tools=tools, system="Be brief.", thinking={"type": "enabled", "budget_tokens": 2_000})
    assert made == {
        "model": "m",
        "max_tokens": 2_500,
        "messages": BODY["messages"],
        "tools": tools,
        "system": "Be brief.",
        "thinking": {"type": "enabled", "budget_tokens": 2_000},
        "compaction": {"type": "summarize", "instructions": "Write notes."},
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"stop_sequences": ["x"]},
        {"output_format": {"type": "json_schema"}},
        {"output_config": {"format": {"type": "json_schema"}}},
        {"tool_choice": {"type": "any"}},
        {"tool_choice": {"type": "tool", "name": "read"}},
    ],
)
def test_some_options_rule_out_a_request(fields: dict[str, Any]) -> None:
    assert asked(**fields) is None


@pytest.mark.parametrize(
    "fields", [{"stop_sequences": []}, {"output_config": {"effort": "low"}}, {"tool_choice": {"type": "auto"}}]
)
def test_other_options_do_not(fields: dict[str, Any]) -> None:
    assert asked(**fields) is not None


@pytest.mark.parametrize(
    ("fields", "accepts"),
    [
        ({}, True),
        ({"context_management": {"edits": []}}, False),
        ({"context_management": None}, True),
        ({"output_config": {"task_budget": {"total": 9, "remaining": 5}}}, False),
        ({"output_config": {"task_budget": {"total": 9}}}, True),
        ({"messages": [{"role": "user", "content": 'the field "context_management"'}]}, True),
    ],
)
def test_some_options_rule_out_a_block(fields: dict[str, Any], accepts: bool) -> None:
    assert API.accepts(json.dumps({**BODY, **fields}).encode()) is accepts


def test_a_block_is_sent_as_it_came() -> None:
    answer = {"content": [BLOCK], "stop_reason": "compaction"}
    made = API.read(json.dumps(answer).encode())
    assert made is not None
    assert json.loads(made.unit) == {"role": "assistant", "content": [BLOCK]}
    assert made.text == "Notes."


@pytest.mark.parametrize(
    "answer",
    [
        {"content": [], "stop_reason": "max_tokens"},
        {"content": [BLOCK], "stop_reason": "end_turn"},
        {"content": [BLOCK, BLOCK], "stop_reason": "compaction"},
        {"content": [{**BLOCK, "content": None}], "stop_reason": "compaction"},
        {"content": [{**BLOCK, "content": ""}], "stop_reason": "compaction"},
        {"content": [{**BLOCK, "content": 5}], "stop_reason": "compaction"},
        {"content": [{"type": "compaction", "content": "Notes."}], "stop_reason": "compaction"},
        {"content": "Notes.", "stop_reason": "compaction"},
        [],
    ],
)
def test_anything_else_is_a_failure(answer: Any) -> None:
    assert API.read(json.dumps(answer).encode()) is None


def test_the_usage_is_in_the_iterations() -> None:
    rounds = [{"type": "compaction", "input_tokens": 5, "cache_read_input_tokens": 90, "output_tokens": 7}]
    usage = {"input_tokens": 0, "output_tokens": 0, "iterations": rounds}
    end = API.read_usage(json.dumps({"usage": usage}).encode())
    assert (end.prompt, end.output, end.cache_read) == (95, 7, 90)
