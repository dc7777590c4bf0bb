"""Requests that continue a history at the server."""

import json
from typing import Any

import pytest

from proxy.dialects.responses.state import calls_in, continued, open_calls, previous_response

CALL = {"type": "function_call", "id": "fc_1", "call_id": "a", "name": "f", "arguments": "{}", "status": "completed"}
OUTPUT = {"type": "function_call_output", "call_id": "a", "output": "1"}


def raw(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "previous_response_id": "resp_1", "input": "go on", **fields}).encode()


def test_a_body_that_is_no_object_names_no_response() -> None:
    assert previous_response(b'["previous_response_id"]') is None


@pytest.mark.parametrize(
    ("items", "found"), [([OUTPUT], {"a"}), ([CALL, OUTPUT], set()), ([], set()), ("text", set()), ([1, OUTPUT], {"a"})]
)
def test_calls_that_only_the_server_has_are_found(items: Any, found: set[str]) -> None:
    assert open_calls(raw(input=items)) == found


def test_calls_lose_the_ids_by_which_the_server_knows_them() -> None:
    other = {**CALL, "call_id": "b"}
    assert calls_in([{"type": "reasoning"}, CALL, other, 1], frozenset({"a"})) == [
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    ]
    assert calls_in("nothing", frozenset({"a"})) == []


def test_a_request_continues_from_the_compacted_chain() -> None:
    sent = raw(input=[OUTPUT], tools=[], unknown={"a": 1.50})
    body = continued(sent, [{"type": "compaction"}], [CALL])
    assert json.loads(body) == {
        "model": "m",
        "input": [{"type": "compaction"}, CALL, OUTPUT],
        "tools": [],
        "unknown": {"a": 1.5},
    }
    assert b'"unknown":{"a": 1.5}' in body


def test_a_text_becomes_a_message() -> None:
    assert json.loads(continued(raw(), [], []))["input"] == [{"role": "user", "content": "go on"}]
