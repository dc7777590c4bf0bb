"""Answers of the Messages API: when content begins, and what the end reports."""

import json
from typing import Any

import pytest

from proxy.dialects.apis import MESSAGES

ANSWERS = MESSAGES.answers
USAGE = {"input_tokens": 10, "cache_creation_input_tokens": 200, "cache_read_input_tokens": 3_000, "output_tokens": 1}
START = {"type": "message_start", "message": {"id": "msg_1", "content": [], "stop_reason": None, "usage": USAGE}}
PING = {"type": "ping"}
BLOCK = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
DELTA = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hi"}}
STOP = {"type": "message_stop"}


def end(reason: str, **usage: int) -> dict[str, Any]:
    return {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": None}, "usage": usage}


def stream(*events: dict[str, Any]) -> bytes:
    return b"".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in events)


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        ([START, PING], None),
        ([START, PING, BLOCK], "content"),
        ([START, {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}], "error"),
        ([START, end("end_turn", output_tokens=1)], "content"),
        ([START, end("model_context_window_exceeded", output_tokens=0)], None),
        ([START, end("model_context_window_exceeded", output_tokens=0), STOP], "end"),
        ([{"type": "something_new"}], "content"),
    ],
)
def test_the_start_is_held_until_content_or_an_error(events: list[dict[str, Any]], kind: str | None) -> None:
    reader = ANSWERS.event_reader()
    found = [said for byte in stream(*events) if (said := reader.feed(bytes([byte])))]
    assert found[:1] == ([] if kind is None else [kind])


def test_an_unfinished_error_is_recognized() -> None:
    reader = ANSWERS.event_reader()
    assert reader.feed(stream(START) + b'event: error\ndata: {"type"') is None
    assert reader.in_error()


@pytest.mark.parametrize("size", [1, 3_000])
def test_usage_includes_what_caches_held(size: int) -> None:
    """The prompt's size is in the first event, which is far from the end of a long answer."""
    tail = ANSWERS.tail()
    for event in [START, PING, BLOCK, *[DELTA] * size, end("end_turn", output_tokens=42), STOP]:
        tail.add(stream(event))
    found = tail.finished()
    assert (found.prompt, found.output, found.cached) == (3_210, 42, 3_000)
    assert (found.finish_reason, found.empty) == ("end_turn", False)


def test_an_answer_without_content_is_empty() -> None:
    assert ANSWERS.read_usage(stream(START, end("model_context_window_exceeded"), STOP)).empty
    assert ANSWERS.gives_up(stream(START, PING, STOP))
    assert not ANSWERS.gives_up(stream(START, end("end_turn"), STOP))
    assert ANSWERS.is_silence(b": comment\n\n")
    assert not ANSWERS.is_silence(stream(START))
    assert ANSWERS.is_usual("tool_use")
    assert not ANSWERS.is_usual("model_context_window_exceeded")


def test_a_placeholder_of_0_at_the_end_replaces_no_input() -> None:
    zeros = dict.fromkeys(USAGE, 0)
    finished = ANSWERS.read_usage(stream(START, BLOCK, DELTA, end("end_turn", **zeros), STOP))
    assert (finished.prompt, finished.output) == (3_210, 0)
