"""Events of the Responses API, as servers split them, and what the client gets of them."""

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from proxy.dialects.responses.rounds import ResponsesRound, ResponsesTool
from proxy.dialects.rounds import VisibleResponse, WholeRound

NAME = "recall_earlier_messages"
USAGE = {"input_tokens": 10, "input_tokens_details": {"cached_tokens": 4}, "output_tokens": 2, "total_tokens": 12}


def reasoning(id: str = "rs1") -> dict[str, Any]:
    return {"type": "reasoning", "id": id, "summary": [], "encrypted_content": "sealed"}


def message(text: str, id: str = "msg1") -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "id": id, "role": "assistant", "status": "completed", "content": content}


def call(id: str, name: str = "read_file", arguments: str = "{}") -> dict[str, Any]:
    fields = {"call_id": id, "name": name, "arguments": arguments}
    return {"type": "function_call", "id": f"fc_{id}", "status": "completed", **fields}


def events_of(*items: dict[str, Any], end: str = "completed", store: bool = False, id: str = "resp1") -> list[bytes]:
    """The events of a response, as OpenAI sends them."""
    numbers = itertools.count()
    frame = {"id": id, "status": "in_progress", "store": store, "output": []}

    def event(kind: str, **fields: Any) -> bytes:
        value = {"type": kind, **fields, "sequence_number": next(numbers)}
        return f"event: {kind}\ndata: {json.dumps(value)}\n\n".encode()

    def of(index: int, item: dict[str, Any]) -> Iterator[bytes]:
        at = {"output_index": index, "item_id": item["id"]}
        begun = {
            **item,
            **({"arguments": ""} if "arguments" in item else {}),
            **({"content": []} if "content" in item else {}),
        }
        yield event("response.output_item.added", output_index=index, item=begun)
        if item["type"] == "message":
            yield event("response.output_text.delta", **at, content_index=0, delta=item["content"][0]["text"])
        if item["type"] == "function_call":
            yield event("response.function_call_arguments.delta", **at, delta=item["arguments"])
            yield event("response.function_call_arguments.done", **at, arguments=item["arguments"])
        yield event("response.output_item.done", output_index=index, item=item)

    sent = [event("response.created", response=frame), event("response.in_progress", response=frame)]
    for index, item in enumerate(items):
        sent += of(index, item)
    sent.append(event("keepalive"))
    whole = {**frame, "status": end, "output": list(items), "usage": USAGE}
    return [*sent, event(f"response.{end}", response=whole)]


def run(
    chunks: Sequence[bytes], *, first: bool = True, response: VisibleResponse | None = None
) -> tuple[bytes, ResponsesRound]:
    round = ResponsesTool().round(NAME, response or VisibleResponse(), first=first)
    out = b"".join(round.feed(one) for one in chunks)
    return out + round.finish(), round


def decoded(out: bytes) -> list[Any]:
    return [json.loads(line.split(b"data: ")[1]) for line in out.split(b"\n\n") if b"data: {" in line]


@pytest.mark.parametrize("size", [1, 7, 100, 100_000])
def test_hidden_items_leave_no_trace_at_any_border(size: int) -> None:
    items = [reasoning(), call("r1", NAME, '{"query": "x"}'), message("Looking"), call("c1"), call("r2", NAME)]
    sent = b"".join(events_of(*items))
    response = VisibleResponse()
    out, round = run([sent[at : at + size] for at in range(0, len(sent), size)], response=response)
    shown = decoded(out + bytes(round.closing))
    assert NAME not in json.dumps(shown)
    assert [one["sequence_number"] for one in shown] == list(range(len(shown)))
    assert [one["output_index"] for one in shown if one["type"].endswith("item.added")] == [0, 1, 2]
    assert shown[-1]["response"]["output"] == [items[0], items[2], items[3]]
    assert [one["type"] for one in decoded(bytes(round.closing))] == ["response.completed"]
    assert [(one.id, one.arguments, one.place) for one in round.hidden] == [
        ("r1", '{"query": "x"}', 0),
        ("r2", "{}", 2),
    ]
    assert (response.text, response.calls) == ("Looking", ["c1"])
    assert json.loads(round.unit) == items


def test_reasoning_without_its_content_is_not_sent_to_a_server_that_keeps_none() -> None:
    bare = {**reasoning(), "encrypted_content": None}
    for store, types in ((False, ["function_call"]), (True, ["reasoning", "function_call"])):
        _, round = run(events_of(bare, call("r1", NAME), store=store))
        unit = json.loads(round.unit)
        assert [one["type"] for one in (unit if isinstance(unit, list) else [unit])] == types


def whole(*items: Any, response: VisibleResponse, store: bool = False, id: str = "resp1") -> WholeRound:
    value = {"id": id, "output": list(items), "store": store, "usage": USAGE}
    return WholeRound(ResponsesTool(), NAME, json.dumps(value).encode(), response)


def test_whole_rounds_become_one_response() -> None:
    response = VisibleResponse()
    first = whole(reasoning(), call("r1", NAME), response=response)
    assert [one.id for one in first.hidden] == ["r1"]
    last = whole(message("B"), call("c1"), call("r2", NAME), response=response, id="resp2")
    assert (last.visible, [one.place for one in last.hidden]) == (1, [1])
    body = json.loads(last.body())
    assert body["output"] == [reasoning(), message("B"), call("c1")]
    assert body["id"] == "resp1"
    assert body["usage"]["input_tokens_details"] == {"cached_tokens": 8}
    assert response.calls == ["c1"]


@pytest.mark.parametrize(
    ("fields", "accepted"),
    [
        ({}, True),
        ({"tool_choice": "auto"}, True),
        ({"tool_choice": "required"}, False),
        ({"tool_choice": {"type": "function", "name": "a"}}, False),
        ({"tools": []}, False),
        ({"tools": [{"type": "function", "name": NAME}]}, False),
        ({"tools": [{"type": "web_search"}]}, True),
        ({"previous_response_id": "resp1"}, False),
        ({"conversation": "conv1"}, False),
        ({"max_tool_calls": 3}, False),
        ({"background": True}, False),
        ({"background": False}, True),
    ],
)
def test_conditions(fields: dict[str, Any], accepted: bool) -> None:
    body = {"input": [], "tools": [{"type": "function", "name": "a", "parameters": {}}], **fields}
    assert ResponsesTool().accepts(json.dumps(body).encode(), NAME) is accepted


@pytest.mark.parametrize("given", ["a text", [], [{"role": "user", "content": "x"}]])
def test_a_round_is_added_to_any_input(given: Any) -> None:
    tool = ResponsesTool()
    sent = json.dumps({"input": given, "tools": []}).encode()
    unit = json.dumps([reasoning(), call("r1", NAME)]).encode()
    body = json.loads(tool.continued(sent, [unit, tool.result("r1", "A")], last=True))
    begun = [{"role": "user", "content": given}] if isinstance(given, str) else given
    result = {"type": "function_call_output", "call_id": "r1", "output": "A"}
    assert body["input"] == [*begun, reasoning(), call("r1", NAME), result]
    assert body["tool_choice"] == "none"
