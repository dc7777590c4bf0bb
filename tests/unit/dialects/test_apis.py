"""The API of a body."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.dialects.apis import archived_text, recognized

SAID = {"role": "user", "content": "Hi"}
RESULT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "1"}]}


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"messages": [SAID]}, "chat"),
        ({"messages": [SAID, {"role": "user", "content": [{"type": "text", "text": "a"}, 1]}, 2]}, "chat"),
        ({"messages": [SAID], "system": "Be brief."}, "messages"),
        ({"messages": [SAID, RESULT]}, "messages"),
        ({"input": "Hi"}, "responses"),
        ({"input": "Hi", "messages": [SAID]}, "chat"),
        ([1], "chat"),
    ],
)
def test_a_body_is_recognized(body: Any, name: str) -> None:
    assert recognized(json.dumps(body).encode()).name == name


@pytest.mark.parametrize(
    ("unit", "role"),
    [
        (SAID, "user"),
        (RESULT, "tool"),
        ({"role": "user", "content": [*RESULT["content"], {"type": "text", "text": "Go on"}]}, "user"),
        ({"role": "user", "content": []}, "user"),
        ({"role": "tool", "content": [{"type": "text", "text": "1"}]}, "tool"),
        ({"type": "function_call_output", "output": "1"}, "function_call_output"),
    ],
)
def test_results_are_not_of_the_user(unit: Any, role: str) -> None:
    assert archived_text(json.dumps(unit).encode())[0] == role
