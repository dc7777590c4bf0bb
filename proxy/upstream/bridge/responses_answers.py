"""Build responses and their events from chat completions.

LiteLLM's own iterator writes reasoning as a message, calls of custom tools as calls of functions, and done events in
another order than OpenAI. OpenAI's SDK fails on some of these streams.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from proxy.dialects.parts import RESPONSES
from proxy.upstream.bridge.completions import AnswerBuilder, Event, figures
from proxy.upstream.bridge.returned import unique

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
        self._open: dict[str, Any] = {}
        self._call_item = CallItem("function_call")
        self._arguments: list[str] = []
        self._thinking: list[dict[str, Any]] = []
        self._incomplete: str | None = None
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
        if not self.answer["id"]:
            self.answer["id"] = unique("resp")
            self.answer["created_at"] = chunk.get("created") or 0
            self.answer["model"] = chunk.get("model") or self.answer["model"]
            yield self._event("response.created", response={**self.answer, "output": []})
            yield self._event("response.in_progress", response={**self.answer, "output": []})
        for choice in chunk.get("choices") or ():
            yield from self._delta(choice["delta"])
            self._incomplete = _INCOMPLETE.get(choice["finish_reason"])
        if usage := chunk.get("usage"):
            self.answer["usage"] = _usage(usage)
        if (tier := chunk.get("service_tier")) and tier != self.answer.get("service_tier"):
            # In front of the caller's metadata, as in OpenAI's responses.
            self.answer = {"service_tier": tier, **self.answer} | {"service_tier": tier}

    def finish(self) -> Iterator[Event]:
        yield from self._close()
        self.answer["status"] = "incomplete" if self._incomplete else "completed"
        self.answer["incomplete_details"] = {"reason": self._incomplete} if self._incomplete else None
        yield self._event(f"response.{self.answer['status']}", response=self.answer)

    def _delta(self, delta: Mapping[str, Any]) -> Iterator[Event]:
        yield from self._reasons(delta.get("reasoning_content") or "", delta.get("thinking_blocks") or ())
        for kind in ("content", "refusal"):
            if text := delta.get(kind):
                yield from self._writes(kind, text)
        for url in delta.get("images") or ():
            yield from self._draws(url)
        for call in delta.get("tool_calls") or ():
            yield from self._call(call)

    def _reasons(self, text: str, blocks: Sequence[dict[str, Any]]) -> Iterator[Event]:
        if (text or blocks) and self._open.get("type") != "reasoning":
            yield from self._start({"type": "reasoning", "id": unique("rs"), "summary": []})
        self._thinking += blocks
        if not text:
            return
        summary = self._open["summary"]
        if not summary:
            summary.append({"type": "summary_text", "text": ""})
            yield self._of("response.reasoning_summary_part.added", summary_index=0, part=dict(summary[0]))
        summary[0]["text"] += text
        yield self._of("response.reasoning_summary_text.delta", summary_index=0, delta=text)

    def _end_reasoning(self) -> Iterator[Event]:
        thinking, self._thinking = self._thinking, []
        if thinking and (sealed := self._sealed(_merged(thinking))) is not None:
            self._open["encrypted_content"] = sealed
        for part in self._open["summary"]:
            yield self._of("response.reasoning_summary_text.done", summary_index=0, text=part["text"])
            yield self._of("response.reasoning_summary_part.done", summary_index=0, part=part)

    def _writes(self, kind: str, text: str) -> Iterator[Event]:
        if self._open.get("type") != "message":
            fields = {"role": "assistant", "status": "in_progress", "content": []}
            yield from self._start({"type": "message", "id": unique("msg"), **fields})
        key, type = ("text", "output_text") if kind == "content" else ("refusal", "refusal")
        extra: dict[str, Any] = {"logprobs": []} if key == "text" else {}
        parts = self._open["content"]
        if not parts or parts[-1]["type"] != type:
            parts.append({"type": type, key: "", **({"annotations": []} if extra else {}), **extra})
            yield self._of("response.content_part.added", content_index=len(parts) - 1, part=dict(parts[-1]))
        parts[-1][key] += text
        yield self._of(f"response.{type}.delta", content_index=len(parts) - 1, delta=text, **extra)

    def _end_text(self) -> Iterator[Event]:
        for index, part in enumerate(self._open["content"]):
            text = {name: part[name] for name in ("text", "refusal", "logprobs") if name in part}
            yield self._of(f"response.{part['type']}.done", content_index=index, **text)
            yield self._of("response.content_part.done", content_index=index, part=part)

    def _draws(self, url: str) -> Iterator[Event]:
        data = url.partition(";base64,")[2]
        if not data:
            yield from self._writes("content", f"\n![image]({url})\n")
            return
        fields = {"id": unique("ig"), "status": "completed", "result": data}
        yield from self._start({"type": "image_generation_call", **fields})
        yield from self._close()

    def _end_image(self) -> Iterator[Event]:
        yield self._of("response.image_generation_call.completed")

    def _call(self, call: Mapping[str, Any]) -> Iterator[Event]:
        function = call["function"]
        if "id" in call:
            name = function["name"]
            self._call_item = self._items.get(name) or CallItem("function_call", fields={"name": name})
            yield from self._start(self._call_item.begin(call["id"]))
            self._arguments = []
        if text := function["arguments"]:
            self._arguments.append(text)
            if self._open["type"] == "function_call":
                yield self._of("response.function_call_arguments.delta", delta=text)

    def _end_call(self) -> Iterator[Event]:
        item, arguments = self._open, "".join(self._arguments)
        item |= self._call_item.arguments(arguments)
        if item["type"] == "function_call":
            yield self._of("response.function_call_arguments.done", arguments=arguments, name=item["name"])
        elif item["type"] == "custom_tool_call":
            yield self._of("response.custom_tool_call_input.delta", delta=item["input"])
            yield self._of("response.custom_tool_call_input.done", input=item["input"])

    def _start(self, item: dict[str, Any]) -> Iterator[Event]:
        yield from self._close()
        self._open = item
        self.answer["output"].append(item)
        yield self._at("response.output_item.added", item=dict(item))

    def _close(self) -> Iterator[Event]:
        """End the open item. If the answer is incomplete, that's the last one."""
        if not self._open:
            return
        if "status" in self._open:
            self._open["status"] = "incomplete" if self._incomplete else "completed"
        endings = {
            "reasoning": self._end_reasoning,
            "message": self._end_text,
            "image_generation_call": self._end_image,
        }
        yield from endings.get(self._open["type"], self._end_call)()
        yield self._at("response.output_item.done", item=self._open)
        self._open = {}

    def _of(self, type: str, **fields: Any) -> Event:
        return self._at(type, item_id=self._open["id"], **fields)

    def _at(self, type: str, **fields: Any) -> Event:
        return self._event(type, output_index=len(self.answer["output"]) - 1, **fields)

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
