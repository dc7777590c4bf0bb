"""Ids and data in a bridge's answers: valid for each API's owner, and on their way back to the server."""

import json
import re
from collections import deque
from typing import Any

import msgspec
import pytest

from proxy.upstream.bridge.completions import Completion
from proxy.upstream.bridge.messages import MessageBuilder, MessagesTranslation
from proxy.upstream.bridge.returned import Writer, is_unique, merge, restored, unique

VALID = re.compile(r"[a-zA-Z0-9_-]{1,40}")
LONG = "mcp__claude_ai_Gmail__search_threads_with_a_name_of_64_characters"


def turn(id: str, name: str = "run", **more: Any) -> list[dict[str, Any]]:
    call = {"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}}
    return [{"role": "assistant", "tool_calls": [call], **more}, {"role": "tool", "tool_call_id": id, "content": "1"}]


def ids(messages: list[dict[str, Any]]) -> tuple[str, str]:
    return messages[0]["tool_calls"][0]["id"], messages[1]["tool_call_id"]


@pytest.mark.parametrize("name", ["run", "Bash", "a-b", LONG[:64]])
@pytest.mark.parametrize("form", ["functions.{}:0", "functions.{}:137", "{}:1", "call.1", "ü", "call 1/2", "a-n-2e.x"])
def test_an_id_comes_back_to_its_server_only(form: str, name: str) -> None:
    own = form.format(name)
    given = Writer("kimi-k2", []).id(own, name)
    assert VALID.fullmatch(given)
    assert ids(restored(turn(given, name), "kimi-k2")) == (own, own)
    assert ids(restored(turn(given, name), "gpt-5")) == (given, given)


@pytest.mark.parametrize("data", ["proxy:", "proxy:[]", "proxy:{", 'proxy:{"calls":1}', 'proxy:{"by":"62c6"}', "x"])
def test_data_that_a_client_changed_is_ignored(data: str) -> None:
    blocks = [{"type": "redacted_thinking", "data": data}, {"type": "redacted_thinking"}]
    assert restored(turn("call_1", thinking_blocks=blocks), "m") == turn("call_1")


def test_streamed_details_are_joined() -> None:
    held: dict[str, Any] = {}
    text = {"type": "reasoning.text", "index": 0, "format": "f"}
    for part in ("I ", "think"):
        merge(held, {"reasoning_details": [{**text, "text": part, "signature": None}]})
    merge(held, {"reasoning_details": [{**text, "signature": "s"}, {"type": "reasoning.encrypted", "data": "x"}]})
    merge(held, {"reasoning_details": [{"type": "reasoning.encrypted", "data": "y"}]})
    assert held["reasoning_details"] == [
        {**text, "text": "I think", "signature": "s"},
        {"type": "reasoning.encrypted", "data": "x"},
        {"type": "reasoning.encrypted", "data": "y"},
    ]


def test_unique_ids_are_valid() -> None:
    assert VALID.fullmatch(unique("call"))
    assert is_unique("fc_proxy" + "0" * 32), "ids of earlier versions"


def answered(*deltas: dict[str, Any], taken: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Return the blocks of the message that a stream with these deltas makes, and check that they're valid."""
    builder = MessageBuilder("m", {}, (), 0)
    completion = Completion(builder, Writer("m", taken))
    for delta in deltas:
        deque(completion.feed({"choices": [{"index": 0, "delta": delta}]}), maxlen=0)
    deque(completion.feed({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}), maxlen=0)
    deque(completion.finish(), maxlen=0)
    content: list[dict[str, Any]] = json.loads(msgspec.json.encode(builder.answer))["content"]
    return content


def back(content: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the chat message for blocks that a client sends back."""
    made = MessagesTranslation({"model": "m", "messages": [{"role": "assistant", "content": content}]}, reasons=False)
    [message] = restored(made.request["messages"], "m")
    return message


def call(id: str, arguments: str = "{}", **more: Any) -> dict[str, Any]:
    return {"index": 0, "id": id, "type": "function", "function": {"name": "run", "arguments": arguments}, **more}


EXTRA = {"extra_content": {"google": {"thought_signature": "c2ln"}}}
DETAIL = {"type": "reasoning.encrypted", "data": "c2ln", "index": 0}


@pytest.mark.parametrize(
    "deltas",
    [
        [{"tool_calls": [call("functions.run:0", **EXTRA)]}],
        [
            {"tool_calls": [call("functions.run:0", "{")]},
            {"tool_calls": [{"index": 0, "function": {"arguments": "}"}, **EXTRA}]},
        ],
        [{"tool_calls": [call("functions.run:0")]}, {"tool_calls": [{"index": 0, "function": {}, **EXTRA}]}],
    ],
)
def test_data_of_a_call_comes_back_wherever_a_stream_has_it(deltas: list[dict[str, Any]]) -> None:
    [made] = back(answered(*deltas))["tool_calls"]
    assert (made["id"], made["extra_content"]) == ("functions.run:0", EXTRA["extra_content"])


@pytest.mark.parametrize("early", [True, False])
def test_details_of_a_message_come_back(early: bool) -> None:
    parts = [{"reasoning_details": [DETAIL]}, {"content": "I run it."}, {"tool_calls": [call("call_1")]}]
    content = answered(*(parts if early else reversed(parts)))
    assert back(content)["reasoning_details"] == [DETAIL]
    assert back(answered({**parts[0], **parts[1], **parts[2]}))["reasoning_details"] == [DETAIL]


def test_an_id_that_carries_data_comes_back() -> None:
    id = "call_1__thought__" + "c2ln+/" * 1_000
    content = answered({"tool_calls": [call(id)]})
    assert VALID.fullmatch(content[-1]["id"])
    assert back(content)["tool_calls"][0]["id"] == id
    assert back(content[-1:])["tool_calls"][0]["id"] == content[-1]["id"], "without the block, it's lost"
