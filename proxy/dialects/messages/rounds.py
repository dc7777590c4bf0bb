"""Take the calls of one tool out of responses of the Messages API, so that the client never sees them.

A block's first event names its tool, so no event waits for another one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from proxy.dialects.messages.request import joined
from proxy.dialects.messages.units import blocks_of, calls_of, text_in
from proxy.dialects.request import NOTHING, fields_of, listed, value_of
from proxy.dialects.rounds import (
    AnswerPart,
    HiddenCall,
    HiddenTool,
    Round,
    StreamedRound,
    VisibleResponse,
    WholeRound,
    decoded,
    field_of,
    place_of,
)
from proxy.dialects.units import decode, encode, type_of
from proxy.http.sse import encode as event_of

_LENGTHENED = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
"""The fields that deltas lengthen. Each has the same name in the delta and in the block."""


class MessagesTool(HiddenTool):
    """See ``dialects.rounds.HiddenTool``. The parts of an answer are its blocks."""

    NO_CALLS: ClassVar[Any] = {"type": "none"}

    def allows_choice(self, fields: Mapping[str, msgspec.Raw]) -> bool:
        choice = value_of(fields.get("tool_choice", NOTHING))
        return choice is None or type_of(choice) == "auto"

    def definition(self, raw: bytes, name: str, description: str, parameters: Mapping[str, Any]) -> bytes:
        """Return the tool's JSON. It's strict if all of the client's own tools are."""
        tools = value_of(fields_of(raw)["tools"])
        defined = [tool for tool in tools if field_of(tool, "input_schema") is not None]
        strict = bool(defined) and all(tool.get("strict") is True for tool in defined)
        tool = {"name": name, "description": description, "input_schema": dict(parameters)}
        return encode({**tool, "strict": True} if strict else tool)

    def lengthened(self, conversation: bytes, units: Sequence[bytes]) -> msgspec.Raw:
        return listed([*msgspec.json.decode(conversation, type=list[msgspec.Raw]), *joined(units, {})])

    def result(self, id: str, text: str) -> bytes:
        return encode({"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": text}]})

    def visible(self, raw: bytes) -> tuple[str, list[str]] | None:
        message = decode(raw)
        if message.get("role") != "assistant":
            return None
        return _text(blocks_of(message)), [call.id for call in calls_of(message)]

    def round(self, name: str, response: VisibleResponse, *, first: bool) -> StreamedRound:
        return MessagesRound(self, name, response, first=first)

    def parts(self, answer: dict[str, Any]) -> list[Any]:
        content = answer.get("content")
        return content if isinstance(content, list) else []

    def is_call(self, part: Any) -> bool:
        return type_of(part) == "tool_use"

    def calls_tool(self, part: Any, tool: str) -> bool:
        return type_of(part) == "tool_use" and bool(part.get("name") == tool)

    def call_ids(self, parts: Sequence[Any]) -> list[str]:
        return [call.id for call in calls_of({"role": "assistant", "content": parts})]

    def hidden_call(self, call: dict[str, Any], arguments: str, place: int) -> HiddenCall:
        arguments = arguments or json.dumps(call.get("input"), ensure_ascii=False)
        return HiddenCall(str(call.get("id") or ""), arguments, place, encode(call))

    def text(self, answer: Mapping[str, Any], parts: Sequence[Any]) -> str:
        return _text(parts)

    def unit(self, answer: Mapping[str, Any], parts: Sequence[Any]) -> bytes:
        # The API refuses texts without a character.
        kept = [block for block in parts if (text := text_in(block)) is None or text.strip()]
        return encode({"role": "assistant", "content": kept})

    def shown(self, round: WholeRound) -> dict[str, Any]:
        answer = {**round.answer, "content": round.response.parts}
        _without_calls(answer, round)
        return answer


class _StreamedBlock(AnswerPart):
    """A block of a stream."""

    def add(self, delta: Mapping[str, Any]) -> None:
        """Add what an event has of the block."""
        name = _LENGTHENED.get(type_of(delta))
        if name is not None and isinstance(text := delta.get(name), str):
            before = self.value.get(name)
            self.value[name] = (before if isinstance(before, str) else "") + text
        elif isinstance(text := delta.get("partial_json"), str):
            self.arguments += text
        elif type_of(delta) == "citations_delta":
            self.value["citations"] = [*(self.value.get("citations") or ()), delta.get("citation")]

    def whole(self) -> Any:
        """Return the block as it is in a message. An input that isn't an object becomes an empty one."""
        if not self.arguments:
            return self.value
        return {**self.value, "input": decoded(self.arguments.encode()) or {}}


class MessagesRound(StreamedRound):
    """One round of a streamed response."""

    def __init__(self, api: HiddenTool, tool: str, response: VisibleResponse, *, first: bool) -> None:
        super().__init__(api, tool, response, first=first)
        self._blocks: list[_StreamedBlock] = []
        self.parts = self._blocks
        self._by_index: dict[int | str | None, _StreamedBlock] = {}

    def event(self, value: dict[str, Any] | None, data: bytes, as_it_came: bytes) -> bytes:
        kind = type_of(value)
        self.failed = self.failed or kind == "error"
        if value is None or kind == "message_start":
            self._count(field_of(field_of(value, "message"), "usage"))
            return as_it_came if value is None or self.first else b""
        if kind == "content_block_start":
            return self._begun(value, as_it_came)
        if kind in ("content_block_delta", "content_block_stop"):
            block = self._by_index.get(place_of(value.get("index")))
            if block is None:
                return as_it_came
            if isinstance(delta := value.get("delta"), dict):
                block.add(delta)
                if isinstance(text := delta.get("text"), str) and not block.hidden:
                    self.response.texts.append(text)
            return self._placed(value, block, as_it_came)
        if kind == "message_delta":
            return self._ended(value, as_it_came)
        return self.close(as_it_came) if kind == "message_stop" else as_it_came

    def _begun(self, value: dict[str, Any], as_it_came: bytes) -> bytes:
        begun = value.get("content_block")
        begun = dict(begun) if isinstance(begun, dict) else {}
        hidden = self.api.calls_tool(begun, self.tool)
        block = _StreamedBlock(begun, None if hidden else len(self.response.parts), hidden=hidden)
        self._blocks.append(block)
        self._by_index[place_of(value.get("index"))] = block
        if not hidden:
            self.response.parts.append(None)
            self.response.texts.append(text_in(begun) or "")
            self.response.calls += self.api.call_ids([begun])
        return self._placed(value, block, as_it_came)

    def _placed(self, value: dict[str, Any], block: _StreamedBlock, as_it_came: bytes) -> bytes:
        """Return the event of a block with the client's index; nothing if the block is hidden."""
        if block.hidden:
            return b""
        if value.get("index") == block.shown or (self.first and not self.hides):
            return as_it_came
        return event_of(encode({**value, "index": block.shown}), type_of(value))

    def _ended(self, value: dict[str, Any], as_it_came: bytes) -> bytes:
        self._count(value.get("usage"))
        if self.response.usage:
            value["usage"], as_it_came = self.total_usage(), b""
        delta = value.get("delta")
        if isinstance(delta, dict) and _without_calls(delta, self):
            as_it_came = b""
        return self.close(as_it_came or event_of(encode(value), "message_delta"))

    def _count(self, usage: Any) -> None:
        """Take the newest figures: those at the end are the whole round's."""
        if isinstance(usage, dict):
            self.usage.update({name: value for name, value in usage.items() if value is not None})


def _text(blocks: Sequence[Any]) -> str:
    return "".join(text_in(block) or "" for block in blocks)


def _without_calls(fields: dict[str, Any], round: Round) -> bool:
    """Change the stop reason of a round whose calls are all hidden. Return whether it changed."""
    if fields.get("stop_reason") != "tool_use" or round.visible or not round.hides:
        return False
    fields["stop_reason"] = "end_turn"
    return True
