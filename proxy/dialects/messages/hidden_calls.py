"""Take the calls of one tool out of responses of the Messages API, so that the client never sees them.

A block's first event names its tool, so no event waits for another one. See ``dialects.chat.hidden_calls``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from proxy.dialects.hidden_rounds import (
    StreamedRound,
    add_usage,
    decoded,
    place_of,
    readable_tools,
    tools_in,
    with_tool,
    without_tool,
)
from proxy.dialects.hidden_tool import HiddenCall, HiddenRound, VisibleResponse
from proxy.dialects.messages.blocks import Block, blocks_of, calls_of, text_in, type_of
from proxy.dialects.messages.joining import joined
from proxy.dialects.request import NOTHING, encoded, fields_of, listed, value_of
from proxy.dialects.unit_json import decode, encode
from proxy.errors import BadBody
from proxy.http.sse import encode as event_of

_PIECES = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
"""The fields that deltas lengthen. Each has the same name in the delta and in the block."""


class _Streamed:
    """A block of a stream. ``shown`` is its place among the client's blocks, ``None`` if it's hidden."""

    def __init__(self, block: Block, shown: int | None) -> None:
        self.block = dict(block)
        self.shown = shown
        self.input = ""

    def add(self, delta: Mapping[str, Any]) -> None:
        name = _PIECES.get(type_of(delta))
        if name is not None and isinstance(piece := delta.get(name), str):
            known = self.block.get(name)
            self.block[name] = (known if isinstance(known, str) else "") + piece
        elif isinstance(piece := delta.get("partial_json"), str):
            self.input += piece
        elif type_of(delta) == "citations_delta":
            self.block["citations"] = [*(self.block.get("citations") or ()), delta.get("citation")]

    def whole(self) -> Block:
        """Return the block as it is in a message. An input that isn't an object becomes an empty one."""
        if not self.input:
            return self.block
        return {**self.block, "input": decoded(self.input.encode()) or {}}


class Round(StreamedRound):
    """One round of a streamed response. See ``dialects.hidden_tool.StreamedRound``."""

    def __init__(self, tool: str, response: VisibleResponse, *, first: bool) -> None:
        super().__init__(response)
        self._tool = tool
        self._first = first
        self._blocks: list[_Streamed] = []
        self._by_index: dict[int | str | None, _Streamed] = {}

    @property
    def hidden(self) -> list[HiddenCall]:
        """Return the calls of the hidden tool, in order."""
        if self.failed:
            return []
        return _hidden([streamed.whole() for streamed in self._blocks], self._tool, [one.input for one in self._blocks])

    @property
    def visible(self) -> int:
        """Return the number of the client's calls."""
        return sum(type_of(one.block) == "tool_use" and one.shown is not None for one in self._blocks)

    @property
    def _hides(self) -> bool:
        return any(streamed.shown is None for streamed in self._blocks)

    @property
    def unit(self) -> bytes:
        """Return the whole message, with all calls."""
        return _message([streamed.whole() for streamed in self._blocks])

    @property
    def own(self) -> bytes:
        """Return the whole message. The client's has the blocks of all rounds."""
        return self.unit

    @property
    def content(self) -> str:
        """Return the text of this round."""
        return _text([streamed.block for streamed in self._blocks])

    def event(self, value: dict[str, Any] | None, data: bytes, as_it_came: bytes) -> bytes:
        """Return the bytes for the client."""
        kind = type_of(value)
        self.failed = self.failed or kind == "error"
        if value is None or kind == "message_start":
            message = value.get("message") if value is not None else None
            usage = message.get("usage") if isinstance(message, dict) else None
            self._count(usage)
            return as_it_came if value is None or self._first else b""
        if kind == "content_block_start":
            return self._begun(value, as_it_came)
        if kind in ("content_block_delta", "content_block_stop"):
            streamed = self._by_index.get(place_of(value.get("index")))
            if streamed is None:
                return as_it_came
            if isinstance(delta := value.get("delta"), dict):
                streamed.add(delta)
                self._collect(streamed, delta)
            return self._placed(value, streamed, as_it_came)
        if kind == "message_delta":
            return self._ended(value, as_it_came)
        return self._close(as_it_came) if kind == "message_stop" else as_it_came

    def _begun(self, value: dict[str, Any], as_it_came: bytes) -> bytes:
        block = value.get("content_block")
        block = block if isinstance(block, dict) else {}
        hidden = type_of(block) == "tool_use" and block.get("name") == self._tool
        streamed = _Streamed(block, None if hidden else len(self.response.parts))
        self._blocks.append(streamed)
        self._by_index[place_of(value.get("index"))] = streamed
        if not hidden:
            self.response.parts.append(None)
            self.response.texts.append(text_in(block) or "")
            if type_of(block) == "tool_use":
                self.response.calls.append(str(block.get("id") or ""))
        return self._placed(value, streamed, as_it_came)

    def _placed(self, value: dict[str, Any], streamed: _Streamed, as_it_came: bytes) -> bytes:
        """Return the event of a block with the client's index; nothing if the block is hidden."""
        if streamed.shown is None:
            return b""
        if value.get("index") == streamed.shown or (self._first and not self._hides):
            return as_it_came
        return event_of(encode({**value, "index": streamed.shown}), type_of(value))

    def _collect(self, streamed: _Streamed, delta: Mapping[str, Any]) -> None:
        text = delta.get("text")
        if isinstance(text, str) and streamed.shown is not None:
            self.response.texts.append(text)

    def _ended(self, value: dict[str, Any], as_it_came: bytes) -> bytes:
        self._count(value.get("usage"))
        if self.response.usage:
            value["usage"], as_it_came = self.total_usage(), b""
        delta = value.get("delta")
        if isinstance(delta, dict) and _without_calls(delta, self.visible, self._hides):
            as_it_came = b""
        return self._close(as_it_came or event_of(encode(value), "message_delta"))

    def _count(self, usage: Any) -> None:
        """Take the newest figures: those at the end are the whole round's."""
        if isinstance(usage, dict):
            self.usage.update({name: value for name, value in usage.items() if value is not None})

    def _close(self, event: bytes) -> bytes:
        """Hold an event that ends the response if something is hidden."""
        if self._first and not self._hides:
            return event
        self.closing += event
        return b""


class WholeRound:
    """A response that isn't streamed."""

    changed = False

    def __init__(self, tool: str, body: bytes, response: VisibleResponse) -> None:
        self._value = decoded(body) or {}
        self._response = response
        content = self._value.get("content")
        self._blocks: list[Any] = content if isinstance(content, list) else []
        self.hidden = _hidden(self._blocks, tool)
        places = {call.place for call in self.hidden}
        uses = [block for block in self._blocks if type_of(block) == "tool_use"]
        calls = [block for place, block in enumerate(uses) if place not in places]
        self.visible = len(calls)
        response.calls = [str(block.get("id") or "") for block in calls]
        shown = [block for block in self._blocks if type_of(block) != "tool_use" or block in calls]
        response.parts += shown
        response.texts.append(_text(shown))
        if isinstance(usage := self._value.get("usage"), dict):
            add_usage(response.usage, usage)

    @property
    def unit(self) -> bytes:
        """Return the whole message, with all calls."""
        return _message(self._blocks)

    @property
    def own(self) -> bytes:
        """Return the whole message. The client's has the blocks of all rounds."""
        return self.unit

    @property
    def content(self) -> str:
        """Return the text of this round."""
        return _text(self._blocks)

    def body(self) -> bytes:
        """Return the body for the client, with the blocks and the usage of all rounds."""
        value = {**self._value, "content": self._response.parts}
        _without_calls(value, self.visible, bool(self.hidden))
        if self._response.usage:
            value["usage"] = self._response.usage
        return encode(value)


class HiddenTool:
    """How to hide a tool in the Messages API. See ``dialects.dialect.HiddenTool``."""

    def accepts(self, raw: bytes, name: str) -> bool:
        """Return whether a request lets its model choose among tools, and has none of this name."""
        try:
            fields = fields_of(raw)
        except BadBody:
            return False
        choice = value_of(fields.get("tool_choice", NOTHING))
        if choice is not None and type_of(choice) != "auto":
            return False
        names = _names(tools_in(fields))
        return bool(names) and name not in names

    def tool_names(self, raw: bytes) -> list[str]:
        """Return the names of a request's tools, as far as it can be read."""
        return _names(readable_tools(raw))

    def definition(self, raw: bytes, name: str, description: str, parameters: Mapping[str, Any]) -> bytes:
        """Return the tool's JSON. It's strict if all of the client's own tools are."""
        tools = value_of(fields_of(raw)["tools"])
        own = [tool for tool in tools if _field(tool, "input_schema") is not None]
        strict = bool(own) and all(tool.get("strict") is True for tool in own)
        tool = {"name": name, "description": description, "input_schema": dict(parameters)}
        return encode({**tool, "strict": True} if strict else tool)

    def with_tool(self, raw: bytes, tool: bytes) -> bytes:
        """Return the body with one more tool, the last one."""
        return with_tool(raw, tool)

    def without_tool(self, sent: bytes) -> bytes:
        """Return a body without its last tool."""
        return without_tool(sent)

    def continued(self, sent: bytes, units: Sequence[bytes], *, last: bool) -> bytes:
        """Return a body with further messages. With ``last``, the model may not call tools."""
        fields = fields_of(sent)
        before = msgspec.json.decode(fields["messages"], type=list[msgspec.Raw])
        fields["messages"] = listed([*before, *joined(units, {})])
        if last:
            fields["tool_choice"] = encoded({"type": "none"})
        return msgspec.json.encode(fields)

    def response(self) -> VisibleResponse:
        """Return the client's response, still empty."""
        return VisibleResponse()

    def round(self, name: str, response: VisibleResponse, *, first: bool) -> Round:
        """Return a reader for one round of a stream."""
        return Round(name, response, first=first)

    def whole(self, name: str, body: bytes, response: VisibleResponse) -> WholeRound:
        """Read a round that isn't streamed."""
        return WholeRound(name, body, response)

    def result(self, id: str, text: str) -> bytes:
        """Return the message that answers a call."""
        return encode({"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": text}]})

    def visible(self, raw: bytes) -> tuple[str, list[str]] | None:
        """Return the text and the ids of the calls in an assistant's message; ``None`` for other messages."""
        message = decode(raw)
        if message.get("role") != "assistant":
            return None
        return _text(blocks_of(message)), [call.id for call in calls_of(message)]

    def restored(self, raw: bytes, round: HiddenRound) -> bytes:
        """Return the message of the last round as the upstream sent it."""
        return raw if round.own is None else round.own


def _hidden(blocks: Sequence[Any], tool: str, inputs: Sequence[str] = ()) -> list[HiddenCall]:
    """Return the calls of a tool. ``inputs`` are the JSON texts of streamed inputs, empty for those in the block."""
    found = []
    uses = [(block, number) for number, block in enumerate(blocks) if type_of(block) == "tool_use"]
    for place, (block, number) in enumerate(uses):
        if block.get("name") == tool:
            text = inputs[number] if inputs else ""
            arguments = text or json.dumps(block.get("input"), ensure_ascii=False)
            found.append(HiddenCall(str(block.get("id") or ""), arguments, place, encode(block)))
    return found


def _message(blocks: Sequence[Any]) -> bytes:
    """Return an assistant's message. The API refuses texts without a character."""
    return encode({"role": "assistant", "content": [b for b in blocks if (text := text_in(b)) is None or text.strip()]})


def _text(blocks: Sequence[Any]) -> str:
    return "".join(text_in(block) or "" for block in blocks)


def _without_calls(fields: dict[str, Any], visible: int, hides: bool) -> bool:
    """Change the stop reason of a round whose calls are all hidden. Return whether it changed."""
    if fields.get("stop_reason") != "tool_use" or visible or not hides:
        return False
    fields["stop_reason"] = "end_turn"
    return True


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def _names(tools: Sequence[Any]) -> list[str]:
    return [str(_field(tool, "name") or "") for tool in tools]
