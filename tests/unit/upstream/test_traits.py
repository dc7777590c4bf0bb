"""Which edits a refusal asks for, over fields and the wordings of real servers."""

from __future__ import annotations

import json
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
WORDINGS = {
    "param": lambda f: {
        "error": {"message": f"Unsupported parameter: '{f}' is not supported with this model.", "param": f}
    },
    "argument": lambda f: {"error": {"message": f"Unrecognized request argument supplied: {f}", "param": None}},
    "pydantic": lambda f: {
        "detail": [{"type": "extra_forbidden", "loc": ["body", f], "msg": "Extra inputs are not permitted"}]
    },
    "Mistral": lambda f: {
        "message": {"detail": [{"type": "extra_forbidden", "loc": ["body", f], "msg": "Extra inputs"}]}
    },
    "Google": lambda f: [
        {"error": {"code": 400, "message": f'Unknown name "{f}": Cannot find field.', "status": "INVALID"}}
    ],
    "Groq": lambda f: {"error": {"message": f"property '{f}' is unsupported"}},
    "plain": lambda f: f"unknown field: {f}",
    "a sentence": lambda f: {"message": f"{f.capitalize()} is not available on this deployment"},
    "words": lambda f: {"error": {"message": f"{f.replace('_', ' ').capitalize()} is not supported by this model."}},
    "words within": lambda f: {"error": {"message": f"Sorry, here {f.replace('_', ' ')} must not be set."}},
    "Bedrock": lambda f: {"message": f"Malformed input request: #: extraneous key [{f}] is not permitted"},
}


def said(form: Any) -> bytes:
    return form.encode() if isinstance(form, str) else json.dumps(form).encode()


@pytest.mark.parametrize("field", FREE)
@pytest.mark.parametrize("wording", WORDINGS)
def test_a_refused_field_is_left_out(wording: str, field: str) -> None:
    assert read(said(WORDINGS[wording](field)), SENT) == (Edit("without", field),)


@pytest.mark.parametrize("field", ["messages", "model"])
@pytest.mark.parametrize("wording", WORDINGS)
def test_what_the_answer_depends_on_is_never_left_out(wording: str, field: str) -> None:
    assert read(said(WORDINGS[wording](field)), SENT) == ()


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


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        ("Function call is missing a thought_signature in functionCall parts.", "signed_calls"),
        ("Tool call id was call_1 but must be a-z, A-Z, 0-9, with a length of 9.", "short_ids"),
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
