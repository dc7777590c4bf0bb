"""Which Messages requests show how an upstream counts."""

import json
from typing import Any

import pytest

from proxy.dialects.messages.counting import MessagesEvidence
from tests.kit.messages import words

TEXT = words(500)
CLEARING = {"type": "clear_thinking_20251015", "keep": "all"}


def thought(size: int) -> dict[str, Any]:
    return {"type": "thinking", "thinking": "hm", "signature": "s" * size}


def shows(*blocks: dict[str, Any], **fields: Any) -> bool:
    history = [
        {"role": "user", "content": TEXT},
        {"role": "assistant", "content": [*blocks, {"type": "tool_use", "id": "t1", "name": "run", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": TEXT}]},
    ]
    return MessagesEvidence().comparable(
        json.dumps({"model": "m", "max_tokens": 9, "messages": history, **fields}).encode()
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking": {"type": "enabled", "budget_tokens": 31_999}},
        {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}},
        {"safeguards": [{"type": "dangerous_tool_use", "classifier_context": {"live_cwd": "/srv/app", "v": 1}}]},
        {"context_management": {"edits": [CLEARING]}},
        {"context_management": {"edits": []}},
    ],
)
def test_fields_of_claude_code_add_nothing(fields: dict[str, Any]) -> None:
    assert shows(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"context_management": {"edits": [CLEARING, {"type": "clear_tool_uses_20250919"}]}},
        {"context_management": "all"},
        {"output_config": {"effort": "high", "format": {"type": "json_schema", "schema": {}}}},
        {"mcp_servers": [{"type": "url"}]},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
    ],
)
def test_other_fields_may_change_the_prompt(fields: dict[str, Any]) -> None:
    assert not shows(**fields)


def test_only_little_thinking_is_comparable() -> None:
    assert shows(thought(100))
    assert not shows(thought(1_000))
    assert not shows({"type": "redacted_thinking", "data": "s" * 1_000})
    assert not shows({"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}})
