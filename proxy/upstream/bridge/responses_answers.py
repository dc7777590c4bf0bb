"""Build responses and their events from chat completions.

LiteLLM's own iterator writes reasoning as a message, calls of custom tools as calls of functions, and done events in
another order than OpenAI. OpenAI's SDK fails on some of these streams.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from proxy.dialects.parts import RESPONSES
from proxy.upstream.bridge.completions import AnswerBuilder, Event, figures, unique

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}

_ECHOED = (
    *("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "reasoning", "temperature", "text"),
    *("tool_choice", "tools", "top_p", "truncation", "user"),
)
_DEFAULTS: Mapping[str, Any] = {
    **dict.fromkeys(("instructions", "max_output_tokens", "temperature", "top_p", "user", "previous_response_id")),
    "metadata": {},
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "reasoning": {"effort": None, "summary": None},
    "text": {"format": {"type": "text"}},
    "truncation": "disabled",
}


@dataclass(frozen=True, slots=True)
class CallItem:
    """The item for a call of a function. ``fields`` are added. Arguments that are an object also have ``always``."""

    type: str
    always: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)

    def begin(self, id: str) -> dict[str, Any]:
        """Return the item without arguments."""
        own = {"type": self.type, "id": unique("".join(word[0] for word in self.type.split("_"))), "call_id": id}
        return {**own, **self.fields, "status": "in_progress", **self.arguments("")}

    def arguments(self, text: str) -> dict[str, Any]:
        """Return the field for the arguments. A custom tool's input is the argument ``content``."""
        value: Any = text
        if self.type != "function_call":
            given = _object(text)
            custom = self.type == "custom_tool_call"
            value = str(given.get("content", text)) if custom else {**self.always, **given}
        return {RESPONSES[self.type].arguments: value}


class ResponseBuilder(AnswerBuilder):
    """One response. ``calls`` has the items for calls by the names of functions.

    ``sealed`` encodes thinking with signatures, so that a client can send it back.
    """

    def __init__(self, asked: Mapping[str, Any], calls: Mapping[str, CallItem], sealed: Any) -> None:
        self._items = calls
        self._sealed = sealed
        self._numbers = itertools.count()
        self._text: dict[str, Any] | None = None
        self._reasoning: dict[str, Any] | None = None
        self._calls: dict[int, tuple[dict[str, Any], CallItem]] = {}
        self._arguments: dict[int, str] = {}
        self._thinking: list[dict[str, Any]] = []
        self._reason: str | None = None
        self._cut = False
        self._positions: dict[str, int] = {}
        echoed = {name: asked[name] for name in _ECHOED if asked.get(name) is not None}
        self.answer: dict[str, Any] = {
            "id": "",
            "object": "response",
            "created_at": 0,
            "model": asked["model"],
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "output": [],
            **_DEFAULTS,
            **echoed,
            "store": False,
            "usage": None,
        }

    def feed(self, chunk: Mapping[str, Any]) -> Iterator[Event]:
        """Yield the events of a chunk."""
        if not self.answer["id"]:
            self.answer["id"] = unique("resp")
            self.answer["created_at"] = chunk.get("created") or 0
            self.answer["model"] = chunk.get("model") or self.answer["model"]
            yield self._event("response.created", response=self._snapshot())
            yield self._event("response.in_progress", response=self._snapshot())
        for choice in chunk.get("choices") or ():
            yield from self._delta(choice["delta"])
            self._reason = choice["finish_reason"]
        if usage := chunk.get("usage"):
            self.answer["usage"] = _usage(usage)
        if (tier := chunk.get("service_tier")) and tier != self.answer.get("service_tier"):
            # In front of the caller's metadata, as in OpenAI's responses.
            self.answer = {"service_tier": tier, **self.answer} | {"service_tier": tier}

    def finish(self) -> Iterator[Event]:
        """Yield the events at the end of a stream."""
        incomplete = _INCOMPLETE.get(self._reason or "")
        self._cut = bool(incomplete)
        yield from self._close_reasoning()
        yield from self._close_text()
        for index in self._calls:
            yield from self._close_call(index)
        self.answer["status"] = "incomplete" if incomplete else "completed"
        self.answer["incomplete_details"] = {"reason": incomplete} if incomplete else None
        yield self._event(f"response.{self.answer['status']}", response=self.answer)

    def _delta(self, delta: Mapping[str, Any]) -> Iterator[Event]:
        self._thinking += delta.get("thinking_blocks") or ()
        if text := delta.get("reasoning_content"):
            yield from self._reasons(text)
        for kind in ("content", "refusal"):
            if text := delta.get(kind):
                yield from self._writes(kind, text)
        for url in delta.get("images") or ():
            yield from self._draws(url)
        for call in delta.get("tool_calls") or ():
            yield from self._call(call)

    def _reasons(self, text: str) -> Iterator[Event]:
        if self._reasoning is None:
            self._reasoning = self._item({"type": "reasoning", "id": unique("rs"), "summary": []})
            yield self._added(self._reasoning)
            self._reasoning["summary"] = [{"type": "summary_text", "text": ""}]
            part = {"type": "summary_text", "text": ""}
            yield self._of(self._reasoning, "response.reasoning_summary_part.added", summary_index=0, part=part)
        self._reasoning["summary"][0]["text"] += text
        yield self._of(self._reasoning, "response.reasoning_summary_text.delta", summary_index=0, delta=text)

    def _close_reasoning(self) -> Iterator[Event]:
        sealed = self._sealed(_merged(self._thinking)) if self._thinking else None
        if self._reasoning is None and sealed is not None:
            self._reasoning = self._item({"type": "reasoning", "id": unique("rs"), "summary": []})
            yield self._added(self._reasoning)
        item, self._reasoning = self._reasoning, None
        if item is None:
            return
        if sealed is not None:
            item["encrypted_content"] = sealed
        for part in item["summary"]:
            name = "response.reasoning_summary_text.done"
            yield self._of(item, name, summary_index=0, text=part["text"])
            yield self._of(item, "response.reasoning_summary_part.done", summary_index=0, part=part)
        self._thinking = []
        yield self._done(item)

    def _writes(self, kind: str, text: str) -> Iterator[Event]:
        if self._text is None:
            yield from self._close_reasoning()
            fields = {"role": "assistant", "status": "in_progress", "content": []}
            self._text = self._item({"type": "message", "id": unique("msg"), **fields})
            yield self._added(self._text)
        key, type = ("text", "output_text") if kind == "content" else ("refusal", "refusal")
        parts = self._text["content"]
        if not parts or parts[-1]["type"] != type:
            empty: dict[str, Any] = {"type": type, key: ""}
            parts.append({**empty, "annotations": [], "logprobs": []} if key == "text" else empty)
            yield self._of(
                self._text, "response.content_part.added", content_index=len(parts) - 1, part=dict(parts[-1])
            )
        parts[-1][key] += text
        extra: dict[str, Any] = {"logprobs": []} if key == "text" else {}
        yield self._of(self._text, f"response.{type}.delta", content_index=len(parts) - 1, delta=text, **extra)

    def _close_text(self) -> Iterator[Event]:
        item, self._text = self._text, None
        if item is None:
            return
        for index, part in enumerate(item["content"]):
            key = "text" if "text" in part else "refusal"
            extra: dict[str, Any] = {"logprobs": []} if key == "text" else {}
            yield self._of(item, f"response.{part['type']}.done", content_index=index, **{key: part[key]}, **extra)
            yield self._of(item, "response.content_part.done", content_index=index, part=part)
        item["status"] = self._status(item)
        yield self._done(item)

    def _draws(self, url: str) -> Iterator[Event]:
        data = url.partition(";base64,")[2]
        if not data:
            yield from self._writes("content", f"\n![image]({url})\n")
            return
        yield from self._close_reasoning()
        yield from self._close_text()
        fields = {"id": unique("ig"), "status": "completed", "result": data}
        item = self._item({"type": "image_generation_call", **fields})
        yield self._added(item)
        yield self._of(item, "response.image_generation_call.completed")
        yield self._done(item)

    def _call(self, call: Mapping[str, Any]) -> Iterator[Event]:
        function = call.get("function") or {}
        index = call.get("index") or 0
        if index not in self._calls:
            yield from self._close_reasoning()
            yield from self._close_text()
            name, id = str(function.get("name") or ""), str(call.get("id") or unique("call"))
            kind = self._items.get(name) or CallItem("function_call", fields={"name": name})
            item = self._item(kind.begin(id))
            self._calls[index] = item, kind
            self._arguments[index] = ""
            yield self._added(item)
        text = function.get("arguments") or ""
        self._arguments[index] += text
        item, _ = self._calls[index]
        if text and item["type"] == "function_call":
            yield self._of(item, "response.function_call_arguments.delta", delta=text)

    def _close_call(self, index: int) -> Iterator[Event]:
        (item, kind), arguments = self._calls[index], self._arguments[index]
        item |= {"status": self._status(item), **kind.arguments(arguments)}
        if item["type"] == "function_call":
            name = "response.function_call_arguments.done"
            yield self._of(item, name, arguments=arguments, name=item["name"])
        elif item["type"] == "custom_tool_call":
            yield self._of(item, "response.custom_tool_call_input.delta", delta=item["input"])
            yield self._of(item, "response.custom_tool_call_input.done", input=item["input"])
        yield self._done(item)

    def _status(self, item: dict[str, Any]) -> str:
        return "incomplete" if self._cut and item is self.answer["output"][-1] else "completed"

    def _item(self, item: dict[str, Any]) -> dict[str, Any]:
        self._positions[item["id"]] = len(self.answer["output"])
        self.answer["output"].append(item)
        return item

    def _snapshot(self) -> dict[str, Any]:
        return {**self.answer, "output": []}

    def _added(self, item: dict[str, Any]) -> Event:
        return self._event("response.output_item.added", output_index=self._positions[item["id"]], item=dict(item))

    def _done(self, item: dict[str, Any]) -> Event:
        return self._event("response.output_item.done", output_index=self._positions[item["id"]], item=item)

    def _of(self, item: dict[str, Any], type: str, **fields: Any) -> Event:
        return self._event(type, item_id=item["id"], output_index=self._positions[item["id"]], **fields)

    def _event(self, type: str, **fields: Any) -> Event:
        return {"type": type, "sequence_number": next(self._numbers), **fields}


def _merged(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return thinking blocks from the parts of a stream. A signature ends its block."""
    blocks: list[dict[str, Any]] = []
    for part in parts:
        last = blocks[-1] if blocks else {}
        if part.get("type") != "thinking" or last.get("type") != "thinking" or last.get("signature"):
            blocks.append(dict(part))
            continue
        last["thinking"] = (last.get("thinking") or "") + (part.get("thinking") or "")
        last["signature"] = part.get("signature")
    return blocks


def _object(text: str) -> dict[str, Any]:
    """Return a call's arguments. Those that aren't an object stay a text in the field ``arguments``."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": text} if text else {}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    known = figures(usage)
    put = {"cache_write_tokens": known["put"]} if known["put"] else {}
    return {
        "input_tokens": known["sent"],
        "input_tokens_details": {"cached_tokens": known["cached"], **put},
        "output_tokens": known["written"],
        "output_tokens_details": {"reasoning_tokens": known["reasoned"]},
        "total_tokens": known["sent"] + known["written"],
    }
