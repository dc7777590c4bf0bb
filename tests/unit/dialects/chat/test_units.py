"""Test reading any JSON as a message, and replacing parts of it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.compaction.turn import Call
from proxy.dialects.chat.units import calls_of, text_of
from proxy.dialects.identity import DEEPEST, digest, meaning
from proxy.dialects.parts import CHAT
from proxy.dialects.units import decode, encode, replace_field
from tests.kit.conversations import FORMAT, IMAGE, assistant, call, result

TEXT = {"type": "text", "text": "one"}


@pytest.mark.parametrize("raw", [b"5", b"null", b'"text"', b"[1]", b"true", b"1.5"])
def test_what_is_no_object_is_an_empty_message(raw: bytes) -> None:
    assert decode(raw) == {}
    assert FORMAT.read(raw).role == ""


@pytest.mark.parametrize(
    "raw",
    [
        b'{"role":"user","content":"\xff\xfe"}',
        b'{"role":"tool","n":' + b"9" * 5000 + b"}",
        b'{"role":"tool","content":"a\x01b"}',
        b'{"role":"tool","content":' + b"[" * (DEEPEST + 2) + b"]" * (DEEPEST + 2) + b"}",
        b'{"role":"tool","content":' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"role":"tool","content":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
    ],
)
def test_what_cannot_be_read_is_counted_as_text_and_has_no_role(raw: bytes) -> None:
    facts = FORMAT.read(raw)
    assert facts.role == ""
    assert facts.tokens >= len(raw) // 4
    assert facts.calls == ()


def test_the_digest_depends_on_content_and_not_on_spelling() -> None:
    one = decode(b'{"role":"user","content":"\xc3\xa9"}')
    other = decode(b'{ "content" : "\\u00e9", "role":"user" }')
    assert digest(one) == digest(other)
    assert digest(one) != digest(decode(b'{"role":"user","content":"e"}'))
    assert digest(decode(b'{"a":1}')) != digest(decode(b'{"a":"1"}'))


def test_calls_and_answers() -> None:
    both = assistant(None, call("a", "ls"), {"id": "b", "type": "custom", "custom": {"name": "run", "input": "x"}})
    assert calls_of(both) == (Call("a", "ls"), Call("b", "run"))
    assert FORMAT.read(encode(result("a", ""))).answers == "a"
    assert FORMAT.arguments(encode(both)) == [("ls", "{}"), ("run", "x")]


def test_a_legacy_call_and_its_result_know_each_other_by_the_functions_name() -> None:
    asked = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    assert calls_of(asked) == (Call("f", "f"),)
    assert FORMAT.read(encode({"role": "function", "name": "f", "content": "x"})).answers == "f"
    assert FORMAT.read(encode({"role": "user", "name": "f", "content": "x"})).answers is None


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("plain", "plain"),
        (None, ""),
        (7, ""),
        ([TEXT, IMAGE, {"type": "text", "text": "two"}], "one\n[image]\ntwo"),
        ([{"type": "refusal", "refusal": "no"}, {"type": "thinking", "x": 1}, 3, "bare"], "no\nbare"),
        ([{"type": ["odd"]}], "[part]"),
    ],
)
def test_the_visible_text(content: Any, text: str) -> None:
    assert text_of({"content": content}) == text


def test_only_the_text_of_a_list_of_parts_is_replaced() -> None:
    content = [IMAGE, {**TEXT, "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "two"}, 3]
    raw = msgspec.json.encode({"content": content, "role": "user"})
    assert FORMAT.replaceable_text(raw) == "one\ntwo"
    replaced = decode(FORMAT.with_text(raw, "new"))
    assert replaced["content"] == [IMAGE, {**TEXT, "text": "new", "cache_control": {"type": "ephemeral"}}, 3]


def test_the_other_fields_keep_their_bytes() -> None:
    raw = b'{"z": 1.50, "role":"tool","content":"old","big":123456789012345678901234567890,"e":"\\u00e9","n":1e400}'
    assert FORMAT.with_text(raw, "new") == (
        b'{"z":1.50,"role":"tool","content":"new","big":123456789012345678901234567890,"e":"\\u00e9","n":1e400}'
    )


def test_half_a_surrogate_pair_is_written_as_an_escape() -> None:
    assert encode({"a": "\ud83d"}) == b'{"a": "\\ud83d"}'
    raw = b'{"role":"tool","name":"\\ud83d","content":"x"}'
    assert decode(replace_field(raw, "content", "\udc00")) == {"role": "tool", "name": "\ud83d", "content": "\udc00"}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(("role", "content", "tool_calls", "function_call", "name")), json_values))
def test_every_reader_takes_any_json(message: dict[str, Any]) -> None:
    raw = json.dumps(message).encode()
    facts = FORMAT.read(raw)
    assert facts.digest == digest(meaning(json.loads(raw), CHAT))
    texts = [text_of(decode(raw)), *(part for pair in FORMAT.arguments(raw) for part in pair)]
    assert all(isinstance(text, str) for text in texts)
    assert decode(replace_field(raw, "content", "x")) == {**decode(raw), "content": "x"}
