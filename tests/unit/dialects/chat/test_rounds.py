"""Chunks of a stream, as servers split them, and what the client gets of them."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from proxy.dialects.chat.rounds import ChatRound, ChatTool
from proxy.dialects.rounds import VisibleResponse

NAME = "recall_earlier_messages"


def chunk(delta: dict[str, Any] | None = None, reason: str | None = None, **more: Any) -> bytes:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": reason}]
    value = {"id": "a", "created": 1, "model": "m", "choices": choices, **more}
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def part(
    index: int | None, name: str | None = None, arguments: str | None = None, id: str | None = None
) -> dict[str, Any]:
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    entry = {key: value for key, value in (("index", index), ("id", id)) if value is not None}
    return {"tool_calls": [{**entry, **({"type": "function"} if id else {}), "function": function}]}


DONE = b"data: [DONE]\n\n"
FINISH = chunk({}, "tool_calls")


def run(
    chunks: Sequence[bytes], *, first: bool = True, response: VisibleResponse | None = None
) -> tuple[bytes, ChatRound]:
    round = ChatTool().round(NAME, response or VisibleResponse(), first=first)
    out = b"".join(round.feed(one) for one in chunks)
    return out + round.finish(), round


def events(out: bytes) -> list[Any]:
    return [json.loads(line[6:]) for line in out.split(b"\n\n") if line.startswith(b"data: {")]


def calls(out: bytes) -> list[dict[str, Any]]:
    """Return the calls as the official client adds them up."""
    found: dict[int, dict[str, Any]] = {}
    for event in events(out):
        for choice in event["choices"]:
            for entry in choice["delta"].get("tool_calls", ()):
                known = found.setdefault(entry["index"], {"id": "", "name": "", "arguments": ""})
                known["id"] += entry.get("id") or ""
                known["name"] += entry["function"].get("name") or ""
                known["arguments"] += entry["function"].get("arguments") or ""
    return [found[index] for index in sorted(found)]


def test_a_stream_without_the_tool_passes_byte_for_byte() -> None:
    sent = [chunk({"role": "assistant", "content": ""}), chunk({"content": "Hello"}), b": comment\n\n"]
    sent += [chunk(part(0, "read_file", "", "c1")), chunk(part(0, arguments="{}")), FINISH, DONE]
    out, round = run(sent)
    assert out == b"".join(sent)
    assert not round.closing
    assert json.loads(round.unit)["tool_calls"][0]["function"] == {"name": "read_file", "arguments": "{}"}


@pytest.mark.parametrize("size", [1, 7, 50])
def test_chunks_may_be_cut_anywhere(size: int) -> None:
    sent = b"".join([chunk({"content": "Hi"}), chunk(part(0, NAME, '{"query": "x"}', "r")), FINISH, DONE])
    out, round = run([sent[start : start + size] for start in range(0, len(sent), size)])
    assert out == chunk({"content": "Hi"})
    assert [call.arguments for call in round.hidden] == ['{"query": "x"}']
    assert DONE in round.closing


@pytest.mark.parametrize("cut", [1, 7, len(NAME) - 1])
def test_a_name_may_be_split(cut: int) -> None:
    out, round = run(
        [chunk(part(0, NAME[:cut], "", "r")), chunk(part(0, NAME[cut:])), chunk(part(0, None, "{}")), FINISH]
    )
    assert out == b""
    assert [(call.id, call.arguments) for call in round.hidden] == [("r", "{}")]


@pytest.mark.parametrize("name", ["recall", "recall_earlier_messages_of_mine", "r"])
def test_a_name_that_only_begins_alike_is_the_clients(name: str) -> None:
    cut = min(6, len(name))
    sent = [chunk(part(0, name[:cut], None, "c")), chunk(part(0, name[cut:], "")), chunk(part(0, None, "{}")), FINISH]
    out, round = run(sent)
    assert calls(out) == [{"id": "c", "name": name, "arguments": "{}"}]
    assert not round.hidden


def test_a_call_without_arguments_whose_name_is_a_prefix_comes_with_the_finish() -> None:
    out, _ = run([chunk(part(0, "recall", "", "c")), FINISH, DONE])
    assert calls(out) == [{"id": "c", "name": "recall", "arguments": ""}]


@pytest.mark.parametrize("ours", [0, 1, 2])
def test_the_clients_calls_are_renumbered(ours: int) -> None:
    names = ["read", "write"]
    names.insert(ours, NAME)
    sent = [chunk(part(index, name, "", f"id-{name}")) for index, name in enumerate(names)]
    sent += [chunk(part(index, None, f'{{"n": {index}}}')) for index in range(3)]
    out, round = run([*sent, FINISH, DONE])
    assert [(call["id"], call["name"]) for call in calls(out)] == [("id-read", "read"), ("id-write", "write")]
    assert [call.place for call in round.hidden] == [ours]
    assert round.visible == 2
    assert b"tool_calls" in bytes(round.closing), "the client's calls have their finish reason"


def test_later_rounds_continue_the_first_one() -> None:
    response = VisibleResponse()
    usage = {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 4}}
    run(
        [
            chunk({"role": "assistant", "content": "A"}),
            chunk(part(0, NAME, "{}", "r")),
            FINISH,
            chunk(None, usage=usage),
        ],
        response=response,
    )
    second = [
        chunk({"role": "assistant", "content": ""}, id="b", created=2),
        chunk({"content": "B"}, id="b", created=2),
        chunk({}, "stop", id="b", created=2),
        chunk(None, id="b", usage={"prompt_tokens": 20, "prompt_tokens_details": {"cached_tokens": 1}}),
        DONE,
    ]
    out, round = run(second, first=False, response=response)
    assert response.text == "AB"
    assert {event["id"] for event in events(out + bytes(round.closing))} == {"a"}
    assert all("role" not in choice["delta"] for event in events(out) for choice in event["choices"])
    closing = bytes(round.closing)
    assert [choice["finish_reason"] for choice in events(closing)[0]["choices"]] == ["stop"]
    assert events(closing)[-1]["usage"] == {"prompt_tokens": 30, "prompt_tokens_details": {"cached_tokens": 5}}
    assert closing.endswith(DONE)
    assert b'finish_reason": "' not in out


def test_reasoning_is_part_of_the_message() -> None:
    _, round = run(
        [
            chunk({"role": "assistant", "reasoning_content": "Thi"}),
            chunk({"reasoning_content": "nk", "reasoning_details": [{"a": 1}]}),
            chunk({"reasoning_details": [{"b": 2}]}),
            chunk(part(0, NAME, "{}", "r")),
            FINISH,
        ]
    )
    assert json.loads(round.unit)["reasoning_content"] == "Think"
    assert json.loads(round.unit)["reasoning_details"] == [{"a": 1}, {"b": 2}]
    assert json.loads(round.unit)["content"] is None


@pytest.mark.parametrize(
    ("fields", "accepted"),
    [
        ({}, True),
        ({"tool_choice": "auto", "n": 1}, True),
        ({"tool_choice": None}, True),
        ({"tool_choice": "required"}, False),
        ({"tool_choice": {"type": "function", "function": {"name": "a"}}}, False),
        ({"n": 2}, False),
        ({"tools": []}, False),
        ({"tools": None}, False),
        ({"functions": []}, False),
        ({"tools": [{"type": "function", "function": {"name": NAME}}]}, False),
    ],
)
def test_the_conditions(fields: dict[str, Any], accepted: bool) -> None:
    raw = json.dumps({"tools": [{"type": "function", "function": {"name": "a"}}], **fields}).encode()
    assert ChatTool().accepts(raw, NAME) is accepted
