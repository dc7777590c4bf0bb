"""Bodies keep every byte that the proxy doesn't change."""

import asyncio
import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.dialects.apis import RESPONSES
from proxy.dialects.responses.counting import ResponsesCounter
from proxy.dialects.responses.request import parse
from proxy.errors import BadBody
from proxy.limits.profiles import Profile

FORMAT = ResponsesCounter(Profile("gpt-5")).format

USER = {"role": "user", "content": "hi"}
PARTS = {
    "role": "user",
    "content": [
        {"type": "input_text", "text": "see", "prompt_cache_breakpoint": {}},
        {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo=", "detail": "low"},
        {"type": "input_file", "file_id": "file-1"},
        {"type": "input_new", "novel": [1.0, None]},
    ],
}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA" * 30}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "ls", "arguments": "{}", "status": "completed"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "a\nb"}
MESSAGE = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "phase": "commentary",
    "content": [{"type": "output_text", "text": "ok", "annotations": [], "logprobs": []}],
}
ITEMS: list[Any] = [
    USER,
    PARTS,
    {"type": "message", "role": "system", "content": [{"type": "input_text", "text": "Be brief."}]},
    REASONING,
    OUTPUT,
    {"type": "item_reference", "id": "msg_2"},
    {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "*** Begin"},
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "news"}},
    {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": "iVBORw0KGgoAAAA"},
    {
        "type": "code_interpreter_call",
        "id": "ci_1",
        "code": "1+1",
        "container_id": "x",
        "outputs": [],
        "status": "done",
    },
    {"type": "mcp_call", "id": "mcp_1", "server_label": "s", "name": "t", "arguments": "{}", "output": "found"},
    {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": True},
    {
        "type": "computer_call_output",
        "call_id": "c3",
        "output": {"type": "computer_screenshot", "image_url": "data:image/png;base64,iVBORw0KGgo="},
    },
    {"type": "local_shell_call_output", "id": "c4", "output": "{}"},
    {"type": "tool_search_output", "call_id": None, "tools": []},
    {"type": "from_the_future", "payload": {"deep": [[["x"]]]}, "n": 1e400},
    {},
    "a string",
    7,
]
FIELDS: dict[str, Any] = {
    "instructions": "You help.",
    "tools": [{"type": "function", "name": "ls", "parameters": {"type": "object"}}, {"type": "web_search"}],
    "tool_choice": {"type": "function", "name": "ls"},
    "text": {"format": {"type": "json_schema", "name": "s", "schema": {"type": "object"}}, "verbosity": "low"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "max_output_tokens": 500,
    "reasoning": {"effort": "high", "context": "all_turns"},
    "context_management": [{"type": "compaction", "compact_threshold": 9}],
    "future_field": {"b": 1, "a": 2.50},
}


def varied(seed: int) -> bytes:
    """Return a body with items, fields, and spaces that no client sends together."""
    rng = random.Random(seed)
    items: Any = rng.choices(ITEMS, k=rng.randint(0, 14))
    if seed % 10 == 0:
        items = rng.choice(["hello", "", 5, None, {"role": "user"}])
    fields = {"model": "gpt-5", "input": items, **{k: FIELDS[k] for k in FIELDS if rng.random() < 0.4}}
    names = list(fields)
    rng.shuffle(names)
    body = {name: fields[name] for name in names}
    text = json.dumps(body, indent=rng.choice((None, 1)), ensure_ascii=rng.random() < 0.5)
    return text.replace("1e400", "Infinity").replace("Infinity", "1" * 400).encode()


@pytest.mark.parametrize("seeds", [range(start, start + 20) for start in range(0, 200, 20)])
def test_varied_bodies_keep_their_bytes(seeds: range) -> None:
    for raw in map(varied, seeds):
        check_varied_bodies_keep_their_bytes(raw)


def check_varied_bodies_keep_their_bytes(raw: bytes) -> None:
    body = parse(raw)
    assert body.rewritten() is raw
    again = body.rewritten(units=body.units)
    assert json.loads(again) == json.loads(raw)
    assert list(json.loads(again)) == list(json.loads(raw)), "fields keep their places"
    for unit in body.units:
        assert bytes(unit).removeprefix(b"[").removesuffix(b"]").split(b"},")[0] in again, "items keep their bytes"
        facts = FORMAT.read(unit)
        assert facts == FORMAT.read(bytes(unit))
        assert facts.tokens == FORMAT.tokens(unit)
        FORMAT.text(unit), FORMAT.arguments(unit), FORMAT.user_text(unit), FORMAT.replaceable_text(unit)
        FORMAT.without_reasoning(unit), FORMAT.foreign_summary(unit), FORMAT.without_media(unit)
        FORMAT.with_text(unit, "x"), FORMAT.frame_tokens(unit, facts)
        FORMAT.with_labels(unit, str)
        assert FORMAT.with_arguments(unit, lambda name, arguments: None) is unit


@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda text: b'{"input":[' + text.encode() + b"]}"))
def test_no_body_raises(raw: bytes) -> None:
    body = parse(raw)
    assert body.rewritten() == raw
    body.overhead_fields()
    for unit in body.units:
        FORMAT.read(unit)


def units(items: Any) -> list[Any]:
    return [json.loads(bytes(unit)) for unit in parse(json.dumps({"model": "m", "input": items}).encode()).units]


def test_a_string_is_one_unit_and_stays_a_string() -> None:
    body = parse(b'{"model": "m", "input": "hello"}')
    assert [bytes(unit) for unit in body.units] == [b'"hello"']
    assert FORMAT.read(body.units[0]).kind == "user"
    assert FORMAT.text(body.units[0]) == "hello"
    shorter = FORMAT.with_text(body.units[0], "bye")
    assert json.loads(body.rewritten(units=[shorter]))["input"] == "bye"
    summary = FORMAT.summary("user", "Before.")
    assert json.loads(body.rewritten(units=[summary, *body.units]))["input"] == [
        {"type": "message", "role": "user", "content": "Before."},
        {"role": "user", "content": "hello"},
    ]


def test_model_and_output_change_alone() -> None:
    raw = b'{ "max_output_tokens": 900, "x" : [1.50], "model":"a","input":"hi" }'
    body = parse(raw)
    assert (body.model, body.max_output, body.stream) == ("a", 900, False)
    assert body.rewritten(model="b", max_output=100) == b'{"max_output_tokens":100,"x":[1.50],"model":"b","input":"hi"}'
    assert body.named("a") is body
    assert body.named("b").model == "b"


def test_too_many_items_are_refused() -> None:
    raw = b'{"input":[' + b",".join([b'{"role":"user"}'] * 40_001) + b"]}"
    with pytest.raises(BadBody, match="40001 messages"):
        asyncio.run(RESPONSES.request.read(raw))
