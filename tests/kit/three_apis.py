"""The requests and answers of the three APIs, made from messages of chat completions."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.kit.generator import encoded
from tests.kit.raw_upstream import End, Step, answer, head, streamed
from tests.kit.response_items import item_events
from tests.kit.strict_messages import stream as message_events

APIS = ("chat", "responses", "messages")
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
TOOLS = ("read_file", "run", "write_file")

Message = Mapping[str, Any]

_SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
_UNITS = {"chat": "messages", "responses": "input", "messages": "messages"}


@dataclass(frozen=True, slots=True)
class Call:
    """A call in an answer. ``arguments`` is JSON."""

    id: str
    name: str
    arguments: str = "{}"


@dataclass(frozen=True, slots=True)
class Answer:
    """A model's answer. ``prompt`` and ``output`` are its reported tokens, ``id`` is the base of its ids."""

    text: str = ""
    calls: tuple[Call, ...] = ()
    thinking: str = ""
    prompt: int = 40
    output: int = 80
    id: str = "compare"
    more: Mapping[str, Any] = field(default_factory=dict)
    """Fields that replace those of the answer's object."""

    def steps(self, api: str, *, stream: bool) -> list[Step]:
        """Return the upstream's script for the answer."""
        parts, whole = self.parts(api, stream=stream)
        return streamed(parts) if stream else [answer(whole)]

    def parts(self, api: str, *, stream: bool) -> tuple[list[bytes], bytes]:
        """Return the events of a stream, or the body."""
        made = {"chat": self._completion, "responses": self.response, "messages": self._message}[api]()
        made |= self.more
        events = {"chat": _chunks, "responses": _response_events, "messages": message_events}[api]
        return [*events(made)] if stream else [], json.dumps(made).encode()

    def _completion(self) -> dict[str, Any]:
        calls = [_chat_call(call) for call in self.calls]
        message = {"role": "assistant", "content": self.text or None} | ({"tool_calls": calls} if calls else {})
        reason = "tool_calls" if calls else "stop"
        usage = {"prompt_tokens": self.prompt, "completion_tokens": self.output}
        return {
            "id": f"chatcmpl-{self.id}",
            "object": "chat.completion",
            "created": 1_700_000_000,
            "model": "compare",
            "choices": [{"index": 0, "message": message, "finish_reason": reason}],
            "usage": usage | {"total_tokens": self.prompt + self.output},
        }

    def response(self) -> dict[str, Any]:
        """Return the object of a response."""
        usage = {"input_tokens": self.prompt, "output_tokens": self.output}
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": 1_700_000_000,
            "model": "compare",
            "status": "completed",
            "error": None,
            "output": self.items(),
            "usage": usage | {"total_tokens": self.prompt + self.output},
        }

    def items(self) -> list[dict[str, Any]]:
        """Return the output items of a response."""
        items: list[dict[str, Any]] = []
        if self.thinking:
            items.append(_reasoning(f"rs_{self.id}"))
        if self.text:
            part = {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}
            head = {"type": "message", "id": f"msg_{self.id}", "role": "assistant", "status": "completed"}
            items.append(head | {"content": [part]})
        for number, call in enumerate(self.calls):
            made = {"call_id": call.id, "name": call.name, "arguments": call.arguments, "status": "completed"}
            items.append({"type": "function_call", "id": f"fc_{self.id}_{number}", **made})
        return items

    def _message(self) -> dict[str, Any]:
        content: list[dict[str, Any]] = [_thinking(self.thinking)] if self.thinking else []
        content += [{"type": "text", "text": self.text}] if self.text else []
        content += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}
            for call in self.calls
        ]
        return {
            "id": f"msg_{self.id}",
            "type": "message",
            "role": "assistant",
            "model": "compare",
            "content": content,
            "stop_reason": "tool_use" if self.calls else "end_turn",
            "stop_sequence": None,
            "usage": {"input_tokens": self.prompt, "output_tokens": self.output},
        }

    def as_message(self) -> dict[str, Any]:
        """Return the message that a client of chat completions adds to its conversation."""
        message = {"role": "assistant", "content": self.text or None, "thinking": self.thinking}
        return message | ({"tool_calls": [_chat_call(call) for call in self.calls]} if self.calls else {})


def request(api: str, model: str, messages: Sequence[Any], *, stream: bool, **fields: Any) -> bytes:
    """Return a request's body with untidy spelling. Messages of chat completions become the API's own."""
    if api == "messages":
        fields = {"system": _text("\n".join(_text(m.get("content")) for m in messages if is_system(m))), **fields}
        fields.setdefault("max_tokens", 400)
    units = {"chat": _chat_messages, "responses": _items, "messages": _turns}[api](messages)
    return body(api, model, encoded([*units]), stream=stream, **fields)


def body(api: str, model: str, raws: Sequence[bytes], *, stream: bool, **fields: Any) -> bytes:
    """Return a request's body with units that are JSON already."""
    extra = "".join(f", {json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items())
    extra += ', "stream": true' if stream else ""
    parts = model.encode(), _UNITS[api].encode(), b", ".join(raws), extra.encode()
    return b'{"model": "%b", "%b": [%b], "temperature" : 1.0%b}' % parts


def tools(api: str) -> list[dict[str, Any]]:
    """Return the client's tools as the API spells them."""
    if api == "messages":
        return [{"name": name, "description": "A tool.", "input_schema": _SCHEMA} for name in TOOLS]
    functions = [{"name": name, "parameters": _SCHEMA} for name in TOOLS]
    if api == "chat":
        return [{"type": "function", "function": function} for function in functions]
    return [{"type": "function", **function} for function in functions]


def event(data: Mapping[str, Any]) -> bytes:
    """Return an event. Its name is its type, if it has one."""
    name = f"event: {data['type']}\n" if "type" in data else ""
    return f"{name}data: {json.dumps(data)}\n\n".encode()


def error_body(api: str, message: str, code: str | None) -> dict[str, Any]:
    """Return an error in the API's shape."""
    if api == "messages":
        return {"type": "error", "error": {"type": "invalid_request_error", "message": message}}
    return {"error": {"message": message, "type": "invalid_request_error", "param": "input", "code": code}}


def failed_response(message: str) -> dict[str, Any]:
    """Return the event of a response that failed, because its prompt was too long."""
    error = {"code": "context_length_exceeded", "message": message}
    response = {"id": "resp_failed", "object": "response", "status": "failed", "error": error, "output": []}
    return {"type": "response.failed", "sequence_number": 0, "response": response}


def cut_off(whole: bytes) -> Sequence[Step]:
    """Return the first half of an answer that states its whole length."""
    opening = head("200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(whole)))])
    return [opening + whole[: len(whole) // 2], End.CLOSE]


def gzipped(body: bytes, *, stream: bool) -> Sequence[Step]:
    """Return an answer in gzip."""
    kind = "text/event-stream" if stream else "application/json"
    packed = gzip.compress(body, mtime=0)
    return [answer(packed, headers=[("Content-Type", kind), ("Content-Encoding", "gzip")])]


def _chat_call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _chat_messages(messages: Sequence[Any]) -> Iterator[Any]:
    for message in messages:
        if isinstance(message, dict) and "thinking" in message:
            message = {name: value for name, value in message.items() if name != "thinking"}
        yield message


def _chunks(completion: Mapping[str, Any]) -> Iterator[bytes]:
    head = {name: completion[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    choice = completion["choices"][0]
    message = choice["message"]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    text = message["content"] or ""
    deltas += [{"content": piece} for piece in (text[: len(text) // 2], text[len(text) // 2 :]) if piece]
    for index, call in enumerate(message.get("tool_calls", ())):
        arguments = call["function"]["arguments"]
        opening = {**call, "function": {"name": call["function"]["name"], "arguments": ""}}
        deltas.append({"tool_calls": [{"index": index, **opening}]})
        deltas.append({"tool_calls": [{"index": index, "function": {"arguments": arguments}}]})
    ends = [*((delta, None) for delta in deltas), ({}, choice["finish_reason"])]
    for delta, reason in ends:
        yield event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})
    yield event({**head, "choices": [], "usage": completion["usage"]})
    yield b"data: [DONE]\n\n"


def _response_events(response: Mapping[str, Any]) -> Iterator[bytes]:
    begun = {**response, "status": "in_progress", "output": [], "usage": None}
    events: list[tuple[str, Any]] = [("response.created", {"response": begun})]
    for index, item in enumerate(response["output"]):
        events += item_events(index, item)
    events.append((f"response.{response['status']}", {"response": response}))
    for number, (kind, fields) in enumerate(events):
        yield event({"type": kind, "sequence_number": number, **fields})


def _items(messages: Sequence[Any]) -> Iterator[dict[str, Any]]:
    names = _Names()
    for number, message in enumerate(messages):
        role, content = message["role"], message.get("content")
        if role in ("tool", "function"):
            output = {"call_id": names.answered(message), "output": _text(content)}
            yield {"type": "function_call_output", **output}
        elif role == "assistant":
            if message.get("thinking"):
                yield _reasoning(f"rs_{number}")
            if text := _text(content):
                part = {"type": "output_text", "text": text, "annotations": []}
                yield {"type": "message", "id": f"msg_{number}", "role": "assistant", "content": [part]}
            for call in names.calls(number, message):
                made = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
                yield {"type": "function_call", "id": f"fc_{call.id}", **made}
        elif isinstance(content, list):
            yield {"role": role, "content": [_input_part(part) for part in content]}
        else:
            yield {"role": role, "content": content}


def _turns(messages: Sequence[Any]) -> Iterator[dict[str, Any]]:
    names = _Names()
    turns: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        if is_system(message):
            continue
        role, blocks = "user", []
        if message["role"] in ("tool", "function"):
            result = {"tool_use_id": names.answered(message), "content": _text(message.get("content"))}
            blocks = [{"type": "tool_result", **result}]
        elif message["role"] == "assistant":
            role, blocks = "assistant", _assistant_blocks(number, message, names)
        elif isinstance(message["content"], list):
            blocks = [_block(part) for part in message["content"]]
        elif not turns or turns[-1]["role"] != "user":
            turns.append({"role": "user", "content": message["content"] or "Go on."})
            continue
        else:
            blocks = [{"type": "text", "text": message["content"] or "Go on."}]
        if turns and turns[-1]["role"] == role:
            before = turns[-1]["content"]
            shown = before if isinstance(before, list) else [{"type": "text", "text": before}]
            turns[-1]["content"] = [*shown, *blocks]
        else:
            turns.append({"role": role, "content": blocks})
    yield from turns


def _assistant_blocks(number: int, message: Message, names: _Names) -> list[dict[str, Any]]:
    blocks = [_thinking(message["thinking"])] if message.get("thinking") else []
    if text := _text(message.get("content")):
        blocks.append({"type": "text", "text": text})
    for call in names.calls(number, message):
        try:
            value = json.loads(call.arguments)
        except ValueError:
            value = None
        value = value if isinstance(value, dict) else {"text": call.arguments}
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": value})
    return blocks or [{"type": "text", "text": "Done."}]


class _Names:
    """Ids of calls that are unique in a conversation. Generated ones repeat."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def calls(self, number: int, message: Message) -> list[Call]:
        """Return the calls of a message."""
        made = [(call["id"], call["function"]) for call in message.get("tool_calls") or ()]
        if "function_call" in message:
            made = [(message["function_call"]["name"], message["function_call"])]
        calls = []
        for place, (id, function) in enumerate(made):
            self._names[id] = id if id.startswith("own_") else f"call_{number}_{place}"
            calls.append(Call(self._names[id], function["name"], function["arguments"]))
        return calls

    def answered(self, message: Message) -> str:
        """Return the id of the call that a result answers."""
        id = str(message.get("tool_call_id") or message.get("name"))
        return self._names.get(id, id)


def is_system(message: Message) -> bool:
    """Return whether a message has instructions."""
    return message["role"] in ("system", "developer")


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return str(content or "")


def _input_part(part: Message) -> dict[str, Any]:
    if part["type"] == "text":
        return {"type": "input_text", "text": part["text"]}
    if part["type"] == "image_url":
        return {"type": "input_image", "image_url": part["image_url"]["url"]}
    if part["type"] == "file":
        return {"type": "input_file", **part["file"]}
    return {**part}


def _block(part: Message) -> dict[str, Any]:
    if part["type"] == "text":
        return {name: value for name, value in part.items() if name in ("type", "text", "cache_control")}
    data = part["image_url"]["url"].partition(",")[2] if part["type"] == "image_url" else "iVBORw0KGgo" * 50
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def _reasoning(id: str) -> dict[str, Any]:
    sealed = hashlib.sha512(id.encode()).hexdigest() * 2
    return {"type": "reasoning", "id": id, "summary": [], "encrypted_content": sealed}


def _thinking(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": hashlib.sha512(text.encode()).hexdigest()}
