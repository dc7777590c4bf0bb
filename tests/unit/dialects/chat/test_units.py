"""Test reading any JSON as a message, and replacing parts of it."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.dialects.chat.units import text_of
from proxy.dialects.identity import DEEPEST, digest, meaning
from proxy.dialects.parts import CHAT
from proxy.dialects.units import decode, replace_field
from tests.kit.conversations import FORMAT


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
