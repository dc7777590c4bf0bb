"""Stand-ins of five providers, each strict about ids, signatures, roles, and the data that it attached.

Each model calls ``run`` twice, and then it answers. The arguments of a call name its writer, so a stand-in recognizes
its own calls in any API and checks that their ids and data came back.
"""

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.kit.anthropic_server import event as named_event
from tests.kit.strict_messages import stream as message_stream
from tests.kit.strict_template import mistral_accepts

Object = dict[str, Any]

MODELS = {
    "kimi": "kimi-k2.6",
    "claude": "claude-opus-4-6",
    "openai": "gpt-5.6",
    "gemini": "gemini-3-pro-preview",
    "mistral": "mistral-large",
    "router": "x-ai/grok-5",
}
_FIELDS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id"})
_SKIPPED = {"google": {"thought_signature": "skip_thought_signature_validator"}}


class Refused(Exception):
    """A request that a stand-in rejects."""


class Providers:
    """The stand-ins below ``/NAME/v1``. ``lenient`` ones ignore fields of messages that aren't theirs.

    ``returned`` counts the own calls that came back whole, and ``refused`` has what was rejected.
    """

    def __init__(self, *, lenient: bool) -> None:
        self.lenient = lenient
        self.refused: list[tuple[str, str]] = []
        self.returned = dict.fromkeys(MODELS, 0)
        self.requests = 0
        self._numbers = itertools.count()
        self._calls: dict[str, Object] = {}
        self._items: dict[str, Object] = {}
        self._secrets: set[str] = set()
        paths = {"chat/completions": self._chat, "messages": self._messages, "responses": self._responses}
        self.app = Starlette(
            routes=[Route(f"/{{name}}/v1/{path}", endpoint, methods=["POST"]) for path, endpoint in paths.items()]
        )

    async def _answered(self, request: Request, check: Any, write: Any, stream: Any) -> Response:
        name, body = request.path_params["name"], await request.json()
        self.requests += 1
        try:
            check(name, body)
        except Refused as refused:
            self.refused.append((name, str(refused)))
            error = {"message": str(refused), "type": "invalid_request_error"}
            return JSONResponse([{"error": error}] if name == "gemini" else {"type": "error", "error": error}, 400)
        made = write(name, body)
        if not body.get("stream"):
            return JSONResponse(made)
        return Response(b"".join(stream(made)), media_type="text/event-stream")

    def _own(self, name: str, arguments: str) -> tuple[str, Object] | None:
        """Return the key of an own call, and what was attached to it."""
        key = json.loads(arguments).get("call", "")
        return (key, self._calls[key]) if key.startswith(f"{name} ") else None

    def _next(self, name: str) -> tuple[str, int]:
        number = next(self._numbers)
        return f"{name} {number}", number

    # ---- Chat completions

    async def _chat(self, request: Request) -> Response:
        return await self._answered(request, self._check_chat, self._completion, _chunks)

    def _check_chat(self, name: str, body: Object) -> None:
        messages, waiting = body["messages"], list[str]()
        turn = max(place for place, one in enumerate(messages) if one["role"] == "user")
        for place, message in enumerate(messages):
            if waiting and message["role"] != "tool":
                raise Refused(f"messages[{place}]: an assistant message with 'tool_calls' must be followed by results")
            if message["role"] == "tool":
                if message["tool_call_id"] not in waiting:
                    raise Refused(f"messages[{place}]: no call with id {message['tool_call_id']}")
                waiting.remove(message["tool_call_id"])
            own = [self._own(name, call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
            self._check_fields(name, place, message, own=any(own))
            for call, known in zip(message.get("tool_calls") or (), own, strict=True):
                waiting.append(call["id"])
                self._check_id(name, call["id"])
                extra = {field: call[field] for field in call.keys() - {"id", "type", "function", "index"}}
                if name == "gemini" and place > turn and not extra and call is message["tool_calls"][0]:
                    raise Refused("Function call is missing a thought_signature in functionCall parts.")
                if known and (call["id"], extra) != (known[1]["id"], known[1].get("extra", {})):
                    raise Refused(f"messages[{place}]: my call {known[1]} came back as {call}")
                if not known and extra not in ({}, _SKIPPED and {"extra_content": _SKIPPED}) and not self.lenient:
                    raise Refused(f"messages[{place}]: extra fields {extra} of a call")
                if known and any(message.get(field) != value for field, value in known[1]["message"].items()):
                    raise Refused(f"messages[{place}]: {known[1]['message']} came back as {message}")
                self.returned[name] += known is not None
        if name == "mistral" and not mistral_accepts(messages):
            raise Refused("conversation roles must alternate user/assistant/user/assistant/...")

    def _check_fields(self, name: str, place: int, message: Object, *, own: bool) -> None:
        known = {"kimi": {"reasoning_content"}, "router": {"reasoning_content", "reasoning_details"}}.get(name, set())
        if (unknown := message.keys() - _FIELDS - known) and not self.lenient:
            raise Refused(f"messages[{place}].{min(unknown)}: Extra inputs are not permitted")
        if name == "kimi" and own and not message.get("reasoning_content"):
            raise Refused("thinking is enabled but reasoning_content is missing in assistant tool call message")

    def _check_id(self, name: str, id: str) -> None:
        if name == "mistral" and not re.fullmatch(r"[a-zA-Z0-9]{9}", id):
            raise Refused(f"Tool call id was {id} but must be a-z, A-Z, 0-9, with a length of 9.")
        if name == "openai" and len(id) > 40:
            raise Refused(f"Invalid 'tool_calls[0].id': string too long. Expected at most 40, but got {len(id)}.")

    def _completion(self, name: str, body: Object) -> Object:
        message: Object = {"role": "assistant", "content": "Done."}
        if _calls_more(body["messages"]):
            key, number = self._next(name)
            id = {
                "kimi": f"functions.run:{number % 7}",  # occurs again
                "mistral": f"m{number:08d}",
                "router": f"chatcmpl-tool-{number:032x}",
            }.get(name, f"call_{number:024d}")
            function = {"name": "run", "arguments": json.dumps({"call": key})}
            message = {"role": "assistant", "content": None}
            call: Object = {"index": 0, "id": id, "type": "function", "function": function}
            attached: Object = {"id": id, "message": {}}
            if name == "kimi":
                attached["message"] = {"reasoning_content": f"Thoughts {number}."}
            elif name == "router":
                attached["id"] = id = call["id"] = f"router_{number}"
                details = [{"type": "reasoning.encrypted", "data": f"sealed {number}", "format": "x", "index": 0}]
                attached["message"] = {"reasoning_details": details}
            elif name == "gemini":
                attached["extra"] = {"extra_content": {"google": {"thought_signature": f"signature {number}"}}}
            self._calls[key] = attached
            message |= {**attached["message"], "tool_calls": [call | attached.get("extra", {})]}
        usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason}
        return {"id": "c", "object": "chat.completion", "created": 1, "model": body["model"], "choices": [choice]} | {
            "usage": usage
        }

    # ---- Messages

    async def _messages(self, request: Request) -> Response:
        return await self._answered(request, self._check_messages, self._message, message_stream)

    def _check_messages(self, name: str, body: Object) -> None:
        seen, waiting = set[str](), list[str]()
        for place, message in enumerate(body["messages"]):
            content = message["content"]
            blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
            if not blocks:
                raise Refused(f"messages.{place}: all messages must have non-empty content")
            thoughts = []
            for number, block in enumerate(blocks):
                where = f"messages.{place}.content.{number}"
                if block["type"] in ("thinking", "redacted_thinking"):
                    thoughts.append(block.get("signature") or block.get("data"))
                    if thoughts[-1] not in self._secrets:
                        raise Refused(f"{where}: Invalid `signature` in `thinking` block")
                elif block["type"] == "tool_use":
                    if not re.fullmatch(r"[a-zA-Z0-9_-]+", block["id"]):
                        raise Refused(f"{where}.tool_use.id: String should match pattern '^[a-zA-Z0-9_-]+$'")
                    if block["id"] in seen:
                        raise Refused(f"{where}: `tool_use` ids must be unique")
                    seen.add(block["id"])
                    waiting.append(block["id"])
                    if known := self._own(name, json.dumps(block["input"])):
                        if (block["id"], [known[1]["signature"]]) != (known[1]["id"], thoughts):
                            raise Refused(f"{where}: my call {known[1]} came back as {block} behind {thoughts}")
                        self.returned[name] += 1
                elif block["type"] == "tool_result":
                    if block["tool_use_id"] not in waiting:
                        raise Refused(f"{where}: unexpected `tool_use_id`")
                    waiting.remove(block["tool_use_id"])
            if waiting and message["role"] == "user":
                raise Refused(f"messages.{place}: `tool_use` ids were found without `tool_result` blocks")

    def _message(self, name: str, body: Object) -> Object:
        content: list[Object] = [{"type": "text", "text": "Done."}]
        if calls := _calls_more(body["messages"]):
            key, number = self._next(name)
            self._calls[key] = {"id": f"toolu_{number:022d}", "signature": f"{number:0200d}"}
            self._secrets.add(self._calls[key]["signature"])
            use = {"type": "tool_use", "id": self._calls[key]["id"], "name": "run", "input": {"call": key}}
            content = [{"type": "thinking", "thinking": "Hm.", "signature": self._calls[key]["signature"]}, use]
        reason = "tool_use" if calls else "end_turn"
        made = {"id": "msg_1", "type": "message", "role": "assistant", "model": body["model"], "content": content}
        return {**made, "stop_reason": reason, "stop_sequence": None} | {
            "usage": {"input_tokens": 100, "output_tokens": 10}
        }

    # ---- Responses

    async def _responses(self, request: Request) -> Response:
        return await self._answered(request, self._check_responses, self._response, _events)

    def _check_responses(self, name: str, body: Object) -> None:
        waiting, before = list[str](), Object()
        for place, item in enumerate(body["input"]):
            if (id := item.get("id")) is not None and id not in self._items:
                raise Refused(f"Item with id '{id}' not found.")
            if item.get("encrypted_content", "sealed") not in {"sealed", *self._secrets}:
                raise Refused(f"input[{place}]: The encrypted content could not be verified.")
            if item.get("type") == "reasoning" and "encrypted_content" not in item and id is None:
                raise Refused(f"input[{place}]: reasoning without an id")
            if item.get("type") == "function_call":
                if not re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", item["call_id"]):
                    raise Refused(f"Invalid 'input[{place}].call_id': '{item['call_id']}'.")
                waiting.append(item["call_id"])
                if known := self._own(name, item["arguments"]):
                    if (item["call_id"], before.get("encrypted_content")) != (known[1]["id"], known[1]["signature"]):
                        raise Refused(f"input[{place}]: my call {known[1]} came back as {item} behind {before}")
                    self.returned[name] += 1
            elif item.get("type") == "function_call_output":
                if item["call_id"] not in waiting:
                    raise Refused(f"No tool call found for function call output with call_id {item['call_id']}.")
                waiting.remove(item["call_id"])
            before = item

    def _response(self, name: str, body: Object) -> Object:
        part = {"type": "output_text", "text": "Done.", "annotations": []}
        output: list[Object] = [{"type": "message", "role": "assistant", "status": "completed", "content": [part]}]
        if _calls_more(body["input"]):
            key, number = self._next(name)
            self._calls[key] = {"id": f"call_{number:024d}", "signature": f"gAAAA{number:0100d}"}
            self._secrets.add(self._calls[key]["signature"])
            call = {"type": "function_call", "call_id": self._calls[key]["id"], "name": "run", "status": "completed"}
            reasoning = {"type": "reasoning", "summary": [], "encrypted_content": self._calls[key]["signature"]}
            output = [reasoning, {**call, "arguments": json.dumps({"call": key})}]
        for item in output:
            item["id"] = f"{item['type'][:2]}_{next(self._numbers)}"
            self._items[item["id"]] = item
        usage = {"input_tokens": 100, "output_tokens": 10, "total_tokens": 110}
        made = {"id": f"resp_{next(self._numbers)}", "object": "response", "created_at": 1, "model": body["model"]}
        return {**made, "status": "completed", "error": None, "output": output, "usage": usage}


def _calls_more(units: list[Object]) -> bool:
    """Return whether the model calls again: twice after each text of the user's."""
    results = 0
    for unit in reversed(units):
        blocks = unit["content"] if isinstance(unit.get("content"), list) else []
        if (
            unit.get("role") == "tool"
            or unit.get("type") == "function_call_output"
            or any(isinstance(block, dict) and block["type"] == "tool_result" for block in blocks)
        ):
            results += 1
        elif unit.get("role") == "user":
            break
    return results < 2


def _chunks(made: Object) -> Iterator[bytes]:
    [choice] = made["choices"]
    base = {name: value for name, value in made.items() if name not in ("choices", "usage")}
    base["object"] = "chat.completion.chunk"
    for delta, reason in ((choice["message"], None), ({}, choice["finish_reason"])):
        yield _data({**base, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})
    yield _data({**base, "choices": [], "usage": made["usage"]}) + b"data: [DONE]\n\n"


def _events(made: Object) -> Iterator[bytes]:
    yield named_event("response.created", response={**made, "status": "in_progress", "output": []})
    for place, item in enumerate(made["output"]):
        for step in ("added", "done"):
            yield named_event(f"response.output_item.{step}", output_index=place, item=item)
    yield named_event("response.completed", response=made)


def _data(value: Object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"
