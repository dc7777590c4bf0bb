"""Test how a conversation's own request becomes a request for notes."""

from typing import Any

import msgspec
import pytest

from proxy.summary.forms import ADAPTIVE_THINKING, FORMS, read

ASK = {"role": "user", "content": "Write notes."}
MARK = {"type": "ephemeral"}


def continued(api: Any, model: str = "m", **fields: Any) -> dict[str, Any] | None:
    raws = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}
    if not FORMS[api].continued(raws, model, 1_000):
        return None
    return {name: msgspec.json.decode(raw) for name, raw in raws.items()}


def test_only_fields_outside_the_prompt_change() -> None:
    kept = {"tools": [{"type": "function"}], "temperature": 0, "prompt_cache_key": "k", "messages": [ASK]}
    changed = {"stream": True, "stream_options": {}, "n": 2, "stop": ["x"], "store": True, "logprobs": True}
    assert continued("chat", **kept, **changed, max_completion_tokens=9) == {**kept, "max_completion_tokens": 1_000}
    assert continued("chat", "gpt-5", messages=[ASK]) == {"messages": [ASK], "max_completion_tokens": 1_000}
    kept = {"input": [ASK], "reasoning": {"effort": "low"}, "store": True}
    assert continued("responses", **kept, stream=True) == {**kept, "max_output_tokens": 1_000}


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        ("chat", {"tool_choice": "required"}),
        ("chat", {"tool_choice": {"type": "function", "function": {"name": "a"}}}),
        ("chat", {"function_call": {"name": "a"}}),
        ("chat", {"response_format": {"type": "json_schema"}}),
        ("chat", {"modalities": ["text", "audio"]}),
        ("chat", {"web_search_options": {}}),
        ("responses", {"text": {"format": {"type": "json_schema"}}}),
        ("responses", {"tool_choice": "required"}),
        ("messages", {"tool_choice": {"type": "any"}}),
        ("messages", {"output_config": {"format": {"type": "json_schema"}}}),
    ],
)
def test_a_prescribed_answer_cannot_be_notes(api: str, fields: dict[str, Any]) -> None:
    assert continued(api, messages=[ASK], **fields) is None


def test_thinking_has_room_of_its_own() -> None:
    budget = continued("messages", messages=[ASK], thinking={"type": "enabled", "budget_tokens": 2_000})
    adaptive = continued("messages", messages=[ASK], thinking={"type": "adaptive"})
    assert budget is not None
    assert adaptive is not None
    assert (budget["max_tokens"], adaptive["max_tokens"]) == (3_000, 1_000 + ADAPTIVE_THINKING)


@pytest.mark.parametrize(("marks", "marked"), [(0, False), (1, True), (3, True), (4, False)])
def test_the_question_gets_a_breakpoint_if_the_request_has_some_and_room_for_one(marks: int, marked: bool) -> None:
    system = [{"type": "text", "text": "x", **({"cache_control": MARK} if n < marks else {})} for n in range(4)]
    body = continued("messages", system=system, messages=[{"role": "user", "content": "Go."}, ASK])
    assert body is not None
    block = {"type": "text", "text": "Write notes.", "cache_control": MARK}
    assert body["messages"][1] == ({"role": "user", "content": [block]} if marked else ASK)


def test_a_stream_may_have_lists_as_content() -> None:
    thought = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}
    contents = [[thought], [{"type": "text", "text": "The notes"}], " so far.", None]
    choices: list[Any] = [[{"index": 0, "delta": {"content": content}}] for content in contents]
    choices.append([{"index": 0, "delta": None, "finish_reason": "stop"}])
    body = b"".join(b"data: %b\n\n" % msgspec.json.encode({"choices": choice}) for choice in choices)
    written = read(FORMS["chat"], 200, body + b"data: [DONE]\n\n")
    assert (written.text, written.finish_reason) == ("The notes so far.", "stop")
