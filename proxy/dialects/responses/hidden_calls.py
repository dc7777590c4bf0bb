"""Take the calls of one tool out of responses of the Responses API, so that the client never sees them.

An item's first event names its tool, so no event waits for another one. See ``dialects.chat.hidden_calls``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from proxy.dialects.hidden_rounds import StreamedRound, add_usage, decoded, longer, place_of
from proxy.dialects.hidden_tool import HiddenCall, HiddenRound, VisibleResponse
from proxy.dialects.parts import text_of
from proxy.dialects.request import NOTHING, encoded, fields_of, listed, value_of
from proxy.dialects.responses.items import (
    calls_of,
    is_client_call,
    is_message,
    is_reasoning,
    items_of,
    joined,
    kind_of,
    raws_of,
    with_content,
)
from proxy.dialects.responses.tools import tools_of, with_tool, without_tool
from proxy.dialects.unit_json import Message, encode
from proxy.errors import BadBody
from proxy.http.sse import encode as event_of

_BEGINS = frozenset({"response.created", "response.queued", "response.in_progress"})
_ENDS = frozenset({"response.completed", "response.incomplete"})
_FAILS = frozenset({"response.failed", "error"})
_RULED_OUT = ("previous_response_id", "conversation", "max_tool_calls", "background")


class _Streamed:
    """An item of a stream. ``shown`` is its place among the client's items, ``None`` if it's hidden."""

    def __init__(self, item: Message, shown: int | None) -> None:
        self.item = item
        self.shown = shown
        self.done = False


class Round(StreamedRound):
    """One round of a streamed response. See ``dialects.hidden_tool.StreamedRound``."""

    def __init__(self, tool: str, response: VisibleResponse, *, first: bool) -> None:
        super().__init__(response)
        self._tool = tool
        self._first = first
        self._items: list[_Streamed] = []
        self._by_place: dict[int | str | None, _Streamed] = {}
        """The items by ``output_index`` and by id. Some servers omit the index."""
        self._renumbers = not first
        self._stored = True

    @property
    def hidden(self) -> list[HiddenCall]:
        """Return the calls of the hidden tool, in order."""
        return [] if self.failed else _hidden(self._whole, self._tool)

    @property
    def visible(self) -> int:
        """Return the number of the client's calls."""
        return sum(is_client_call(one.item) and one.shown is not None for one in self._items)

    @property
    def unit(self) -> bytes:
        """Return all items of the round."""
        return _unit(self._whole, stored=self._stored)

    @property
    def own(self) -> bytes:
        """Return all items of the round. The client's unit has those of all rounds."""
        return self.unit

    @property
    def content(self) -> str:
        """Return the text of this round."""
        return _text(self._whole)

    @property
    def _whole(self) -> list[Message]:
        return [streamed.item for streamed in self._items]

    def event(self, value: dict[str, Any] | None, data: bytes, as_it_came: bytes) -> bytes:
        """Return the bytes for the client."""
        kind = value.get("type") if value is not None else None
        if value is None or not isinstance(kind, str):
            return self._held(as_it_came) if data.strip() == b"[DONE]" else as_it_came
        if _unlisted(value.get("response"), self._tool):
            as_it_came = b""
        if kind in _BEGINS:
            return self._begun(value, as_it_came)
        if kind == "response.output_item.added":
            self._added(value)
        streamed = self._by_place.get(place_of(value.get("output_index", value.get("item_id"))))
        if streamed is None:
            return self._ended(kind, value, as_it_came)
        if kind == "response.output_item.done" and isinstance(item := value.get("item"), dict):
            self._done(streamed, item)
        if streamed.shown is None:
            self._renumbers = True
            return b""
        if self._renumbers and value.get("output_index", streamed.shown) != streamed.shown:
            value["output_index"], as_it_came = streamed.shown, b""
        return self._numbered(value, as_it_came)

    def _begun(self, value: dict[str, Any], as_it_came: bytes) -> bytes:
        response = value.get("response")
        response = response if isinstance(response, dict) else {}
        self._stored = response.get("store") is not False
        if self._first:
            self.response.identity = _identity(response)
            return self._numbered(value, as_it_came)
        return b""

    def _added(self, value: dict[str, Any]) -> None:
        item = value.get("item")
        item = item if isinstance(item, dict) else {}
        hidden = item.get("type") == "function_call" and item.get("name") == self._tool
        streamed = _Streamed(item, None if hidden else len(self.response.parts))
        self._items.append(streamed)
        places = map(place_of, (value.get("output_index"), item.get("id")))
        self._by_place.update({place: streamed for place in places if place is not None})
        if not hidden:
            self.response.parts.append(item)
            self.response.calls += [call.id for call in calls_of([item])]

    def _done(self, streamed: _Streamed, item: Message) -> None:
        if streamed.done:
            return
        streamed.item, streamed.done = item, True
        if streamed.shown is not None:
            self.response.parts[streamed.shown] = item
            self.response.texts.append(_text([item]))

    def _ended(self, kind: str, value: dict[str, Any], as_it_came: bytes) -> bytes:
        """Return an event about the whole response."""
        self.failed = self.failed or kind in _FAILS
        response = value.get("response")
        if kind in _ENDS and isinstance(response, dict):
            usage = response.get("usage")
            self.usage = usage if isinstance(usage, dict) else {}
            output = response.get("output")
            for streamed, item in zip(self._items, output if isinstance(output, list) else (), strict=False):
                if isinstance(item, dict):
                    self._done(streamed, item)
            if not self._first or self._hides:
                response.update({"output": self.response.parts, "usage": self.total_usage() or usage})
                response.update(self.response.identity)
                as_it_came = b""
        out = self._numbered(value, as_it_came, held=kind in _ENDS and self._hides)
        return self._held(out) if kind in _ENDS else out

    @property
    def _hides(self) -> bool:
        return any(streamed.shown is None for streamed in self._items)

    def _held(self, event: bytes) -> bytes:
        """Hold an event that ends the response if something is hidden."""
        if self._first and not self._hides:
            return event
        self.closing += event
        return b""

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


class WholeRound:
    """A response that isn't streamed."""

    def __init__(self, tool: str, body: bytes, response: VisibleResponse) -> None:
        self._value = decoded(body) or {}
        self._response = response
        output = self._value.get("output")
        self._items = [item for item in output if isinstance(item, dict)] if isinstance(output, list) else []
        self.hidden = _hidden(self._items, tool)
        shown = [item for item in self._items if not _is_call(item, tool)]
        calls = calls_of(list(filter(is_client_call, shown)))
        self.visible = len(calls)
        response.calls = [call.id for call in calls]
        response.parts += shown
        response.texts.append(_text(shown))
        response.identity = response.identity or _identity(self._value)
        if isinstance(usage := self._value.get("usage"), dict):
            add_usage(response.usage, usage)
        self.changed = _unlisted(self._value, tool)

    @property
    def unit(self) -> bytes:
        """Return all items of the round."""
        return _unit(self._items, stored=self._value.get("store") is not False)

    @property
    def own(self) -> bytes:
        """Return all items of the round. The client's unit has those of all rounds."""
        return self.unit

    @property
    def content(self) -> str:
        """Return the text of this round."""
        return _text(self._items)

    def body(self) -> bytes:
        """Return the body for the client, with the items and the usage of all rounds."""
        value = {**self._value, **self._response.identity, "output": self._response.parts}
        if self._response.usage:
            value["usage"] = self._response.usage
        return encode(value)


class HiddenTool:
    """How to hide a tool in the Responses API. See ``dialects.dialect.HiddenTool``."""

    def accepts(self, raw: bytes, name: str) -> bool:
        """Return whether a request lets its model choose among tools, and has none of this name.

        The server may not keep the conversation, nor count the calls.
        """
        try:
            fields = fields_of(raw)
        except BadBody:
            return False
        if any(value_of(fields.get(field, NOTHING)) for field in _RULED_OUT):
            return False
        if value_of(fields.get("tool_choice", NOTHING)) not in (None, "auto"):
            return False
        names = self.tool_names(raw)
        return bool(names) and name not in names

    def tool_names(self, raw: bytes) -> list[str]:
        """Return the names of a request's tools, as far as it can be read."""
        try:
            tools = tools_of(raw)
        except BadBody:
            return []
        return [str(_field(tool, "name") or "") for tool in tools]

    def definition(self, raw: bytes, name: str, description: str, parameters: Mapping[str, Any]) -> bytes:
        """Return the tool's JSON. It's strict, as functions are by default, unless one of the client's isn't."""
        strict = not any(_field(tool, "strict") is False for tool in tools_of(raw))
        tool = {"type": "function", "name": name, "description": description, "parameters": dict(parameters)}
        return encode({**tool, "strict": strict})

    def with_tool(self, raw: bytes, tool: bytes) -> bytes:
        """Return the body with one more tool, the last one of its list or items."""
        return with_tool(raw, tool)

    def without_tool(self, sent: bytes) -> bytes:
        """Return a body without the added tool."""
        return without_tool(sent)

    def continued(self, sent: bytes, units: Sequence[bytes], *, last: bool) -> bytes:
        """Return a body with further items. With ``last``, the model may not call tools."""
        fields = fields_of(sent)
        items = [item for unit in units for item in raws_of(unit)]
        before = bytes(fields["input"])
        if before.startswith(b'"'):
            before = bytes(listed([encode({"role": "user", "content": msgspec.json.decode(before)})]))
        fields["input"] = longer(before, items)
        if last:
            fields["tool_choice"] = encoded("none")
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
        """Return the item that answers a call."""
        return encode({"type": "function_call_output", "call_id": id, "output": text})

    def visible(self, raw: bytes) -> tuple[str, list[str]] | None:
        """Return the text and the ids of the calls in a run of the assistant's items; ``None`` for other units."""
        items = items_of(raw)
        if not items or kind_of(items[0]) != "assistant":
            return None
        return _text(items), [call.id for call in calls_of(items)]

    def restored(self, raw: bytes, round: HiddenRound) -> bytes:
        """Return the items of the last round as the upstream sent them."""
        return raw if round.own is None else round.own


def _identity(response: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that the client's response has from the first round. A stored one has the id of the last."""
    names = ("tool_choice",) if response.get("store") is not False else ("id", "tool_choice")
    return {name: response[name] for name in names if name in response}


def _unlisted(response: Any, tool: str) -> bool:
    """Remove a tool from the request's fields that a response repeats. Return whether it was there."""
    tools = _field(response, "tools")
    if not isinstance(tools, list):
        return False
    kept = [one for one in tools if _field(one, "name") != tool]
    if len(kept) == len(tools):
        return False
    response["tools"] = kept
    return True


def _is_call(item: Message, tool: str) -> bool:
    return item.get("type") == "function_call" and item.get("name") == tool


def _hidden(items: Sequence[Message], tool: str) -> list[HiddenCall]:
    """Return the calls of a tool."""
    calls = [item for item in items if is_client_call(item)]
    return [
        HiddenCall(str(item.get("call_id") or ""), str(item.get("arguments") or ""), place, encode(item))
        for place, item in enumerate(calls)
        if _is_call(item, tool)
    ]


def _unit(items: Sequence[Message], *, stored: bool) -> bytes:
    """Return items as a unit. A server that stores nothing refuses reasoning without its encrypted content."""
    kept = [item for item in items if stored or not is_reasoning(item) or item.get("encrypted_content")]
    return joined([encode(item) for item in kept])


def _text(items: Sequence[Message]) -> str:
    return "".join(text_of(with_content(item)) for item in items if is_message(item))


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None
