"""Take the calls of one tool out of responses of the Responses API, so that the client never sees them.

An item's first event names its tool, so no event waits for another one. Codex has its tools in an item
``additional_tools`` of the input, not in ``tools``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from proxy.dialects.request import NOTHING, fields_of, listed, value_of
from proxy.dialects.responses.units import (
    calls_of,
    is_client_call,
    is_message,
    is_readable,
    is_reasoning,
    items_of,
    joined,
    kind_of,
    raws_of,
    visible,
)
from proxy.dialects.rounds import (
    DONE,
    AnswerPart,
    HiddenCall,
    HiddenTool,
    StreamedRound,
    VisibleResponse,
    WholeRound,
    field_of,
    longer,
    place_of,
    tools_in,
)
from proxy.dialects.units import Message, encode
from proxy.http.sse import encode as event_of

_BEGINS = frozenset({"response.created", "response.queued", "response.in_progress"})
_ENDS = frozenset({"response.completed", "response.incomplete"})
_FAILS = frozenset({"response.failed", "error"})
_RULED_OUT = ("previous_response_id", "conversation", "max_tool_calls", "background")

_TOOLS_ITEM = "additional_tools"


class ResponsesTool(HiddenTool):
    """See ``dialects.rounds.HiddenTool``. The parts of an answer are its items."""

    CONVERSATION = "input"

    def allows_choice(self, fields: Mapping[str, msgspec.Raw]) -> bool:
        """Return whether the model may choose, and the server neither keeps the conversation nor counts the calls."""
        if any(value_of(fields.get(field, NOTHING)) for field in _RULED_OUT):
            return False
        return value_of(fields.get("tool_choice", NOTHING)) in (None, "auto")

    def tools(self, fields: Mapping[str, msgspec.Raw]) -> list[Any]:
        return tools_of(fields)

    def definition(self, raw: bytes, name: str, description: str, parameters: Mapping[str, Any]) -> bytes:
        """Return the tool's JSON. It's strict, as functions are by default, unless one of the client's isn't."""
        strict = not any(field_of(tool, "strict") is False for tool in tools_of(fields_of(raw)))
        tool = {"type": "function", "name": name, "description": description, "parameters": dict(parameters)}
        return encode({**tool, "strict": strict})

    def with_tool(self, raw: bytes, tool: bytes) -> bytes:
        """Return a body with one more tool. If its tools are in items, the tool gets an item behind them."""
        fields = fields_of(raw)
        if tools_in(fields):
            return super().with_tool(raw, tool)
        items = _items(fields)
        item = encode({"type": _TOOLS_ITEM, "role": "developer", "tools": [msgspec.Raw(tool)]})
        items.insert(_end_of_tools(items), msgspec.Raw(item))
        fields["input"] = listed(items)
        return msgspec.json.encode(fields)

    def without_tool(self, sent: bytes) -> bytes:
        fields = fields_of(sent)
        if tools_in(fields):
            return super().without_tool(sent)
        items = _items(fields)
        del items[_end_of_tools(items) - 1]
        fields["input"] = listed(items)
        return msgspec.json.encode(fields)

    def lengthened(self, conversation: bytes, units: Sequence[bytes]) -> msgspec.Raw:
        before = bytes(conversation)
        if before.startswith(b'"'):
            before = bytes(listed([encode({"role": "user", "content": msgspec.json.decode(before)})]))
        return longer(before, [item for unit in units for item in raws_of(unit)])

    def result(self, id: str, text: str) -> bytes:
        return encode({"type": "function_call_output", "call_id": id, "output": text})

    def visible(self, raw: bytes) -> tuple[str, list[str]] | None:
        items = items_of(raw)
        if not items or kind_of(items[0]) != "assistant":
            return None
        return _text(items), [call.id for call in calls_of(items)]

    def round(self, name: str, response: VisibleResponse, *, first: bool) -> StreamedRound:
        return ResponsesRound(self, name, response, first=first)

    def parts(self, answer: dict[str, Any]) -> list[Any]:
        output = answer.get("output")
        return [item for item in output if isinstance(item, dict)] if isinstance(output, list) else []

    def is_call(self, part: Any) -> bool:
        return is_client_call(part)

    def calls_tool(self, part: Any, tool: str) -> bool:
        return bool(part.get("type") == "function_call" and part.get("name") == tool)

    def call_ids(self, parts: Sequence[Any]) -> list[str]:
        return [call.id for call in calls_of(parts)]

    def hidden_call(self, call: dict[str, Any], arguments: str, place: int) -> HiddenCall:
        return HiddenCall(str(call.get("call_id") or ""), str(call.get("arguments") or ""), place, encode(call))

    def text(self, answer: Mapping[str, Any], parts: Sequence[Any]) -> str:
        return _text(parts)

    def unit(self, answer: Mapping[str, Any], parts: Sequence[Any]) -> bytes:
        """Return items as a unit. A server that stores nothing refuses reasoning without its encrypted content."""
        stored = answer.get("store") is not False
        kept = [i for i in parts if stored or not is_reasoning(i) or i.get("encrypted_content") or is_readable(i)]
        return joined([encode(item) for item in kept])

    def shown(self, round: WholeRound) -> dict[str, Any]:
        return {**round.answer, **round.response.identity, "output": round.response.parts}

    def identity(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields from the first round. A stored response has the id of the last one."""
        names = ("tool_choice",) if answer.get("store") is not False else ("id", "tool_choice")
        return {name: answer[name] for name in names if name in answer}

    def unlist(self, answer: Any, tool: str) -> bool:
        tools = field_of(answer, "tools")
        if not isinstance(tools, list):
            return False
        kept = [one for one in tools if field_of(one, "name") != tool]
        if len(kept) == len(tools):
            return False
        answer["tools"] = kept
        return True


class _StreamedItem(AnswerPart):
    """An item of a stream. ``done`` is true once it's complete."""

    done = False


class ResponsesRound(StreamedRound):
    """One round of a streamed response."""

    def __init__(self, api: HiddenTool, tool: str, response: VisibleResponse, *, first: bool) -> None:
        super().__init__(api, tool, response, first=first)
        self._items: list[_StreamedItem] = []
        self.parts = self._items
        self._by_place: dict[int | str | None, _StreamedItem] = {}
        """The items by ``output_index`` and by id. Some servers omit the index."""
        self._renumbers = not first

    def is_hidden(self, part: AnswerPart) -> bool:
        return self.api.calls_tool(part.value, self.tool)

    def event(self, value: dict[str, Any] | None, data: bytes, as_it_came: bytes) -> bytes:
        kind = value.get("type") if value is not None else None
        if value is None or not isinstance(kind, str):
            return self.close(as_it_came) if data.strip() == DONE else as_it_came
        if self.api.unlist(value.get("response"), self.tool):
            as_it_came = b""
        if kind in _BEGINS:
            return self._begun(value, as_it_came)
        if kind == "response.output_item.added":
            self._added(value)
        item = self._by_place.get(place_of(value.get("output_index", value.get("item_id"))))
        if item is None:
            return self._ended(kind, value, as_it_came)
        if kind == "response.output_item.done" and isinstance(done := value.get("item"), dict):
            self._done(item, done)
        if item.hidden:
            self._renumbers = True
            return b""
        if self._renumbers and value.get("output_index", item.shown) != item.shown:
            value["output_index"], as_it_came = item.shown, b""
        return self._numbered(value, as_it_came)

    def _begun(self, value: dict[str, Any], as_it_came: bytes) -> bytes:
        response = value.get("response")
        response = response if isinstance(response, dict) else {}
        self.answer = {"store": response.get("store")}
        if self.first:
            self.response.identity = self.api.identity(response)
            return self._numbered(value, as_it_came)
        return b""

    def _added(self, value: dict[str, Any]) -> None:
        begun = value.get("item")
        begun = begun if isinstance(begun, dict) else {}
        hidden = self.api.calls_tool(begun, self.tool)
        item = _StreamedItem(begun, None if hidden else len(self.response.parts), hidden=hidden)
        self._items.append(item)
        places = map(place_of, (value.get("output_index"), begun.get("id")))
        self._by_place.update({place: item for place in places if place is not None})
        if not hidden:
            self.response.parts.append(begun)
            self.response.calls += self.api.call_ids([begun])

    def _done(self, item: _StreamedItem, value: Message) -> None:
        if item.done:
            return
        item.value, item.done = value, True
        if item.shown is not None:
            self.response.parts[item.shown] = value
            self.response.texts.append(_text([value]))

    def _ended(self, kind: str, value: dict[str, Any], as_it_came: bytes) -> bytes:
        """Return an event about the whole response."""
        self.failed = self.failed or kind in _FAILS
        response = value.get("response")
        if kind in _ENDS and isinstance(response, dict):
            usage = response.get("usage")
            self.usage = usage if isinstance(usage, dict) else {}
            output = response.get("output")
            for item, done in zip(self._items, output if isinstance(output, list) else (), strict=False):
                if isinstance(done, dict):
                    self._done(item, done)
            if not self.first or self.hides:
                response.update({"output": self.response.parts, "usage": self.total_usage() or usage})
                response.update(self.response.identity)
                as_it_came = b""
        out = self._numbered(value, as_it_came, held=kind in _ENDS and self.hides)
        return self.close(out) if kind in _ENDS else out

    def _numbered(self, value: dict[str, Any], as_it_came: bytes, *, held: bool = False) -> bytes:
        """Return an event with the client's number."""
        number = value.get("sequence_number")
        if isinstance(number, int):
            if self._renumbers and number != self.response.number + 1:
                number, as_it_came = self.response.number + 1, b""
                value["sequence_number"] = number
            if not held:
                self.response.number = number
        return as_it_came or event_of(encode(value), str(value["type"]))


def tools_of(fields: Mapping[str, msgspec.Raw]) -> list[Any]:
    """Return all tools of a request, and the tools in its items and namespaces."""
    tools = list(tools_in(fields))
    for item in _items(fields) if _TOOLS_ITEM.encode() in bytes(fields.get("input", b"")) else ():
        if _has_tools(item):
            more = value_of(item).get("tools")
            tools += more if isinstance(more, list) else []
    return list(_flat(tools))


def _items(fields: Mapping[str, msgspec.Raw]) -> list[msgspec.Raw]:
    raw = fields.get("input", NOTHING)
    return msgspec.json.decode(raw, type=list[msgspec.Raw]) if bytes(raw).lstrip()[:1] == b"[" else []


def _has_tools(item: bytes) -> bool:
    if _TOOLS_ITEM.encode() not in bytes(item):
        return False
    value = value_of(item)
    return isinstance(value, dict) and value.get("type") == _TOOLS_ITEM


def _end_of_tools(items: Sequence[bytes]) -> int:
    """Return the place behind the first items with tools."""
    end = 0
    for place, item in enumerate(items):
        if _has_tools(item):
            end = place + 1
        elif end:
            break
    return end


def _flat(tools: Sequence[Any]) -> Iterator[Any]:
    for tool in tools:
        if isinstance(tool, dict) and tool.get("type") == "namespace" and isinstance(tool.get("tools"), list):
            yield from tool["tools"]
        else:
            yield tool


def _text(items: Sequence[Message]) -> str:
    return "".join(map(visible, filter(is_message, items)))
