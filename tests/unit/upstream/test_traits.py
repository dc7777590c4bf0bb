"""Which edits a refusal asks for, over fields and the wordings of real servers."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from proxy.upstream.refusals import read
from proxy.upstream.traits import (
    ALTERNATING,
    LABELLED_MEDIA,
    WITH_REASONING,
    WITHOUT_REASONING,
    Edit,
    Memory,
    apply,
    known,
)
from tests.kit.refusals import WORDINGS as REFUSALS

SENT: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 100,
    "temperature": 0.5,
    "top_p": 0.9,
    "user": "u",
    "stop": ["a"],
    "parallel_tool_calls": False,
    "reasoning_effort": "minimal",
    "stream_options": {"include_usage": True},
    "service_tier": "flex",
    "prompt_cache_key": "k",
}
FREE = (
    "temperature",
    "top_p",
    "user",
    "stop",
    "parallel_tool_calls",
    "stream_options",
    "service_tier",
    "prompt_cache_key",
)
WORDINGS: dict[str, Callable[[str], Any]] = {
    **{name: lambda f, refused=refused: refused(f, 1).body for name, refused in REFUSALS.items()},
    "a sentence": lambda f: {"message": f"{f.capitalize()} is not available on this deployment"},
    "words": lambda f: {"error": {"message": f"{f.replace('_', ' ').capitalize()} is not supported by this model."}},
    "words within": lambda f: {"error": {"message": f"Sorry, here {f.replace('_', ' ')} must not be set."}},
    "newer xAI": lambda f: {"error": f"Model grok-4.6 does not support parameter {camel(f)}."},
    "a Go field": lambda f: {"error": {"message": f"field {camel(f.capitalize())} invalid", "code": "3"}},
    "a sentence as the place": lambda f: {"error": {"message": "Param Incorrect", "param": f"{f} is not supported"}},
    "Chinese": lambda f: {"error": {"code": "1210", "message": f"不支持参数 {f}"}},
}
RANGES = {
    "Alibaba": "<400> InternalError.Algo.InvalidParameter: Range of {field} should be [1, 50]",
    "Baidu": "parameter check failed, {field} range is [1, 50]",
    "DeepSeek": "Invalid {field} value, the valid range of {field} is [1, 50]",
    "Moonshot": "field {pascal} invalid, should be in [1, 50]",
    "OpenAI": "Invalid '{field}': integer above maximum value. Expected a value <= 50, but got 100 instead.",
    "Volcano": "The parameter {field} specified in the request is not valid: expected a value <= 50, but got 100.",
    "vLLM": "{field} must be at most 50, got 100.",
    "Anthropic": "{field}: 100 > 50, which is the maximum allowed number of output tokens",
    "Azure": "{field} is too large: 100. This model supports at most 50 completion tokens, you provided 100.",
    "Zhipu": "{field} 参数超出范围，应在 [1, 50] 之间",
    "Chinese": "{field} 不能大于 50",
    "Chinese, the most": "{field}的最大值为50",
}


def camel(field: str) -> str:
    first, *others = field.split("_")
    return first + "".join(map(str.capitalize, others))


def said(form: Any) -> bytes:
    return form if isinstance(form, bytes) else json.dumps(form).encode()


@pytest.mark.parametrize("field", FREE)
@pytest.mark.parametrize("wording", WORDINGS)
def test_a_refused_field_is_left_out(wording: str, field: str) -> None:
    assert read(said(WORDINGS[wording](field)), SENT) == (Edit("without", field),)


@pytest.mark.parametrize("field", ["messages", "model"])
@pytest.mark.parametrize("wording", WORDINGS)
def test_what_the_answer_depends_on_is_never_left_out(wording: str, field: str) -> None:
    assert read(said(WORDINGS[wording](field)), SENT) == ()


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens", "max_output_tokens", "top_k"])
@pytest.mark.parametrize("wording", RANGES)
@pytest.mark.parametrize("placed", [False, True])
def test_a_number_outside_of_a_range_is_lowered(wording: str, field: str, placed: bool) -> None:
    text = RANGES[wording].format(field=field, pascal=camel(field.capitalize()))
    refusal = {"message": "Param Incorrect", "param": text} if placed else {"message": text}
    assert read(said({"error": refusal}), {"model": "m", field: 100}) == (Edit("lowered", field, 50),)


@pytest.mark.parametrize(
    ("text", "edit"),
    [
        ("'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.", "renamed"),
        ("Invalid 'max_tokens': integer above maximum value. Expected a value <= 50, but got 100 instead.", "lowered"),
        ("'reasoning_effort' does not support 'minimal'. Supported values are: 'low' and 'high'.", "nearest"),
    ],
)
def test_a_value_is_changed(text: str, edit: str) -> None:
    (found,) = read(said({"error": {"message": text}}), SENT)
    body = json.loads(json.dumps(SENT))
    assert found.kind == edit
    assert apply(body, [found])
    assert apply(body, [found]) == ()


def test_reasoning_roles_and_media() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    calls = {
        "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    }
    thought = {"messages": [{"role": "assistant", "content": "x", "reasoning_content": "t"}]}
    two = {"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}]}
    image = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]}
    assert read(b"reasoning_content is missing in assistant tool call message", calls) == (WITH_REASONING,)
    assert read(b"property 'reasoning_content' is unsupported", thought) == (WITHOUT_REASONING,)
    assert read(b"Conversation roles must alternate user/assistant", two) == (ALTERNATING,)
    assert read(b"This model does not support image input", image) == (LABELLED_MEDIA,)


def test_long_ids_of_items_are_shortened_in_pairs() -> None:
    items = [{"type": kind, "call_id": "call_" + "x" * 90} for kind in ("function_call", "function_call_output")]
    text = "Invalid 'input[0].call_id': string too long. Expected a string with maximum length 64, but got 95 instead."
    body = {"model": "m", "input": [{"role": "user", "content": "hi"}, *items]}
    [edit] = read(said({"error": {"message": text, "param": "input[0].call_id"}}), body)
    assert apply(body, [edit]) == ("short_ids",)
    call, result = (item["call_id"] for item in body["input"][1:])
    assert call == result
    assert len(call) < 64


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        ("Function call is missing a thought_signature in functionCall parts.", "signed_calls"),
        ("Tool call id was call_1 but must be a-z, A-Z, 0-9, with a length of 9.", "short_ids"),
        (
            "Invalid 'messages[1].tool_calls[0].id': string too long. Expected a string with maximum length 4.",
            "short_ids",
        ),
        ("Invalid 'messages[2].tool_call_id': string too long. Expected ≤ 4, got 6.", "short_ids"),
        ("messages[1].reasoning_content: Extra inputs are not permitted", "without_reasoning"),
    ],
)
def test_calls_of_another_model(refusal: str, kind: str) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assistant = {
        "role": "assistant",
        "content": None,
        "reasoning_content": "t",
        "tool_calls": [call, {**call, "id": "aB3456789"}],
    }
    body = {"messages": [{"role": "user", "content": "x"}, assistant, {"role": "tool", "tool_call_id": "call_1"}]}
    [edit] = read(refusal.encode(), body)
    assert edit.kind == kind
    assert apply(body, [edit]) == (kind,)
    assert apply(body, [edit]) == ()
    _, made, result = body["messages"]
    if kind == "short_ids":
        assert made["tool_calls"][0]["id"] == result["tool_call_id"] != "call_1"
        assert made["tool_calls"][1]["id"] == "aB3456789"
    if kind == "signed_calls":
        assert [set(one) - set(call) for one in made["tool_calls"]] == [{"extra_content"}, set()]


def test_an_echo_of_the_request_names_nothing() -> None:
    text = "I see the error unknown field: temperature"
    raw = json.dumps({**SENT, "messages": [{"role": "user", "content": text}]}).encode()
    assert read(f"Invalid input: {text}".encode(), json.loads(raw), raw) == ()
    assert read(f"Invalid input: {text}".encode(), SENT, json.dumps(SENT).encode()) == (Edit("without", "temperature"),)


def test_a_memory_forgets_a_tenant_and_replaces_the_opposite() -> None:
    memory, place = Memory(), ("u", "m", "t")
    memory.learn(place, [Edit("renamed", "max_tokens", "max_completion_tokens")])
    memory.learn(place, [Edit("renamed", "max_completion_tokens", "max_tokens")])
    assert memory.edits(place) == (Edit("renamed", "max_completion_tokens", "max_tokens"),)
    memory.acquit(place, [Edit("without", "user")])
    assert not memory.helps(place, Edit("without", "user"))
    assert memory.forget(lambda tenant: tenant == "t") == {"t"}
    assert memory.edits(place) == ()


@pytest.mark.parametrize(
    "family", ["mistral/codestral-latest", "openrouter/mistralai/pixtral-12b", "/open-mixtral-8x22b"]
)
def test_families_are_known_by_their_names(family: str) -> None:
    assert ALTERNATING in known(family)
    assert ALTERNATING not in known("openai/gpt-5")


def test_items_of_the_responses_api_keep_their_order() -> None:
    items = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}, {"type": "reasoning", "summary": []}]
    body = {"input": list(items)}
    assert apply(body, [ALTERNATING]) == ()
    assert apply(body, [WITHOUT_REASONING]) == ("without_reasoning",)
    assert body["input"] == items[:2]
