"""Count messages of any shape."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.dialects.chat.counting import ChatCounter
from proxy.errors import ConfigurationError
from proxy.limits.profiles import Profile
from proxy.tokens import encoding

EXACT = ChatCounter(Profile("exact"))
SCALED = ChatCounter(Profile("scaled", token_ratio=1.25, tools="json"))
encoding("o200k_base")  # Load the encoding here so that no example is slow.

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
any_json = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)
part_types = st.sampled_from(
    ["text", "image_url", "image", "input_audio", "file", "document", "video_url", "refusal", "tool_result", "what"]
)
parts = st.fixed_dictionaries(
    {"type": part_types | any_json},
    optional=dict.fromkeys(("text", "image_url", "input_audio", "file", "source", "data", "detail"), any_json),
)
calls = st.fixed_dictionaries({}, optional={"function": any_json, "type": any_json, "id": any_json})
messages = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "tool", "system"]) | any_json,
        "content": any_json | st.lists(parts | any_json, max_size=3),
        "name": any_json,
        "tool_calls": any_json | st.lists(calls | any_json, max_size=3),
        "function_call": any_json,
        "audio": any_json,
        "reasoning_content": any_json,
        "refusal": any_json,
    },
)


@given(messages | st.dictionaries(st.text(max_size=8), any_json, max_size=5), st.booleans())
def test_any_json_is_counted(message: dict[str, Any], parallel: bool) -> None:
    assert EXACT.message(message, parallel=parallel) >= 3
    assert SCALED.message(message, parallel=parallel) >= 4


schema_names = ("type", "properties", "items", "anyOf", "enum", "required", "$defs", "$ref", "description", "const")
schemas = st.recursive(
    any_json,
    lambda inner: (
        st.fixed_dictionaries({}, optional=dict.fromkeys(schema_names, inner))
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
        | st.lists(inner, max_size=3)
    ),
    max_leaves=15,
)
functions = st.fixed_dictionaries({}, optional={"name": any_json, "description": any_json, "parameters": schemas})


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "tools": any_json | st.lists(st.fixed_dictionaries({"function": functions | any_json}), max_size=2),
            "functions": any_json | st.lists(functions, max_size=2),
            "tool_choice": any_json,
            "function_call": any_json,
            "response_format": any_json | st.fixed_dictionaries({"type": any_json, "json_schema": any_json}),
            "messages": any_json | st.lists(messages, max_size=2),
        },
    )
)
def test_any_request_has_an_overhead(body: dict[str, Any]) -> None:
    assert EXACT.overhead(body) >= 3
    assert SCALED.overhead(body) >= 4


@given(st.text(max_size=200), st.text(max_size=200))
def test_more_text_is_not_fewer_tokens(text: str, more: str) -> None:
    shorter = EXACT.message({"role": "user", "content": text})
    assert EXACT.message({"role": "user", "content": text + more}) >= shorter - 2


def test_deep_and_wide_schemas_take_no_time() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(200):
        schema = {"type": ["object", "array", "object"], "properties": {"a": schema}, "items": {"type": "string"}}
    started = time.thread_time()
    EXACT.overhead({"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]})
    assert time.thread_time() - started < 2


def word(text: str) -> int:
    return len(encoding("o200k_base").encode(text))


def test_unknown_parts_count_as_their_json() -> None:
    part = {"type": "novelty", "payload": {"text": "one two three"}}
    assert EXACT.message({"role": "user", "content": [part]}) == 4 + word(json.dumps(part))


def test_nested_schemas_count_all_their_words() -> None:
    def overhead(parameters: dict[str, Any]) -> int:
        return EXACT.overhead({"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]})

    text = "a long explanation of what this is for, word by word by word " * 5
    said = {"type": "object", "description": text, "properties": {"inner": {"type": "string"}}}
    least = word(text) - 5
    for parameters in (
        {"type": "object", "properties": {"a": {"type": "array", "items": said}}},
        {"type": "object", "properties": {"a": {"anyOf": [{"type": "null"}, said]}}},
        {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {"description": text}}}}},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"anyOf": [said]}}},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": text}}},
        {"type": "object", "properties": {"a": {"type": "string", "enum": [text]}}},
        {"type": "object", "properties": {"a": {"type": "object", "additionalProperties": {"enum": [text]}}}},
        {"anyOf": [said, {"type": "object"}]},
    ):
        assert overhead(parameters) > least, parameters


def test_an_encoding_that_is_not_carried_is_said_at_once() -> None:
    with pytest.raises(ConfigurationError, match=r"'r50k_base'.*o200k_base"):
        ChatCounter(Profile("davinci", tokenizer="r50k_base"))
    with pytest.raises(ConfigurationError, match="'nonsense'"):
        encoding("nonsense")


@pytest.mark.long
@pytest.mark.parametrize("piece", ["a", "^", " ", "0", "👩‍👩‍👧‍👦", "漢"])
def test_a_megabyte_of_anything_is_counted_in_time(piece: str) -> None:
    text = (piece * 1_000_000)[: 1_000_000 // len(piece.encode()) * len(piece)]
    started = time.thread_time()
    tokens = EXACT.text(text)
    assert time.thread_time() - started < 5
    assert 0 < tokens <= len(text.encode())
