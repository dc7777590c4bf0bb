"""Test the conversation structures that OpenAI rejects, and its error messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from proxy.demo.validity import Fault, faults, parameter_faults

SESSIONS = Path(__file__).parents[4] / "shared" / "data" / "sessions"

USER = {"role": "user", "content": "What is the weather in Oslo?"}


def call(id: str, arguments: Any = "{}") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "weather", "arguments": arguments}}


def asking(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


def result(id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": "Rain."}


def codes(messages: Any) -> list[tuple[str | None, str | None]]:
    return [(fault.param, fault.code) for fault in faults({"messages": messages})]


WELL_FORMED = {
    "a question": [USER],
    "all roles": [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Be briefer."},
        {"role": "user", "name": "ada", "content": [{"type": "text", "text": "Hello"}]},
        {"role": "assistant", "content": "Hello."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ],
    "parallel calls, answered in another order": [USER, asking(call("a"), call("b")), result("b"), result("a"), USER],
    "an id used again in a later round": [USER, asking(call("a")), result("a"), asking(call("a")), result("a")],
    "no content key beside tool calls": [USER, {"role": "assistant", "tool_calls": [call("a")]}, result("a")],
    "a custom tool": [
        USER,
        asking({"id": "a", "type": "custom", "custom": {"name": "sql", "input": "select 1"}}),
        result("a"),
    ],
    "the older function call": [
        USER,
        {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": "{}"}},
        {"role": "function", "name": "weather", "content": "Rain."},
    ],
    "a refusal": [USER, {"role": "assistant", "content": None, "refusal": "No."}],
    "media": [
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                {"type": "file", "file": {"file_id": "file-1"}},
            ],
        }
    ],
}


@pytest.mark.parametrize("messages", WELL_FORMED.values(), ids=WELL_FORMED)
def test_a_well_formed_conversation_has_no_fault(messages: list[Any]) -> None:
    assert faults({"messages": messages}) == []


ORPHAN = "messages with role 'tool' must be a response to a preceeding message with 'tool_calls'."
UNANSWERED = "The following tool_call_ids did not have response messages: "

ORDER = {
    "a result at the start": ([result("a")], "messages.[0].role", ORPHAN),
    "a result after an answer": (
        [USER, {"role": "assistant", "content": "x"}, result("a")],
        "messages.[2].role",
        ORPHAN,
    ),
    "a result after the user spoke": (
        [USER, asking(call("a")), result("a"), USER, result("a")],
        "messages.[4].role",
        ORPHAN,
    ),
    "a call without result at the end": ([USER, asking(call("a"))], "messages.[1].role", UNANSWERED + "a"),
    "a call without result before the user": ([asking(call("a")), USER], "messages.[1].role", UNANSWERED + "a"),
    "one of several calls": (
        [asking(call("a"), call("b"), call("c")), result("b")],
        "messages.[1].role",
        "messages: a, c",
    ),
    "an answer in between": (
        [asking(call("a")), {"role": "assistant", "content": "Wait."}],
        "messages.[1].role",
        UNANSWERED + "a",
    ),
    "an unknown id": (
        [asking(call("a")), result("z"), result("a")],
        "messages.[1].tool_call_id",
        "'tool_call_id' of 'z' not found in 'tool_calls' of previous message.",
    ),
    "an id of an earlier round": (
        [asking(call("a")), result("a"), asking(call("b")), result("a"), result("b")],
        "messages.[3].tool_call_id",
        "'tool_call_id' of 'a' not found",
    ),
    "two results for one call": (
        [asking(call("a")), result("a"), result("a")],
        "messages.[2].tool_call_id",
        "Duplicate value for 'tool_call_id' of 'a', in messages[1] and messages[2].",
    ),
}


@pytest.mark.parametrize(("messages", "param", "words"), ORDER.values(), ids=ORDER)
def test_calls_and_results_must_pair(messages: list[Any], param: str, words: str) -> None:
    found = faults({"messages": messages})
    assert [(fault.param, fault.code) for fault in found] == [(param, None)]
    assert words in found[0].message


SHAPES: dict[str, tuple[Any, str, str | None]] = {
    "no messages": ([], "messages", "empty_array"),
    "messages as text": ("hello", "messages", "invalid_type"),
    "a message as text": (["hello"], "messages[0]", "invalid_type"),
    "no role": ([{"content": "x"}], "messages[0].role", "missing_required_parameter"),
    "an unknown role": ([{"role": "robot", "content": "x"}], "messages[0].role", "invalid_value"),
    "a role that is no text": ([{"role": ["user"], "content": "x"}], "messages[0].role", "invalid_value"),
    "no content": ([USER, {"role": "user"}], "messages[1].content", "missing_required_parameter"),
    "content null": ([{"role": "user", "content": None}], "messages.[0].content", None),
    "content a number": ([{"role": "user", "content": 3}], "messages[0].content", "invalid_type"),
    "content without parts": ([{"role": "user", "content": []}], "messages[0].content", "empty_array"),
    "an empty answer": ([USER, {"role": "assistant"}], "messages[1].content", "missing_required_parameter"),
    "a part as text": ([{"role": "user", "content": ["x"]}], "messages[0].content[0]", "invalid_type"),
    "a part without type": (
        [{"role": "user", "content": [{"text": "x"}]}],
        "messages[0].content[0].type",
        "missing_required_parameter",
    ),
    "an image in a system message": (
        [{"role": "system", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        "messages[0].content[0].type",
        "invalid_value",
    ),
    "a text part without text": (
        [{"role": "user", "content": [{"type": "text"}]}],
        "messages[0].content[0].text",
        "missing_required_parameter",
    ),
    "an image without address": (
        [{"role": "user", "content": [{"type": "image_url"}]}],
        "messages[0].content[0].image_url",
        "missing_required_parameter",
    ),
    "an address that is no object": (
        [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
        "messages[0].content[0].image_url",
        "invalid_type",
    ),
    "a name that is no text": ([USER | {"name": 1}], "messages[0].name", "invalid_type"),
    "calls as an object": (
        [{"role": "assistant", "tool_calls": {}, "content": "x"}],
        "messages[0].tool_calls",
        "invalid_type",
    ),
    "no calls in the list": (
        [{"role": "assistant", "tool_calls": [], "content": "x"}],
        "messages[0].tool_calls",
        "empty_array",
    ),
    "a call as text": ([asking("a")], "messages[0].tool_calls[0]", "invalid_type"),  # type: ignore[arg-type]
    "a call without type": (
        [asking({"id": "a", "function": {"name": "f", "arguments": ""}})],
        "messages[0].tool_calls[0].type",
        "missing_required_parameter",
    ),
    "a call of unknown type": (
        [asking({"id": "a", "type": "magic"})],
        "messages[0].tool_calls[0].type",
        "invalid_value",
    ),
    "a call without function": (
        [asking({"id": "a", "type": "function"})],
        "messages[0].tool_calls[0].function",
        "missing_required_parameter",
    ),
    "a function as text": (
        [asking({"id": "a", "type": "function", "function": "f"})],
        "messages[0].tool_calls[0].function",
        "invalid_type",
    ),
    "arguments as an object": (
        [asking(call("a", {"city": "Oslo"}))],
        "messages[0].tool_calls[0].function.arguments",
        "invalid_type",
    ),
    "a result without id": (
        [{"role": "tool", "content": "x"}],
        "messages[0].tool_call_id",
        "missing_required_parameter",
    ),
}


@pytest.mark.parametrize(("messages", "param", "code"), SHAPES.values(), ids=SHAPES)
def test_each_message_must_be_sound(messages: Any, param: str, code: str | None) -> None:
    assert codes(messages) == [(param, code)]


def test_messages_must_be_there() -> None:
    assert faults({}) == [Fault("Missing required parameter: 'messages'.", "messages", "missing_required_parameter")]


def test_the_words_are_those_of_openai() -> None:
    messages = [asking(call("a", {"city": "Oslo"}))]
    assert faults({"messages": messages})[0].message == (
        "Invalid type for 'messages[0].tool_calls[0].function.arguments': expected a string, but got an object instead."
    )


def test_every_fault_is_found() -> None:
    assert codes([{"role": "robot", "content": "x"}, {"role": "user", "content": None}]) == [
        ("messages[0].role", "invalid_value"),
        ("messages.[1].content", None),
    ]


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


@pytest.mark.skipif(not SESSIONS.is_dir(), reason="the recorded sessions are not here")
def test_recorded_sessions_are_well_formed() -> None:
    for file in SESSIONS.glob("*.json"):
        content = json.loads(file.read_text(encoding="utf-8"))
        for session in content if isinstance(content, list) else [content]:
            assert faults(session) == []
