"""A stand-in for OpenAI's ``/v1/responses`` that enforces the pairing of items, their ids, and a window.

It plays the agent of ``agent_script``. Chat completions, for example for summaries, go to ``StandIn``.
"""

import hashlib
import itertools
import json
import time
from collections import Counter as Tally
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from tests.kit.agent_script import Received, Record, Script, Step, step
from tests.kit.response_items import (
    CALLS,
    REASONING,
    Item,
    Refused,
    check_calls,
    check_fields,
    item_events,
    kind_of,
    likeness,
    not_persisted,
    prompt_digest,
    size_of,
    text_of,
    usage_of,
)
from tests.kit.upstream import StandIn, is_summary_request, summarise

TOO_LONG = (
    "Your input exceeds the context window of this model. Please adjust your input and try again.",
    "context_length_exceeded",
)


@dataclass(frozen=True, slots=True)
class Written:
    """An output item, the reasoning before it, the item after it, and the digest of the prompt before its response."""

    item: Item
    stored: bool
    prompt: str
    reasoning: str | None = None
    next: str | None = None


class StrictResponses(Record):
    """The stand-in.

    ``window`` limits the input, in tokens. Reasoning behind a changed prompt is dropped, as newer models do.
    ``script`` decides the answers.
    """

    def __init__(
        self,
        window: int = 16_000,
        *,
        script: Script = step,
    ) -> None:
        super().__init__()
        self.window = window
        self._script = script
        self.chat = StandIn(window=window)
        self._ids = itertools.count(1)
        self._written: dict[str, Written] = {}
        self._histories: dict[str, list[Item]] = {}
        self._answers: dict[str, dict[str, Any]] = {}
        self._compacted: dict[str, tuple[list[Item], list[Item]]] = {}
        self.app = Starlette(
            routes=[
                Route("/v1/responses", self._create, methods=["POST"]),
                Route("/v1/responses/input_tokens", self._count, methods=["POST"]),
                Route("/v1/responses/compact", self._compact, methods=["POST"]),
                Route("/v1/responses/{id}", self._retrieve, methods=["GET"]),
                Mount("/", self.chat.app),
            ]
        )

    async def _create(self, request: Request) -> Response:
        body = json.loads(await request.body())
        received = Received(request.url.path, dict(request.headers), body)
        received.summary = is_summary_request({**body, "messages": body.get("input")})
        self.requests.append(received)
        try:
            items = self._admitted(received)
        except Refused as refused:
            received.fault = str(refused)
            received.status = refused.status
            return JSONResponse({"error": refused.error}, refused.status)
        received.tokens = size_of(body, items)
        received.overflow = received.tokens > self.window
        if received.overflow and not body.get("stream"):
            received.status = 400
            error = {"message": TOO_LONG[0], "type": "invalid_request_error", "param": "input", "code": TOO_LONG[1]}
            return JSONResponse({"error": error}, 400)
        received.status = 200
        answer = self._failed(body) if received.overflow else self._answer(body, items, received)
        if body.get("stream"):
            return StreamingResponse(self._events(answer), media_type="text/event-stream")
        return JSONResponse(answer)

    async def _count(self, request: Request) -> Response:
        body = json.loads(await request.body())
        tokens = size_of(body, self._resolved(body))
        return JSONResponse({"object": "response.input_tokens", "input_tokens": tokens})

    async def _retrieve(self, request: Request) -> Response:
        answer = self._answers.get(request.path_params["id"])
        return JSONResponse(answer or {"error": {"message": "Response not found."}}, 200 if answer else 404)

    async def _compact(self, request: Request) -> Response:
        """Return the user's messages and one ``compaction`` item."""
        body = json.loads(await request.body())
        received = Received(request.url.path, dict(request.headers), body, status=200, summary=True)
        self.requests.append(received)
        try:
            items = self._resolved(body)
            self._checked_compaction(items)
            if "previous_response_id" not in body:  # a chain may end with a call
                check_calls(items)
                for number in range(len(items)):
                    self._check_reasoning(items, number, stored=body.get("store") is not False)
        except Refused as refused:
            received.fault, received.status = str(refused), refused.status
            return JSONResponse({"error": refused.error}, refused.status)
        id_ = self._id("cmp")
        item = {"type": "compaction", "id": id_, "encrypted_content": hashlib.sha512(id_.encode()).hexdigest() * 2}
        kept = [*(one for one in items if one.get("role") == "user"), item]
        self._compacted[item["encrypted_content"]] = kept, self._original(items)
        usage = usage_of(size_of(body, items), 100)
        return JSONResponse(
            {"id": self._id("resp"), "object": "response.compaction", "created_at": 1, "output": kept, "usage": usage}
        )

    def _resolved(self, body: Mapping[str, Any]) -> list[Item]:
        """Return the items of a request, with stored ones for its references. Raises ``Refused``."""
        given = body.get("input", [])
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        history: list[Item] = []
        if previous := body.get("previous_response_id"):
            if previous not in self._histories:
                message = f"Previous response with id '{previous}' not found."
                raise Refused(message, "previous_response_id", "previous_response_not_found")
            history = self._histories[previous]
        return [*history, *(self._referenced(item) for item in items)]

    def stored(self, id_: str) -> Item:
        """Return an item that this server wrote."""
        return self._written[id_].item

    def _referenced(self, item: Item) -> Item:
        if item.get("type") != "item_reference":
            return item
        written = self._written.get(item["id"])
        if written is None:
            raise Refused(f"Item with id '{item['id']}' not found.", status=404)
        if not written.stored:
            raise not_persisted(item["id"])
        return written.item

    def _checked_compaction(self, items: list[Item]) -> None:
        """Check that a compaction item is known, the only one, and behind the items that came with it."""
        places = [number for number, item in enumerate(items) if kind_of(item) == "compaction"]
        if not places:
            return
        kept, _ = self._compacted.get(items[places[0]]["encrypted_content"], ([], []))
        if len(places) > 1 or items[: places[0] + 1] != kept:
            raise Refused("The compacted items must be passed unchanged, at the start of 'input'.")

    def _original(self, items: list[Item]) -> list[Item]:
        """Return items with those that a compaction replaced."""
        for number, item in enumerate(items):
            if kind_of(item) == "compaction":
                return [*self._compacted[item["encrypted_content"]][1], *items[number + 1 :]]
        return items

    def _admitted(self, received: Received) -> list[Item]:
        """Return the items of a request, without reasoning that is bound to another prompt. Raises ``Refused``."""
        body = received.body
        stored = body.get("store") is not False
        items = self._resolved(body)
        if not items:
            raise Refused("Missing required parameter: 'input'.", code="missing_required_parameter")
        for number, item in enumerate(items):
            check_fields(number, item)
        repeated = [id_ for id_, count in Tally(item.get("id") for item in items).items() if id_ and count > 1]
        if repeated:
            raise Refused(
                f"Duplicate item found with id {repeated[0]}. Remove duplicate items from your input and try again."
            )
        check_calls(items)
        self._checked_compaction(items)
        for number, item in enumerate(items):
            self._check_reasoning(items, number, stored=stored)
            if kind_of(item) == REASONING:
                received.reasoning.append(self._known(item).item["id"])
        if items[-1].get("role", "user") == "assistant" or items[-1].get("type") in (REASONING, *CALLS):
            raise Refused("The last item must be a message of the user or an output.")
        return self._without_unbound(items, received)

    def _known(self, item: Item) -> Written:
        """Return the record of a reasoning item. Raises ``Refused`` if this server didn't write it."""
        sealed = item.get("encrypted_content")
        written = self._written.get(sealed or item.get("id", ""))
        if written is None:
            message = f"The encrypted content for item {item.get('id')} could not be verified."
            raise Refused(message, None, "invalid_encrypted_content")
        return written

    def _check_reasoning(self, items: list[Item], number: int, *, stored: bool) -> None:
        """Check that reasoning and the item that follows it are together. Raises ``Refused``."""
        item = items[number]
        following = items[number + 1] if number + 1 < len(items) else {}
        if kind_of(item) == REASONING:
            written = self._known(item)
            id_ = written.item["id"]
            if not item.get("encrypted_content") and not (stored and written.stored):
                raise not_persisted(id_)
            if written.next != likeness(following):
                raise Refused(f"Item '{id_}' of type 'reasoning' was provided without its required following item.")
        elif item.get("id") in self._written:
            needed = self._written[item["id"]].reasoning
            before = [self._known(earlier).item["id"] for earlier in items[:number] if kind_of(earlier) == REASONING]
            if needed is not None and needed not in before:
                kind = item.get("type", "message")
                raise Refused(
                    f"Item '{item['id']}' of type '{kind}' was provided without its required 'reasoning' item: "
                    f"'{needed}'."
                )

    def _without_unbound(self, items: list[Item], received: Received) -> list[Item]:
        kept = []
        for number, item in enumerate(items):
            if kind_of(item) == REASONING:
                written = self._known(item)
                if written.prompt != prompt_digest(received.body, self._original(items[:number])):
                    received.dropped.append(written.item["id"])
                    continue
            kept.append(item)
        return kept

    def _answer(self, body: Mapping[str, Any], items: list[Item], received: Received) -> dict[str, Any]:
        """Return the next response of the script, and remember its items."""
        newest = items[-1]
        if received.summary:
            made = Step(text=summarise({"messages": items}).content or "Nothing.")
        else:
            made = self._script(text_of(newest), newest.get("call_id"))
        stored = body.get("store") is not False
        output = self._output(made, sealed=not stored or "reasoning.encrypted_content" in body.get("include", []))
        prompt = prompt_digest(body, self._original(self._resolved(body)))
        reasoning = output[0]["id"] if kind_of(output[0]) == REASONING else None
        for number, item in enumerate(output):
            first = kind_of(item) == REASONING
            following = likeness(output[number + 1]) if first else None
            written = Written(item, stored, prompt, None if first else reasoning, following)
            self._written[item["id"]] = written
            if sealed := item.get("encrypted_content"):
                self._written[sealed] = written
        answer = self._frame(body) | {"output": output, "usage": usage_of(received.tokens, made.tokens)}
        if received.dropped:
            answer["input_transformations"] = [
                {"type": "reasoning", "action": "removed", "reason": "prefix_mismatch", "id": id_}
                for id_ in received.dropped
            ]
        if stored:
            self._histories[answer["id"]] = [*self._resolved(body), *output]
            self._answers[answer["id"]] = answer
        return answer

    def _output(self, made: Step, *, sealed: bool) -> list[Item]:
        output: list[Item] = []
        if made.thinking:
            reasoning: Item = {"type": REASONING, "id": self._id("rs"), "summary": []}
            if sealed:
                reasoning["encrypted_content"] = hashlib.sha512(reasoning["id"].encode()).hexdigest() * 4
            output.append(reasoning)
        if made.text:
            part = {"type": "output_text", "text": made.text, "annotations": [], "logprobs": []}
            frame = {"type": "message", "id": self._id("msg"), "role": "assistant", "status": "completed"}
            output.append({**frame, "content": [part]})
        for call in made.calls:
            named = {"call_id": call.id, "name": call.name, "status": "completed"}
            if call.arguments.startswith("{"):
                output.append({"type": "function_call", "id": self._id("fc"), **named, "arguments": call.arguments})
            else:
                output.append({"type": "custom_tool_call", "id": self._id("ctc"), **named, "input": call.arguments})
        return output

    def _frame(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "id": self._id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "status": "completed",
            "error": None,
            "incomplete_details": None,
            "instructions": body.get("instructions"),
            "metadata": {},
            "model": body.get("model"),
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": body.get("previous_response_id"),
            "store": body.get("store") is not False,
            "temperature": 1.0,
            "tool_choice": body.get("tool_choice", "auto"),
            "tools": body.get("tools", []),
            "top_p": 1.0,
            "truncation": "disabled",
            "usage": None,
        }

    def _failed(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._frame(body) | {"status": "failed", "error": {"code": TOO_LONG[1], "message": TOO_LONG[0]}}

    def _events(self, answer: dict[str, Any]) -> Iterator[bytes]:
        for number, (kind, fields) in enumerate(self._stream(answer)):
            data = json.dumps({"type": kind, "sequence_number": number, **fields})
            yield f"event: {kind}\ndata: {data}\n\n".encode()

    def _stream(self, answer: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        begun = answer | {"status": "in_progress", "output": [], "usage": None, "error": None}
        yield "response.created", {"response": begun}
        yield "response.in_progress", {"response": begun}
        if answer["status"] == "failed":
            yield "response.failed", {"response": answer}
            return
        for index, item in enumerate(answer["output"]):
            yield from item_events(index, item)
        yield "response.completed", {"response": answer}

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{hashlib.sha256(f'{prefix}{next(self._ids)}'.encode()).hexdigest()[:40]}"
