"""Bodies keep every byte that the proxy doesn't change."""

import asyncio
import json
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
