"""Test the conversation structures that OpenAI rejects, and its error messages."""

from typing import Any

import pytest

from proxy.demo.validity import faults, parameter_faults


def call(id: str, arguments: Any = "{}") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "weather", "arguments": arguments}}


def asking(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


def result(id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": "Rain."}


ORPHAN = "messages with role 'tool' must be a response to a preceeding message with 'tool_calls'."
ORDER = {
    "a result at the start": ([result("a")], "messages.[0].role", ORPHAN),
    "an unknown id": (
        [asking(call("a")), result("z"), result("a")],
        "messages.[1].tool_call_id",
        "'tool_call_id' of 'z' not found in 'tool_calls' of previous message.",
    ),
}


@pytest.mark.parametrize(("messages", "param", "words"), ORDER.values(), ids=ORDER)
def test_calls_and_results_must_pair(messages: list[Any], param: str, words: str) -> None:
    found = faults({"messages": messages})
    assert [(fault.param, fault.code) for fault in found] == [(param, None)]
    assert words in found[0].message


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"model": "m", "max_tokens": 5, "max_completion_tokens": None}, []),
        ({}, [(None, None)]),
        ({"model": "m", "max_tokens": "5"}, [("max_tokens", "invalid_type")]),
        ({"model": "m", "max_tokens": True}, [("max_tokens", "invalid_type")]),
        ({"model": "m", "max_completion_tokens": 0}, [("max_completion_tokens", "integer_below_min_value")]),
    ],
)
def test_parameters_that_bear_on_the_size(body: dict[str, Any], expected: list[Any]) -> None:
    assert [(fault.param, fault.code) for fault in parameter_faults(body)] == expected
