"""Answers and requests of bridges: ids and data in answers, their bounds, native requests, and refusals."""

import asyncio
import json
import re
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from proxy.upstream.bridge.completions import Bounded, Completion
from proxy.upstream.bridge.messages import MessageBuilder, MessagesTranslation
from proxy.upstream.bridge.returned import Writer, cleaned, is_unique, merge, restored, unique
from proxy.upstream.bridge.transport import Bridge
from proxy.upstream.relay import Address, RelayTransport
from proxy.upstream.transport import CHAT_PATH, MESSAGES_PATH, RESPONSES_PATH, Outgoing
from tests.kit.translation import outgoing

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


TEXT = "one E EN two END three STOP four"


def bounded(pieces: list[dict[str, Any]], stops: list[str], *, single: bool = False) -> dict[str, Any]:
    builder = MessageBuilder("m", {}, stops, 0)
    completion = Completion(Bounded(builder, stops, single=single), Writer("m", []))
    events = []
    for piece in pieces:
        events += completion.feed({"choices": [{"index": 0, "delta": piece, "finish_reason": None}]})
    events += completion.feed({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
    events += completion.feed({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 9}})
    events += completion.finish()
    streamed = "".join(one["delta"].get("text", "") for one in events if one["type"] == "content_block_delta")
    whole = "".join(block.get("text", "") for block in builder.answer["content"])
    assert streamed == whole
    assert builder.answer["usage"]["output_tokens"] == 9
    return builder.answer


def test_an_answer_without_a_stop_sequence_stays_whole() -> None:
    answer = bounded([{"content": letter} for letter in TEXT], ["ENDED", "four!"])
    assert answer["content"] == [{"type": "text", "text": TEXT}]
    assert answer["stop_reason"] == "max_tokens"


def test_a_single_answer_has_its_first_call_only() -> None:
    calls = [
        {"tool_calls": [{"index": index, "id": f"c{index}", "function": {"name": "get", "arguments": "{}"}}]}
        for index in range(3)
    ]
    assert [block["id"] for block in bounded(calls, [], single=True)["content"]] == ["c0"]


SIGNED = {"type": "thinking", "thinking": "Hm.", "signature": "c2ln"}
UNSIGNED = {"type": "thinking", "thinking": "Hm.", "signature": ""}
CALL = {"type": "tool_use", "id": "call_1", "name": "run", "input": {}}
USER = {"role": "user", "content": "go"}
RESULT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "1"}]}


def sent(
    body: bytes, path: str, *, verifies: bool = True, model: str = "m", expanded: Callable[[], bytes] | None = None
) -> bytes:
    request = Outgoing(body, model, False, [], None, 1.0, path=path, expanded=expanded)
    return asyncio.run(cleaned(request, verifies=verifies, short_ids=model.startswith("mistral"))).body


def messages(*content: Any, **fields: Any) -> bytes:
    made = [USER, *({"role": "assistant", "content": one} for one in content), RESULT]
    return json.dumps({"model": "m", "messages": made, **fields}).encode()


def test_a_round_without_its_thinking_is_asked_without_manual_thinking() -> None:
    thinking = {"type": "enabled", "budget_tokens": 2_000}
    raw = sent(messages([UNSIGNED, CALL], thinking=thinking), MESSAGES_PATH)
    assert json.loads(raw)["thinking"] == {"type": "disabled"}
    raw = sent(messages([UNSIGNED, CALL], [SIGNED, CALL], thinking=thinking), MESSAGES_PATH)
    assert json.loads(raw)["thinking"] == thinking


@pytest.mark.parametrize(
    ("path", "raw"),
    [
        (MESSAGES_PATH, messages([SIGNED, CALL], "“a” \ud800")),
        (MESSAGES_PATH, b'{"messages": "\\"signature\\":\\"\\"", "x": "proxy:", "signature":""}'),
        (MESSAGES_PATH, b'{"signature":"" broken'),
        (RESPONSES_PATH, b'{"input":"my_proxy","x":1e400}'),
        (RESPONSES_PATH, b'{"input":[ {"role":"user","content":"my_proxy"} ] }'),
        (CHAT_PATH, b'{"messages":[{"role":"user", "content":"x"}],"x":1e400}'),
        (CHAT_PATH, b'{"messages":[1,{"tool_calls":"__thought__"},{"tool_calls":[1,{"id":2}],"tool_call_id":[]}]}'),
        (MESSAGES_PATH, b'{"messages":[1,{"content":[1,{"signature":"","type":"proxy:"}]},{"content":1}]}'),
        (RESPONSES_PATH, b'{"input":[1,{"id":"my_proxy"},[],{"type":"item_reference","id":1}]}'),
    ],
)
def test_other_requests_keep_their_bytes(path: str, raw: bytes) -> None:
    assert sent(raw, path) == raw


def chat(id: str) -> bytes:
    call = {"id": id, "type": "function", "function": {"name": "run", "arguments": "{}"}}
    made = [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": id, "content": "1"}]
    return json.dumps({"model": "m", "messages": made}).encode()


@pytest.mark.parametrize(
    ("model", "id", "seen"),
    [
        ("gpt-5", "call_1__thought__c2ln", "call_1"),
        ("gemini-3-pro", "call_1__thought__c2ln", "call_1__thought__c2ln"),
        ("gpt-5", "functions.run:0", "functions.run:0"),
        ("mistral-large", "aB3456789", "aB3456789"),
    ],
)
def test_ids_of_chat_completions(model: str, id: str, seen: str) -> None:
    assert json.loads(sent(chat(id), CHAT_PATH, model=model)) == json.loads(chat(seen))


@pytest.mark.parametrize("messages", ["x", [1], [{"role": "assistant", "tool_calls": [{}]}]])
def test_a_request_that_cannot_be_translated_is_answered(messages: object) -> None:
    """An exception would skip the record of the attempt, and fail a summary's request."""

    async def scenario() -> None:
        relay = RelayTransport(Address("http://127.0.0.1:9"), upstream="main", api_key=None, headers={})
        answer = await Bridge("chat", "responses", relay).send(outgoing({"messages": messages}))
        assert answer.status == 400
        assert (
            "can't translate" in msgspec.json.decode(b"".join([part async for part in answer.body]))["error"]["message"]
        )

    asyncio.run(scenario())


IMPORTS = """
import asyncio, sys
from proxy.upstream.bridge.transport import TRANSLATORS, Bridge
from proxy.upstream.transport import Outgoing

for client, upstream in TRANSLATORS:
    name = b'"input"' if client == "responses" else b'"messages"'
    body = b'{"model": "m", "max_tokens": 9, %b: [{"role": "user", "content": "Hello"}]}' % name
    asked = Outgoing(body=body, model="m", stream=False, headers=[], credential=None, timeout=9.0)
    asyncio.run(Bridge(client, upstream, None).translate(asked))
print("litellm" in sys.modules)
"""


@pytest.mark.long
def test_usual_requests_dont_import_litellm() -> None:
    """The import takes seconds, and 200 MB."""
    made = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, check=True, text=True)
    assert made.stdout == "False\n"
