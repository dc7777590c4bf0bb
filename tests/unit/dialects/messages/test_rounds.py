"""Events of the Messages API, as servers split them, and what the client gets of them."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from proxy.dialects.messages.rounds import MessagesRound, MessagesTool
from proxy.dialects.rounds import VisibleResponse

NAME = "recall_earlier_messages"
USAGE = {"input_tokens": 10, "cache_read_input_tokens": 5, "output_tokens": 1}


def event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


def block(index: int, begun: dict[str, Any], *deltas: dict[str, Any]) -> Iterator[bytes]:
    yield event("content_block_start", index=index, content_block=begun)
    for delta in deltas:
        yield event("content_block_delta", index=index, delta=delta)
    yield event("content_block_stop", index=index)


def text(index: int, *pieces: str) -> Iterator[bytes]:
    yield from block(index, {"type": "text", "text": ""}, *({"type": "text_delta", "text": piece} for piece in pieces))


def call(index: int, name: str, *pieces: str) -> Iterator[bytes]:
    begun = {"type": "tool_use", "id": f"t{index}", "name": name, "input": {}}
    yield from block(index, begun, *({"type": "input_json_delta", "partial_json": piece} for piece in pieces))


START = event("message_start", message={"id": "m1", "content": [], "usage": USAGE})
STOP = event("message_stop")


def end(reason: str = "tool_use", **usage: Any) -> bytes:
    delta = {"stop_reason": reason, "stop_sequence": None}
    return event("message_delta", delta=delta, usage={"output_tokens": 7, **usage})


def run(
    chunks: Sequence[bytes], *, first: bool = True, response: VisibleResponse | None = None
) -> tuple[bytes, MessagesRound]:
    round = MessagesTool().round(NAME, response or VisibleResponse(), first=first)
    out = b"".join(round.feed(one) for one in chunks)
    return out + round.finish(), round


def events(out: bytes) -> list[Any]:
    return [json.loads(line.split(b"data: ")[1]) for line in out.split(b"\n\n") if b"data: {" in line]


THINKING = list(
    block(
        0,
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "thinking_delta", "thinking": "Hm"},
        {"type": "thinking_delta", "thinking": "."},
        {"type": "signature_delta", "signature": "s1"},
    )
)


def test_a_stream_without_the_tool_passes_byte_for_byte() -> None:
    sent = [START, event("ping"), *THINKING, *text(1, "Hello", " you"), b": comment\n\n"]
    sent += [*call(2, "read_file", '{"path"', ': "a"}'), end(), STOP]
    out, round = run(sent)
    assert out == b"".join(sent)
    assert (round.hidden, round.visible) == ([], 1)
    assert round.closing == b""


def test_a_second_round_continues_the_first() -> None:
    response = VisibleResponse()
    run([START, *text(0, "A"), *call(1, NAME, "{}"), end(), STOP], response=response)
    out, round = run([START, *text(0, "B"), end("end_turn"), STOP], first=False, response=response)
    begun, *_, last = events(out)
    assert (begun["type"], begun["index"], last["type"]) == ("content_block_start", 1, "content_block_stop")
    ended, stop = events(bytes(round.closing))
    assert ended["usage"] == {"input_tokens": 20, "cache_read_input_tokens": 10, "output_tokens": 14}
    assert stop == {"type": "message_stop"}
    assert response.text == "AB"


def test_an_error_after_a_hidden_call_is_not_continued() -> None:
    error = event("error", error={"type": "overloaded_error", "message": "Overloaded"})
    out, round = run([START, *call(0, NAME, "{}"), error])
    assert error in out
    assert round.hidden == []


def test_texts_without_a_character_are_not_sent_again() -> None:
    """The API refuses them."""
    _, round = run([START, *text(0, "\n"), *text(1, "A"), *call(2, NAME, "{")])
    assert [one["type"] for one in json.loads(round.unit)["content"]] == ["text", "tool_use"]
    assert json.loads(round.unit)["content"][1]["input"] == {}
    assert round.hidden[0].arguments == "{"


@pytest.mark.parametrize(
    ("fields", "accepted"),
    [
        ({}, True),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, True),
        ({"tool_choice": {"type": "any"}}, False),
        ({"tools": []}, False),
        ({"tools": None}, False),
        ({"tools": [{"name": NAME}]}, False),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, True),
    ],
)
def test_conditions(fields: dict[str, Any], accepted: bool) -> None:
    body = {"messages": [], "tools": [{"name": "a", "input_schema": {}}], **fields}
    assert MessagesTool().accepts(json.dumps(body).encode(), NAME) is accepted


@pytest.mark.parametrize(
    ("tools", "strict"),
    [
        ([{"name": "a", "input_schema": {}, "strict": True}, {"type": "web_search_20250305", "name": "w"}], True),
        ([{"name": "a", "input_schema": {}, "strict": True}, {"name": "b", "input_schema": {}}], None),
        ([{"type": "web_search_20250305", "name": "w"}], None),
    ],
)
def test_the_tool_is_strict_if_all_of_the_clients_are(tools: list[Any], strict: bool | None) -> None:
    made = json.loads(MessagesTool().definition(json.dumps({"tools": tools}).encode(), NAME, "d", {"type": "object"}))
    assert made.get("strict") is strict
    assert made["input_schema"] == {"type": "object"}
