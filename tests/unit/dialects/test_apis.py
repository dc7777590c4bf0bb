"""The API of a body."""

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
        ([{"role": "assistant", "content": "1"}, {"type": "function_call", "name": "f"}], "assistant"),
    ],
)
def test_results_are_not_of_the_user(unit: Any, role: str) -> None:
    assert archived_text(json.dumps(unit).encode())[0] == role


SEARCHED: dict[str, Any] = {
    "shell": {"type": "shell_call_output", "call_id": "c1", "output": [{"stdout": "FACT", "stderr": ""}]},
    "logs": {"type": "code_interpreter_call", "id": "x", "code": "1", "outputs": [{"type": "logs", "logs": "FACT"}]},
    "patch": {"type": "apply_patch_call", "operation": {"type": "update_file", "diff": "FACT"}},
    "run": {"role": "assistant", "content": [
        {"type": "bash_code_execution_tool_result", "tool_use_id": "x",
         "content": {"type": "bash_code_execution_result", "stdout": "FACT"}}]},
    "title": {"role": "user", "content": [
        {"type": "document", "title": "FACT", "source": {"type": "base64", "data": "aWRz"}}]},
    "items": [{"role": "assistant", "content": [{"type": "output_text", "text": "I'll look."}]},
              {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "FACT"}],
    "legacy": {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "FACT"}},
}  # fmt: skip


@pytest.mark.parametrize("name", SEARCHED)
def test_archived_messages_are_searched_in_all_of_their_texts(name: str) -> None:
    text = archived_text(json.dumps(SEARCHED[name]).encode())[1]
    assert "FACT" in text
    assert "aWRz" not in text
    assert "c1" not in text
