"""Build messages of ``/v1/messages`` and their events from chat completions."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgspec
from pydantic_core import from_json

from proxy.errors import UpstreamInterrupted
from proxy.upstream.bridge.completions import AnswerBuilder, Event, figures, is_cut
from proxy.upstream.bridge.returned import unique

UNREADABLE_CALL = "The model wrote a call whose arguments aren't JSON. Send the request again."

STOP_REASONS: Mapping[str, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}

_HELD = 1_024
"""Characters of a call's arguments to hold. If they aren't JSON, the client can't read the stream anymore."""


class MessageBuilder(AnswerBuilder):
    """One message. ``names`` has the client's names of tools that have others at the upstream, and ``stops`` its texts
    to stop at. ``prompt`` is the proxy's count of the prompt, because servers report theirs at the end.
    """

    def __init__(self, model: str, names: Mapping[str, str], stops: Collection[str], prompt: int) -> None:
        self._prompt = prompt
        self._names = names
        self._stops = stops
        self._begun = False
        self._refused = False
        self._open: dict[str, Any] | None = None
        self._arguments = _Arguments()
        self.answer = {
            "id": unique("msg"),
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }

    def feed(self, chunk: Mapping[str, Any]) -> Iterator[Event]:
        if usage := chunk.get("usage"):
            self.answer["usage"] = _usage(usage)
        if not self._begun:
            self._begun = True
            self.answer["model"] = chunk.get("model") or self.answer["model"]
            usage = self.answer["usage"] if usage else {"input_tokens": self._prompt, "output_tokens": 0}
            yield {"type": "message_start", "message": {**self.answer, "content": [], "usage": usage}}
        for choice in chunk.get("choices") or ():
            yield from self._delta(choice["delta"])
            if reason := choice["finish_reason"]:
                self._end(reason, choice.get("stop_sequence"))

    def finish(self) -> Iterator[Event]:
        yield from self._close()
        delta = {name: self.answer[name] for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": delta, "usage": self.answer["usage"]}
        yield {"type": "message_stop"}

    def _end(self, reason: str, matched: str | None) -> None:
        self.answer["stop_reason"] = STOP_REASONS[reason]
        if reason == "stop" and self._refused:
            self.answer["stop_reason"] = "refusal"
        elif reason == "stop" and matched and matched in self._stops:
            self.answer |= {"stop_reason": "stop_sequence", "stop_sequence": matched}

    def _delta(self, delta: Mapping[str, Any]) -> Iterator[Event]:
        blocks = delta.get("thinking_blocks") or ()
        for block in blocks:
            yield from self._thinks(block)
        if not blocks and (text := delta.get("reasoning_content")):
            yield from self._writes("thinking", text)
        self._refused = self._refused or bool(delta.get("refusal"))
        pictures = [f"\n![image]({url})\n" for url in delta.get("images") or ()]
        if text := "".join([delta.get("content") or "", delta.get("refusal") or "", *pictures]):
            yield from self._writes("text", text)
        for call in delta.get("tool_calls") or ():
            yield from self._calls(call)

    def _thinks(self, block: Mapping[str, Any]) -> Iterator[Event]:
        if block.get("type") == "redacted_thinking":
            yield from self._start(dict(block))
            return
        if text := block.get("thinking"):
            yield from self._writes("thinking", text)
        if signature := block.get("signature"):
            yield from self._continue("thinking")
            self.answer["content"][-1]["signature"] = signature
            yield self._change("signature_delta", signature=signature)

    def _writes(self, kind: str, text: str) -> Iterator[Event]:
        yield from self._continue(kind)
        self.answer["content"][-1][kind] += text
        yield self._change(f"{kind}_delta", **{kind: text})

    def _calls(self, call: Mapping[str, Any]) -> Iterator[Event]:
        function = call["function"]
        if "id" in call:
            name = self._names.get(function["name"], function["name"])
            yield from self._start({"type": "tool_use", "id": call["id"], "name": name, "input": {}})
            self._arguments = _Arguments()
        if text := self._arguments.add(function["arguments"]):
            yield self._change("input_json_delta", partial_json=text)

    def _continue(self, kind: str) -> Iterator[Event]:
        """Start a block, unless one of its kind is open. A signature ends its block."""
        if self._open is None or self._open["type"] != kind or self._open.get("signature"):
            signature = {"signature": ""} if kind == "thinking" else {}
            yield from self._start({"type": kind, kind: "", **signature})

    def _start(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self._close()
        self._open = block
        self.answer["content"].append(block)
        yield self._event("content_block_start", content_block=dict(block))

    def _close(self) -> Iterator[Event]:
        block, self._open = self._open, None
        if block is None:
            return
        if block["type"] == "tool_use":
            block["input"], rest = self._arguments.end()
            if rest:
                yield self._change("input_json_delta", partial_json=rest)
        yield self._event("content_block_stop")

    def _change(self, type: str, **fields: str) -> Event:
        return self._event("content_block_delta", delta={"type": type, **fields})

    def _event(self, type: str, **fields: Any) -> Event:
        return {"type": type, "index": len(self.answer["content"]) - 1, **fields}


class _Arguments:
    """The arguments of a call, as texts that the SDKs can read as JSON at any time."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._length = 0
        self._sent = 0
        self._next = _HELD

    def add(self, text: str) -> str:
        """Add a text. Return what the client can read now. Longer arguments are checked less often."""
        self._texts.append(text)
        self._length += len(text)
        if self._length < self._next:
            return ""
        self._next = self._length * 9 // 8
        written = "".join(self._texts)
        with contextlib.suppress(ValueError):
            if isinstance(from_json(written, allow_partial=True, allow_inf_nan=False), dict):
                sent, self._sent = self._sent, len(written)
                return written[sent:]
        return ""

    def end(self) -> tuple[msgspec.Raw, str]:
        """Return the arguments as an object, and what the client doesn't have yet. Raises ``UpstreamInterrupted``."""
        written = "".join(self._texts)
        if not self._sent:
            made = _object(written)
            return msgspec.Raw(made), made.decode()
        if not _is_object(written) and not is_cut(written):
            raise UpstreamInterrupted(UNREADABLE_CALL)
        return msgspec.Raw(_object(written)), written[self._sent :]


def _is_object(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return isinstance(from_json(text, allow_inf_nan=False), dict)
    return False


def _object(text: str) -> bytes:
    """Return arguments as a JSON object.

    Models also write line breaks in strings, an object in a string, or no JSON at all.
    """
    if _is_object(text):
        return text.encode()
    if is_cut(text):
        return msgspec.json.encode(from_json(text, allow_partial="trailing-strings"))
    with contextlib.suppress(ValueError, RecursionError, OverflowError):
        value = json.loads(text if text.strip() else "null", strict=False)
        value = json.loads(value, strict=False) if isinstance(value, str) else value
        if value is None or isinstance(value, dict):
            return msgspec.json.encode(value or {})
    return msgspec.json.encode({"arguments": text})


def _usage(usage: Mapping[str, Any]) -> dict[str, int]:
    """Return the usage. Anthropic's prompt doesn't include what was read from a cache or written to one."""
    known = figures(usage)
    cache = {"cache_creation_input_tokens": known["put"], "cache_read_input_tokens": known["cached"]}
    sent = max(known["sent"] - known["put"] - known["cached"], 0)
    fields = {name: count for name, count in cache.items() if count}
    return {"input_tokens": sent, "output_tokens": known["written"], **fields}
