"""Each form of an answer that servers send reaches the official SDKs as what it says, streamed and whole."""

import dataclasses
import typing
from typing import Any

import anthropic.types as messages_types
import openai.types.chat.chat_completion as completion_types
import openai.types.responses as responses_types
import pytest

from tests.kit.odd_answers import FRAME, USAGE, Object, Said, Sent, chunk, completion, stream
from tests.product.properties.test_odd_answers import STATUSES, STOPS, Clients, Failed, told_message, told_response

PIXEL = "data:image/png;base64,AAAA"
FUNCTION: Object = {"name": "get", "arguments": '{"a": 1}'}
CALL: Object = {"id": "call_a", "type": "function", "function": FUNCTION}
CALLED = [("get", {"a": 1})]


def calling(arguments: Any) -> Object:
    """Return a message with a call."""
    return {"content": None, "tool_calls": [{**CALL, "function": {"name": "get", "arguments": arguments}}]}


def thinking(text: Any) -> list[Object]:
    return [{"type": "thinking", "thinking": text}, {"type": "text", "text": "hi"}]


FORMS: dict[str, tuple[Object, Any, Said]] = {
    "parts": ({"content": ["h", None, {"type": "text", "text": "i"}, {"text": "!"}]}, "stop", Said(text="hi!")),
    "one part": ({"content": {"type": "text", "text": "hi"}}, "stop", Said(text="hi")),
    "an unknown part": ({"content": [{"type": "reference", "n": 1}]}, "stop", Said(text='{"type":"reference","n":1}')),
    "thinking in parts": ({"content": thinking([{"type": "text", "text": "hm"}])}, "stop", Said("hm", "hi")),
    "reasoning": ({"content": "hi", "reasoning": "hm"}, "stop", Said("hm", "hi")),
    "reasoning twice": ({"content": "hi", "reasoning": "hm", "reasoning_content": "hm"}, "stop", Said("hm", "hi")),
    "details": (
        {"content": "hi", "reasoning_details": [{"type": "reasoning.summary", "summary": "hm"}]},
        "stop",
        Said("hm", "hi"),
    ),
    "audio": ({"content": None, "audio": {"id": "a", "data": "AAAA", "transcript": "hi"}}, "stop", Said(text="hi")),
    "nothing": ({"content": None}, "stop", Said()),
    "a call": (calling('{"a": 1}'), "tool_calls", Said(calls=CALLED, end="tool_calls")),
    "a call without a type": (
        {"tool_calls": [{"id": "a", "function": FUNCTION}]},
        "stop",
        Said(calls=CALLED, end="tool_calls"),
    ),
    "one call": ({"tool_calls": CALL}, "stop", Said(calls=CALLED, end="tool_calls")),
    "an object": (calling({"a": 1}), "tool_calls", Said(calls=CALLED, end="tool_calls")),
    "legacy": ({"function_call": FUNCTION}, "function_call", Said(calls=CALLED, end="tool_calls")),
    "empty call": ({"content": "hi", "tool_calls": [{}]}, "tool_calls", Said(text="hi")),
    "a reason in an object": ({"content": "hi"}, {"type": "length", "length": 4}, Said(text="hi", end="length")),
    "a full context": ({"content": "hi"}, "model_context_window_exceeded", Said(text="hi", end="length")),
    "failed": ({"content": "hi"}, "error", Said(end="error")),
    "malformed": ({"content": ""}, "MALFORMED_FUNCTION_CALL", Said(end="error")),
}
"""Messages, or deltas of a stream, with finish reasons, and what they say."""

HI = chunk({"role": "assistant", "content": "hi"})
WITHOUT_DELTA: Object = {**FRAME, "choices": [{"index": 0, "finish_reason": None}]}
REPEATED: Object = {"index": 0, "finish_reason": "stop", "message": {"content": "hi", "tool_calls": [CALL]}}
SECOND: Object = {**FRAME, "choices": [{"index": 1, "delta": {"content": "other"}, "finish_reason": "length"}]}
STOP = chunk({}, "stop")
STREAMS: dict[str, tuple[Sent, Said]] = {
    "half a pair": (stream(chunk({"content": "h\ud83d"}), chunk({"content": "i"}), STOP), Said(text="h\ufffdi")),
    "infinity": (stream(HI, chunk({}, "stop", logprobs=float("-inf"))), Said(text="hi")),
    "no delta": (stream(WITHOUT_DELTA, HI, WITHOUT_DELTA, STOP), Said(text="hi")),
    "no choices": (stream({**FRAME, "choices": []}, HI, {}, {**FRAME, "choices": None}, STOP), Said(text="hi")),
    "no end": (stream(HI, STOP, done=False), Said(text="hi")),
    "a reason of null": (stream(chunk({"content": "hi"}, "null"), chunk({}, ""), STOP), Said(text="hi")),
    "the message again": (
        stream(HI, chunk({"tool_calls": [{"index": 0, **CALL}]}), {**FRAME, "choices": [REPEATED]}),
        Said(text="hi", calls=CALLED, end="tool_calls"),
    ),
    "two choices": (stream(HI, SECOND, STOP), Said(text="hi")),
    "a reason with each call": (
        stream(chunk({"tool_calls": [CALL]}, "tool_calls"), chunk({}, "stop")),
        Said(calls=CALLED, end="tool_calls"),
    ),
    "cut": (stream(HI), Said(end="error")),
    "cut in a call": (stream(chunk({"tool_calls": [{"index": 0, **CALL}]})), Said(end="error")),
    "nothing": (stream(), Said(end="error")),
    "an error": (stream(HI, {"error": {"message": "no"}}), Said(end="error")),
    "an error of a choice": (stream(HI, {"choices": [{"error": {"message": "no"}, "delta": {}}]}), Said(end="error")),
    "an error alone": (stream(HI, {"object": "error", "message": "no", "code": 500}), Said(end="error")),
}
WHOLE: dict[str, tuple[Object, Said]] = {
    "infinity": (completion({"content": "h\ud83d"}, logprobs=float("-inf")), Said(text="h\ufffd")),
    "no usage": ({**completion({"content": "hi"}), "usage": None}, Said(text="hi")),
    "other usage": (
        completion({"content": "hi"}, usage={"input_tokens": 9, "output_tokens": 4.0, "prompt_tokens_details": []}),
        Said(text="hi"),
    ),
    "no reason": (completion({"content": "hi"}, None), Said(text="hi")),
    "two choices": (
        {**completion({}), "choices": [{"index": n, "message": {"content": "hi" * n}} for n in (0, 1)], "usage": USAGE},
        Said(text="hi"),
    ),
    "no message": (
        {**FRAME, "object": "chat.completion", "choices": [{"index": 0, "text": "hi", "finish_reason": "stop"}]},
        Said(text="hi"),
    ),
    "calls without ids": (
        completion({"tool_calls": [{"function": FUNCTION}, {"function": FUNCTION}]}),
        Said(calls=CALLED * 2, end="tool_calls"),
    ),
}
ARGUMENTS: dict[str, tuple[Any, Object]] = {
    "null": (None, {}),
    "empty": ("", {}),
    "cut": ('{"a": "very lo', {"a": "very lo"}),
    "two objects": ('{"a": 1}{"b": 2}', {"arguments": '{"a": 1}{"b": 2}'}),
    "a line break": ('{"a": "x\ny"}', {"a": "x\ny"}),
    "an object in a text": ('"{\\"a\\": 1}"', {"a": 1}),
    "a list": ("[1]", {"arguments": "[1]"}),
    "half a pair": ('{"a": "\\ud83d"}', {"arguments": '{"a": "\\ud83d"}'}),
}
"""Arguments that aren't a JSON object, and what Anthropic's SDK reads."""


def check(front: Clients, answer: Sent | Object, said: Said, *, streamed: bool) -> None:
    upstream, claude, gpt = front
    upstream.answers["x"] = answer
    if said.end == "error":
        with pytest.raises(Failed):
            told_message(claude, "x", stream=streamed)
        with pytest.raises(Failed):
            told_response(gpt, "x", stream=streamed)
        return
    message, response = told_message(claude, "x", stream=streamed), told_response(gpt, "x", stream=streamed)
    assert message == dataclasses.replace(said, end=STOPS[said.end], usage=message.usage)
    assert response == dataclasses.replace(said, end=STATUSES.get(said.end, "completed"), usage=response.usage)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_each_form_of_a_message(name: str, streamed: bool, front: Clients) -> None:
    message, reason, said = FORMS[name]
    answer = stream(chunk({"role": "assistant"}), chunk(message), chunk({}, reason), {**FRAME, "usage": USAGE})
    check(front, answer if streamed else completion(message, reason), said, streamed=streamed)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("name", STREAMS)
def test_each_form_of_a_stream(name: str, streamed: bool, front: Clients) -> None:
    """A server that always streams gives a stream to a client that didn't ask for one, too."""
    check(front, *STREAMS[name], streamed=streamed)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("name", WHOLE)
def test_each_form_of_a_completion(name: str, streamed: bool, front: Clients) -> None:
    """A server that doesn't stream gives one to a client that asked for a stream, too."""
    check(front, *WHOLE[name], streamed=streamed)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_that_arent_an_object(name: str, streamed: bool, front: Clients) -> None:
    """A client of ``/v1/messages`` gets an object. A client of ``/v1/responses`` gets the text."""
    upstream, claude, gpt = front
    given, read = ARGUMENTS[name]
    message = calling(given)
    pieces = [chunk({"tool_calls": [{"index": 0, **message["tool_calls"][0]}]})]
    if isinstance(given, str):
        more = [chunk({"tool_calls": [{"index": 0, "function": {"arguments": letter}}]}) for letter in given]
        pieces = [chunk({"tool_calls": [{"index": 0, **calling("")["tool_calls"][0]}]}), *more]
    upstream.answers["x"] = stream(*pieces, STOP) if streamed else completion(message)
    told = told_message(claude, "x", stream=streamed)
    assert told.calls == [("get", read)]
    assert told.end == ("max_tokens" if name.startswith("cut") else "tool_use"), "a client doesn't run half a call"
    made: Any = gpt.responses.create(model="m", input="x", stream=streamed)
    made = [*made][-1].response if streamed else made
    assert made.output[0].arguments == (given or "")
    assert made.status == ("incomplete" if name.startswith("cut") else "completed")


@pytest.mark.parametrize("streamed", [False, True])
def test_thinking_with_a_signature(streamed: bool, front: Clients) -> None:
    upstream, claude, _ = front
    signed = {"type": "thinking", "thinking": "hm", "signature": "sig"}
    blocks = [signed, {"type": "redacted_thinking", "data": "sealed"}]
    parts = [{**signed, "signature": None}, {**signed, "thinking": ""}, blocks[1]]
    deltas = [chunk({"thinking_blocks": [part], "reasoning_content": part.get("thinking")}) for part in parts]
    upstream.answers["x"] = completion({"content": "hi", "thinking_blocks": blocks, "reasoning_content": "hm"})
    if streamed:
        upstream.answers["x"] = stream(*deltas, HI, STOP)
    asked: Any = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "x"}]}
    if streamed:
        with claude.messages.stream(**asked) as events:
            made = events.get_final_message()
    else:
        made = claude.messages.create(**asked)
    assert [block.to_dict() for block in made.content] == [*blocks, {"type": "text", "text": "hi"}]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_refusal_and_a_stop_sequence(streamed: bool, front: Clients) -> None:
    upstream, claude, gpt = front
    asked: Any = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "x"}]}
    for message, matched, expected in (
        ({"refusal": "no"}, None, "refusal"),
        ({"content": "hi"}, "END", "stop_sequence"),
    ):
        answer = completion(message)
        answer["choices"][0]["stop_reason"] = matched
        end = chunk({}, "stop")
        end["choices"][0]["stop_reason"] = matched
        upstream.answers["x"] = stream(chunk(message), end) if streamed else answer
        if streamed:
            with claude.messages.stream(**asked, stop_sequences=["END"]) as events:
                made = events.get_final_message()
        else:
            made = claude.messages.create(**asked, stop_sequences=["END"])
        assert (made.stop_reason, made.stop_sequence) == (expected, matched)
    upstream.answers["x"] = stream(chunk({"refusal": "no"}), STOP) if streamed else completion({"refusal": "no"})
    made_response: Any = gpt.responses.create(model="m", input="x", stream=streamed)
    if streamed:
        *_, last = made_response
        made_response = last.response
    assert made_response.output[0].content[0].refusal == "no"


def types_in(union: Any) -> set[str]:
    """Return the values that the field ``type`` of a union's members may have, or the values of a ``Literal``."""
    if isinstance(union, type):
        return set(typing.get_args(union.model_fields["type"].annotation))  # type: ignore[attr-defined]
    if isinstance(union, str):
        return {union}
    return {name for one in typing.get_args(union) if one is not type(None) for name in types_in(one)}


def field_of(model: Any, name: str) -> Any:
    return model.model_fields[name].annotation


NO_REASON = {"function_call": "the legacy name of tool_calls"}
NOT_MADE = {
    "pause_turn": "ends a turn of Anthropic's own tools",
    "model_context_window_exceeded": "no server tells it from max_tokens",
    "citations_delta": "chat completions have no citations in this form",
    **dict.fromkeys(("server_tool_use", "container_upload"), "Anthropic's own tools"),
}
"""Stop reasons, blocks, and events of ``/v1/messages`` that a bridge never makes, with the reason."""
MADE_EVENTS = {
    *("response.created", "response.in_progress", "response.completed", "response.incomplete", "error"),
    *("response.output_item.added", "response.output_item.done"),
    *("response.content_part.added", "response.content_part.done"),
    *("response.output_text.delta", "response.output_text.done", "response.refusal.delta", "response.refusal.done"),
    *("response.reasoning_summary_part.added", "response.reasoning_summary_part.done"),
    *("response.reasoning_summary_text.delta", "response.reasoning_summary_text.done"),
    *("response.function_call_arguments.delta", "response.function_call_arguments.done"),
    *("response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"),
    "response.image_generation_call.completed",
}
NO_EVENTS = {
    "response.audio": "audio becomes its transcript",
    "response.reasoning_text": "the text is in the summary",
    "response.image_generation_call": "an image comes at once",
    "response.output_text.annotation": "chat completions have no place for it in a text",
    "response.failed": "an error is the event `error`",
    "response.queued": "only in the background",
    **dict.fromkeys(
        ("response.code_interpreter_call", "response.file_search_call", "response.web_search_call", "response.mcp_"),
        "OpenAI's own tools",
    ),
}
"""Beginnings of the names of events of ``/v1/responses`` that a bridge never makes, with the reason."""


def test_each_stop_reason_has_a_decision() -> None:
    asked = types_in(field_of(completion_types.Choice, "finish_reason"))
    assert asked == STOPS.keys() | NO_REASON.keys()
    known = types_in(messages_types.StopReason)
    assert known == {*STOPS.values(), "stop_sequence"} | (NOT_MADE.keys() & known)


def test_each_stream_event_has_a_decision(front: Clients) -> None:
    """The events that an answer of everything has, and those that no answer has, are all that the SDKs know."""
    upstream, claude, gpt = front
    signed = {"thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "sig"}]}
    custom: Object = {"index": 1, "id": "b", "function": {"name": "patch", "arguments": '{"content": "x"}'}}
    deltas: list[Object] = [{**signed, "reasoning_content": "hm"}, {"thinking_blocks": [{"type": "redacted_thinking"}]}]
    deltas += [
        {"content": "hi"},
        {"refusal": "no"},
        {"tool_calls": [{"index": 0, **CALL}, custom]},
        {"images": [PIXEL]},
    ]
    whole = [chunk(delta) for delta in deltas]
    tools: Any = [{"type": "custom", "name": "patch"}]
    seen: list[Any] = []
    for frames in ([*whole, STOP], [*whole, chunk({}, "length")], [*whole, {"error": {"message": "no"}}]):
        upstream.answers["x"] = stream(*frames)
        seen += gpt.responses.create(model="m", input="x", tools=tools, stream=True)
    made = {event.type for event in seen}
    assert made == MADE_EVENTS
    known = types_in(responses_types.ResponseStreamEvent)
    assert not made - known
    assert {name for name in known - made if not name.startswith(tuple(NO_EVENTS))} == set()

    upstream.answers["x"] = stream(*whole, STOP)
    events = list(
        claude.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "x"}], stream=True)
    )
    assert {event.type for event in events} == types_in(messages_types.RawMessageStreamEvent)
    changes = {event.delta.type for event in events if event.type == "content_block_delta"}
    assert changes == types_in(messages_types.RawContentBlockDelta) - NOT_MADE.keys()
    blocks = {event.content_block.type for event in events if event.type == "content_block_start"}
    known = types_in(messages_types.ContentBlock)
    assert {name for name in known - blocks if not name.endswith("_result")} == NOT_MADE.keys() & known
