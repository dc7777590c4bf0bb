"""The stand-in for OpenAI's Responses API and Anthropic's Messages API.

It translates a request to chat completions, so that the script, the summaries, and the figures are shared. It checks
the structure of the conversation in the request's own format first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import groupby, takewhile
from operator import itemgetter
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from proxy.demo.replies import Reply
from proxy.demo.upstream import Received, StandIn
from proxy.demo.validity import Fault
from proxy.http import sse

RESPONSES_OVERFLOW = (
    "Your input exceeds the context window of this model. Please adjust your input and try again.",
    "input",
    "context_length_exceeded",
)
Body = Mapping[str, Any]
_role = itemgetter("role")


class EveryApi(StandIn):
    """A stand-in that also serves ``/v1/responses`` and ``/v1/messages``.

    The ``body`` of a received request is its translation to chat completions, ``raw`` the request itself.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, serve in (("responses", self._responses), ("messages", self._messages)):
            self.app.routes.insert(0, Route(f"/v1/{name}", serve, methods=["POST"]))

    async def _responses(self, request: Request) -> Response:
        body = await request.json()
        items = body["input"]
        if isinstance(items, str):
            items = [{"role": "user", "content": items}]
        system = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
        received = await self._received(request, body, [*system, *_from_items(items)], list(_item_faults(items)))
        fault = received.faults[0] if received.faults else None
        answer = self._response_object(body)
        if fault is None and received.tokens > self.window:
            fault = Fault(*RESPONSES_OVERFLOW)
            if body.get("stream"):
                received.status = 400  # for the figures; a stream reports the overflow with status 200
                error = {"code": fault.code, "message": fault.message}
                failed = {"type": "response.failed", "response": answer | {"status": "failed", "error": error}}
                return _events([{"type": "response.created", "response": answer}, failed])
        if fault:
            error = {"message": fault.message, "type": "invalid_request_error", "param": fault.param}
            return self._sent(received, JSONResponse({"error": error | {"code": fault.code}}, 400))
        reply = self._reply(received, body.get("max_output_tokens"))
        output = list(_items(reply, answer["id"]))
        usage = {
            "input_tokens": received.tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": reply.tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": received.tokens + reply.tokens,
        }
        done = answer | {"status": "completed", "output": output, "usage": usage}
        if not body.get("stream"):
            return self._sent(received, JSONResponse(done))
        return self._sent(received, _events(_response_events(answer, done)))

    async def _messages(self, request: Request) -> Response:
        body = await request.json()
        system = [{"role": "system", "content": _text(body["system"])}] if body.get("system") else []
        messages = [*system, *_from_messages(body["messages"])]
        received = await self._received(request, body, messages, list(_message_faults(body["messages"])))
        message = received.faults[0].message if received.faults else None
        if message is None and received.tokens > self.window:
            message = f"prompt is too long: {received.tokens} tokens > {self.window} maximum"
        if message:
            error = {"type": "invalid_request_error", "message": message}
            return self._sent(received, JSONResponse({"type": "error", "error": error}, 400))
        reply = self._reply(received, body["max_tokens"])
        answer = {
            "id": f"msg_{next(self._ids):08d}",
            "type": "message",
            "role": "assistant",
            "model": body["model"],
            "content": list(_blocks(reply)),
            "stop_reason": {"tool_calls": "tool_use", "length": "max_tokens"}.get(reply.reason, "end_turn"),
            "stop_sequence": None,
            "usage": {"input_tokens": received.tokens, "output_tokens": reply.tokens},
        }
        return self._sent(received, _events(_message_events(answer)) if body.get("stream") else JSONResponse(answer))

    async def _received(
        self, request: Request, body: Body, messages: list[dict[str, Any]], found: list[Fault]
    ) -> Received:
        """Record a request. Count it if its conversation is valid."""
        translated = {name: body[name] for name in ("model", "tools", "stream") if name in body}
        received = Received(
            request.method,
            request.url.path,
            request.headers,
            await request.body(),
            translated | {"messages": messages},
            faults=found,
        )
        if not found:
            received.tokens = int(self.counter.request(received.body).total * self.ratio)
        self.requests.append(received)
        return received

    def _reply(self, received: Received, asked: int | None) -> Reply:
        room = min(asked or self.max_output, self.max_output, self.window - received.tokens)
        return self.responder(received.body).within(room)

    def _response_object(self, body: Body) -> dict[str, Any]:
        return {
            "id": f"resp_{next(self._ids):08d}",
            "object": "response",
            "created_at": 1_700_000_000,
            "model": body["model"],
            "status": "in_progress",
            "output": [],
            "tools": body.get("tools", []),
            "tool_choice": "auto",
            "parallel_tool_calls": True,
        }

    def _sent(self, received: Received, response: Response) -> Response:
        received.status = response.status_code
        response.headers["x-request-id"] = f"req_{next(self._ids):032x}"
        return response


def _text(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _call(identity: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def _from_items(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Translate items of Responses. Calls in a row become one message."""
    messages: list[dict[str, Any]] = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "function_call":
            if not (messages and messages[-1].get("tool_calls")):
                messages.append({"role": "assistant", "content": None, "tool_calls": []})
            messages[-1]["tool_calls"].append(_call(item["call_id"], item["name"], item["arguments"]))
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": _text(item["output"])})
        else:
            messages.append({"role": item["role"], "content": _text(item["content"])})
    return messages


def _from_messages(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Translate messages of Messages. Each block of the user becomes one message."""
    messages: list[dict[str, Any]] = []
    for message in given:
        blocks = _content(message)
        if message["role"] == "assistant":
            calls = [_call(b["id"], b["name"], json.dumps(b["input"])) for b in blocks if b["type"] == "tool_use"]
            text = _text([block for block in blocks if block["type"] == "text"])
            messages.append({"role": "assistant", "content": text or None} | ({"tool_calls": calls} if calls else {}))
            continue
        for block in blocks:
            if block["type"] == "tool_result":
                result = {"role": "tool", "tool_call_id": block["tool_use_id"], "content": _text(block["content"])}
                messages.append(result)
            else:
                messages.append({"role": "user", "content": block["text"]})
    return messages


def _content(message: Body) -> list[dict[str, Any]]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _is_result(block: Body) -> bool:
    return bool(block["type"] == "tool_result")


def _item_faults(items: list[dict[str, Any]]) -> Iterator[Fault]:
    """Yield a fault for each output before its call, and for each call without an output."""
    waiting: list[str] = []
    for item in items:
        kind = item.get("type")
        if kind == "function_call":
            waiting.append(item["call_id"])
        elif kind == "function_call_output" and item["call_id"] in waiting:
            waiting.remove(item["call_id"])
        elif kind == "function_call_output":
            yield Fault(f"No tool call found for function call output with call_id {item['call_id']}.", "input")
    for call in waiting:
        yield Fault(f"No tool output found for function call {call}.", "input")


def _message_faults(messages: list[dict[str, Any]]) -> Iterator[Fault]:
    """Yield the faults of tool results, which must be first in the message after their calls.

    Messages in a row with the same role are valid, because Anthropic combines them.
    """
    asked: list[str] = []
    turns = [[block for message in same for block in _content(message)] for _, same in groupby(messages, _role)]
    for index, blocks in enumerate([*turns, []]):
        results = [block["tool_use_id"] for block in filter(_is_result, blocks)]
        first = [block["tool_use_id"] for block in takewhile(_is_result, blocks)]
        if missing := [call for call in asked if call not in first]:
            yield Fault(
                f"messages.{index - 1}: `tool_use` ids were found without `tool_result` blocks immediately after: "
                f"{', '.join(missing)}. Each `tool_use` block must have a corresponding `tool_result` block in the "
                "next message.",
                None,
            )
        for call in results:
            if call not in asked:
                yield Fault(
                    f"messages.{index}: unexpected `tool_use_id` found in `tool_result` blocks: {call}. Each "
                    "`tool_result` block must have a corresponding `tool_use` block in the previous message.",
                    None,
                )
        asked = [block["id"] for block in blocks if block["type"] == "tool_use"]


def _items(reply: Reply, identity: str) -> Iterator[dict[str, Any]]:
    if reply.content is not None:
        part = {"type": "output_text", "text": reply.content, "annotations": [], "logprobs": []}
        message = {"id": f"msg_{identity}", "type": "message", "role": "assistant", "status": "completed"}
        yield message | {"content": [part]}
    for call in reply.tool_calls:
        made = {"type": "function_call", "id": f"fc_{call.id}", "call_id": call.id, "status": "completed"}
        yield made | {"name": call.name, "arguments": call.arguments}


def _blocks(reply: Reply) -> Iterator[dict[str, Any]]:
    if reply.content is not None:
        yield {"type": "text", "text": reply.content}
    for call in reply.tool_calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}


def _response_events(answer: Body, done: Body) -> Iterator[dict[str, Any]]:
    yield {"type": "response.created", "response": answer}
    for index, item in enumerate(done["output"]):
        empty: Body = {"content": []} if item["type"] == "message" else {"arguments": ""}
        place = {"output_index": index, "item_id": item["id"]}
        yield {"type": "response.output_item.added", "output_index": index, "item": {**item, **empty}}
        if item["type"] == "message":
            (part,) = item["content"]
            place |= {"content_index": 0}
            yield {"type": "response.content_part.added", **place, "part": part | {"text": ""}}
            yield {"type": "response.output_text.delta", **place, "delta": part["text"], "logprobs": []}
            yield {"type": "response.output_text.done", **place, "text": part["text"], "logprobs": []}
            yield {"type": "response.content_part.done", **place, "part": part}
        else:
            named = {"name": item["name"], "arguments": item["arguments"]}
            yield {"type": "response.function_call_arguments.delta", **place, "delta": item["arguments"]}
            yield {"type": "response.function_call_arguments.done", **place, **named}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": "response.completed", "response": done}


def _message_events(answer: Body) -> Iterator[dict[str, Any]]:
    yield {"type": "message_start", "message": {**answer, "content": [], "stop_reason": None}}
    for index, block in enumerate(answer["content"]):
        empty: Body
        if block["type"] == "text":
            empty, delta = {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            empty, delta = {"input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield {"type": "content_block_start", "index": index, "content_block": {**block, **empty}}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    stop = {"stop_reason": answer["stop_reason"], "stop_sequence": None}
    yield {"type": "message_delta", "delta": stop, "usage": answer["usage"]}
    yield {"type": "message_stop"}


def _events(events: Iterator[dict[str, Any]] | list[dict[str, Any]]) -> Response:
    sent = b"".join(
        f"event: {event['type']}\n".encode() + sse.encode(json.dumps(event | {"sequence_number": number}).encode())
        for number, event in enumerate(events)
    )
    return Response(sent, media_type="text/event-stream")
