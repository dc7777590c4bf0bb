"""Tool calls that servers stream in unusual ways reach the official SDKs whole, through both translations."""

import json
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.product.test_bridged_answers import FUNCTION, HELLO, TOOL, clients, entrance, message, response

USAGE = {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}
FRAME = {"id": "chatcmpl-1", "created": 1, "model": "m"}


def piece(index: int | None, id: str | None = None, name: str | None = None, text: str | None = None) -> dict[str, Any]:
    """One part of a call in a delta."""
    made = {"index": index, "id": id, "type": "function" if name else None}
    function = {field: value for field, value in (("name", name), ("arguments", text)) if value is not None}
    return {field: value for field, value in made.items() if value is not None} | {"function": function}


def calls(*pieces: dict[str, Any]) -> dict[str, Any]:
    return {"tool_calls": list(pieces)}


X, Y = '{"x": 1}', '{"y": 2}'
BOTH = [("f", {"x": 1}), ("g", {"y": 2})]


class Scripted:
    """An upstream with chat completions only, whose answer has the deltas. ``ends`` holds reasons by their position."""

    def __init__(self, deltas: list[dict[str, Any]], ends: dict[int, str] | None = None) -> None:
        self.app = Starlette(routes=[Route("/v1/chat/completions", self.answer, methods=["POST"])])
        self.bodies: list[Any] = []
        self.deltas = [{"role": "assistant", "content": None}, *deltas]
        self.ends = ends or {len(self.deltas): "tool_calls"}

    async def answer(self, request: Request) -> Response:
        """Serve one request."""
        body = await request.json()
        self.bodies.append(body)
        if body.get("stream"):
            choices = [[self._choice("delta", delta, n)] for n, delta in enumerate([*self.deltas, {}])]
            sent = [{**FRAME, "object": "chat.completion.chunk", "choices": choice} for choice in choices]
            lines = [json.dumps(chunk) for chunk in [*sent, {**sent[-1], "choices": [], "usage": USAGE}]]
            return Response("".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]), media_type="text/event-stream")
        made = {"role": "assistant", "content": None, "tool_calls": self.deltas[1]["tool_calls"]}
        whole = {**FRAME, "object": "chat.completion", "choices": [self._choice("message", made, 2)], "usage": USAGE}
        return Response(json.dumps(whole), media_type="application/json")

    def _choice(self, field: str, value: dict[str, Any], n: int) -> dict[str, Any]:
        return {"index": 0, field: value, "finish_reason": self.ends.get(n)}


def used(made: Any) -> list[tuple[str, Any]]:
    """The names and arguments of a message's calls, whose ids are set and differ."""
    found = [block for block in made.content if block.type == "tool_use"]
    assert len({block.id for block in found} - {""}) == len(found)
    return [(block.name, block.input) for block in found]


def called(answered: Any) -> list[tuple[str, Any]]:
    """The names and arguments of a response's calls, whose ids are set and differ."""
    found = [item for item in answered.output if item.type == "function_call"]
    assert len({item.call_id for item in found} - {""}) == len(found)
    return [(item.name, json.loads(item.arguments)) for item in found]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ids", [("a", "a"), (None, None), ("", ""), ("a", None)])
def test_results_belong_to_the_call_with_their_id(
    ids: tuple[str | None, str | None], stream: bool, tmp_path: Path
) -> None:
    """Without ids that differ, a client's second result would be for the first call."""
    upstream = Scripted([calls(piece(0, ids[0], "f", X), piece(1, ids[1], "g", Y))])
    with entrance(upstream.app, tmp_path, speaks=["chat"]) as url, clients(url) as (claude, gpt):
        made = message(claude, stream=stream, tools=[TOOL])
        answered = response(gpt, stream=stream, tools=[FUNCTION])
        assert (used(made), called(answered)) == (BOTH, BOTH)
        results = [{"type": "tool_result", "tool_use_id": block.id, "content": block.name} for block in made.content]
        turns = [{"role": "assistant", "content": [block.model_dump() for block in made.content]}]
        message(claude, stream=stream, tools=[TOOL], messages=[*HELLO, *turns, {"role": "user", "content": results}])
        items = [item.model_dump(exclude_none=True) for item in answered.output]
        outputs = [
            {"type": "function_call_output", "call_id": item.call_id, "output": item.name} for item in answered.output
        ]
        response(gpt, stream=stream, tools=[FUNCTION], input=[*HELLO, *items, *outputs])
    for body in upstream.bodies[2:]:
        _, assistant, *sent = body["messages"]
        names = {call["id"]: call["function"]["name"] for call in assistant["tool_calls"]}
        assert [names[result["tool_call_id"]] for result in sent] == ["f", "g"]
        assert [json.dumps(result["content"]).count(name) for result, name in zip(sent, "fg", strict=True)] == [1, 1]
    if ids[0]:
        assert made.content[0].id == answered.output[0].call_id == ids[0]


def test_a_call_streams_while_the_upstream_writes_it(tmp_path: Path) -> None:
    """Only later calls and texts wait, and arguments that Anthropic's SDK might not be able to read."""
    parts = ['{"x": "', *("y" * 600 for _ in range(6)), '"}']
    deltas = [{"content": "A"}, {"content": "B"}, calls(piece(0, "a", "f", ""))]
    upstream = Scripted([*deltas, *(calls(piece(0, text=part)) for part in parts)])
    with entrance(upstream.app, tmp_path, speaks=["chat"]) as url, clients(url) as (claude, gpt):
        with claude.messages.stream(model="m", max_tokens=500, messages=HELLO, tools=[TOOL]) as events:
            written = [event.delta for event in events if event.type == "content_block_delta"]
        streamed = list(gpt.responses.create(model="m", input=HELLO, tools=[FUNCTION], stream=True))
    assert [delta.text for delta in written if delta.type == "text_delta"] == ["A", "B"]
    arguments = [delta.partial_json for delta in written if delta.type == "input_json_delta"]
    assert "".join(arguments) == "".join(parts)
    assert len(arguments) > 3
    assert [event.delta for event in streamed if event.type.endswith(".delta")] == ["A", "B", *parts]


@pytest.mark.parametrize(
    "deltas",
    [
        [calls(piece(0, "a", "f", X)), calls(piece(1, "b", "g", Y)), calls(piece(0, text=Y))],
        [calls(piece(0, "a", None, X))],
    ],
)
def test_a_call_that_cant_be_whole_breaks_the_stream(deltas: list[dict[str, Any]], tmp_path: Path) -> None:
    upstream = Scripted(deltas)
    with entrance(upstream.app, tmp_path, speaks=["chat"]) as url, clients(url) as (claude, gpt):
        with pytest.raises((anthropic.APIError, httpx.HTTPError)):
            message(claude, stream=True, tools=[TOOL])
        with pytest.raises((openai.APIError, httpx.HTTPError)):
            response(gpt, stream=True, tools=[FUNCTION])
