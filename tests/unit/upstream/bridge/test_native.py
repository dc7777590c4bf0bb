"""Untranslated requests leave without what only bridges write, and otherwise unchanged."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from proxy.upstream.bridge.returned import cleaned
from proxy.upstream.transport import CHAT_PATH, MESSAGES_PATH, RESPONSES_PATH, Outgoing

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
