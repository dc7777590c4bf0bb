"""Take the calls of one tool out of chat completions, so that the client never sees them.

A response may take several rounds: the model calls the hidden tool, the proxy answers, and the model goes on. The
client gets one response with the text of all rounds. Text is never held back. A call is held only until its name is
known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from proxy.dialects.chat.message import calls_of
from proxy.dialects.hidden_rounds import (
    StreamedRound,
    add_usage,
    decoded,
    longer,
    place_of,
    readable_tools,
    tools_in,
    with_tool,
    without_tool,
)
from proxy.dialects.hidden_tool import HiddenCall, HiddenRound, VisibleResponse
from proxy.dialects.parts import text_of
from proxy.dialects.request import NOTHING, encoded, fields_of, value_of
from proxy.dialects.unit_json import decode, encode, replace_field
from proxy.errors import BadBody
from proxy.http.sse import encode as event_of

_DONE = b"[DONE]"


class _Call:
    """A call in a stream. ``shown`` is its place among the client's calls once it's known to be one of them."""

    def __init__(self, place: int) -> None:
        self.place = place
        self.entry: dict[str, Any] = {}
        self.name = ""
        self.arguments = ""
        self.hidden = False
        self.shown: int | None = None

    @property
    def id(self) -> str:
        id = self.entry.get("id")
        return id if isinstance(id, str) else ""


class Round(StreamedRound):
    """One round of a streamed response. See ``dialects.hidden_tool.StreamedRound``."""

    own = None

    def __init__(self, tool: str, response: VisibleResponse, *, first: bool) -> None:
        super().__init__(response)
        self._tool = tool
        self._first = first
        self._calls: list[_Call] = []
        self._by_index: dict[Any, _Call] = {}
        self._fields: dict[str, Any] = {"role": "assistant", "content": None}
        self._ended = False

    @property
    def hidden(self) -> list[HiddenCall]:
        """Return the calls of the hidden tool, in order."""
        calls = (call for call in self._calls if call.hidden and not self.failed)
        return [HiddenCall(call.id, call.arguments, call.place, encode(_whole(call))) for call in calls]

    @property
    def visible(self) -> int:
        """Return the number of the client's calls."""
        return sum(not call.hidden for call in self._calls)

    @property
    def unit(self) -> bytes:
        """Return the whole message, with all calls."""
        calls = [_whole(call) for call in self._calls]
        return encode({**self._fields, "tool_calls": calls} if calls else self._fields)

    @property
    def content(self) -> str:
        """Return the text of this round."""
        text = self._fields["content"]
        return text if isinstance(text, str) else ""

    def event(self, value: dict[str, Any] | None, data: bytes, as_it_came: bytes) -> bytes:
        """Return the bytes for the client."""
        choices = value.get("choices") if value is not None else None
        if value is None or not isinstance(choices, list):
            self.failed = self.failed or (value is not None and "error" in value)
            return self._close(as_it_came) if data.strip() == _DONE else as_it_came
        usage = value.get("usage")
        if isinstance(usage, dict):
            self.usage = usage
            if self.response.usage:
                value["usage"], as_it_came = self.total_usage(), b""
        self._identify(value)
        if not self._first:
            value.update(self.response.identity)
            as_it_came = b""
        choice = choices[0] if choices and isinstance(choices[0], dict) else None
        if choice is None:
            return self._close(as_it_came or event_of(encode(value)))
        return self._choice(value, choice, as_it_came)

    def _choice(self, value: dict[str, Any], choice: dict[str, Any], as_it_came: bytes) -> bytes:
        delta = choice.get("delta")
        if not isinstance(delta, dict):
            delta = {}
        if not self._first and delta.pop("role", None) is not None:
            as_it_came = b""
        calls = delta.get("tool_calls")
        changed = self._take_calls(delta, calls) if isinstance(calls, list) else False
        self._collect(delta)
        finished = choice.get("finish_reason") not in (None, "")
        if choice.get("finish_reason") == "tool_calls" and not self._visible_soon():
            choice["finish_reason"], as_it_came = "stop", b""
        if finished and (late := self._undecided()):
            delta["tool_calls"] = [*delta.get("tool_calls", ()), *late]
            changed = True
        if changed:
            as_it_came = b""
            if not delta and not finished and not isinstance(value.get("usage"), dict):
                return b""
        if finished and delta and self._worth_showing(delta):
            # The text of this event isn't held, even if its end is.
            shown = {**value, "choices": [{**choice, "finish_reason": None}]}
            choice["delta"] = {}
            shown.pop("usage", None)
            return event_of(encode(shown)) + self._close(event_of(encode(value)))
        if finished or self._ended:
            return self._close(as_it_came or event_of(encode(value)))
        return as_it_came or event_of(encode(value))

    def _worth_showing(self, delta: Mapping[str, Any]) -> bool:
        return any(content for name, content in delta.items() if name != "role") and any(
            call.hidden for call in self._calls
        )

    def _visible_soon(self) -> bool:
        return any(not call.hidden for call in self._calls) or not self._calls

    def _close(self, event: bytes) -> bytes:
        """Hold an event that ends the response if something is hidden."""
        self._ended = True
        if self._first and not any(call.hidden for call in self._calls):
            return event
        self.closing += event
        return b""

    def _identify(self, value: dict[str, Any]) -> None:
        if not self.response.identity:
            self.response.identity = {name: value[name] for name in ("id", "created", "model") if name in value}

    def _collect(self, delta: Mapping[str, Any]) -> None:
        """Add a delta's fields to the message."""
        for name, value in delta.items():
            if name in ("role", "tool_calls") or value is None:
                continue
            known = self._fields.get(name)
            if isinstance(value, str):
                self._fields[name] = (known if isinstance(known, str) else "") + value
                if name == "content" and value:
                    self.response.texts.append(value)
            elif isinstance(value, list) and isinstance(known, list):
                self._fields[name] = [*known, *value]
            else:
                self._fields[name] = value

    def _take_calls(self, delta: dict[str, Any], entries: list[Any]) -> bool:
        """Remove entries of hidden and undecided calls from a delta, and renumber the others. Return the changes."""
        shown: list[Any] = []
        for entry in entries:
            if isinstance(entry, dict):
                shown += self._entry(entry)
            else:
                shown.append(entry)
        if shown == entries:
            return False
        if shown:
            delta["tool_calls"] = shown
        else:
            del delta["tool_calls"]
        return True

    def _entry(self, entry: dict[str, Any]) -> list[dict[str, Any]]:
        call = self._call_of(entry)
        function = entry.get("function")
        function = function if isinstance(function, dict) else {}
        name, arguments = function.get("name"), function.get("arguments")
        if isinstance(name, str) and not (call.hidden and name == self._tool):
            call.name += name
        if isinstance(arguments, str):
            call.arguments += arguments
        _merge(call.entry, entry)
        if call.hidden:
            return []
        if call.shown is not None:
            return [entry] if entry.get("index", call.shown) == call.shown else [{**entry, "index": call.shown}]
        if call.name == self._tool:
            call.hidden = True
            return []
        if not call.arguments and self._tool.startswith(call.name):
            return []
        return [self._reveal(call)]

    def _reveal(self, call: _Call) -> dict[str, Any]:
        """Return all that came of a call that is the client's."""
        call.shown = len(self.response.calls)
        self.response.calls.append(call.id)
        function = {**call.entry.get("function", {}), "name": call.name, "arguments": call.arguments}
        return {**call.entry, "index": call.shown, "function": function}

    def _undecided(self) -> list[dict[str, Any]]:
        """Reveal the calls whose names were never completed."""
        return [self._reveal(call) for call in self._calls if not call.hidden and call.shown is None]

    def _call_of(self, entry: dict[str, Any]) -> _Call:
        index, id = entry.get("index"), entry.get("id")
        if not isinstance(index, int):
            # Some servers send no index: a new id begins a call.
            last = self._calls[-1] if self._calls else None
            if last is not None and (not id or last.entry.get("id") == id):
                return last
            index = ("id", place_of(id))
        call = self._by_index.get(index)
        # Some servers number all calls 0, so another id begins a call, too.
        if call is None or (id and call.id and id != call.id):
            call = self._by_index[index] = _Call(len(self._calls))
            self._calls.append(call)
        return call


class WholeRound:
    """A response that isn't streamed."""

    changed = False
    own = None

    def __init__(self, tool: str, body: bytes, response: VisibleResponse) -> None:
        value = decoded(body)
        self._value = value if value is not None else {}
        self._response = response
        choices = self._value.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        message = choice.get("message")
        self._choice = choice
        self._message: dict[str, Any] = message if isinstance(message, dict) else {}
        calls = self._message.get("tool_calls")
        self._calls = [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
        self.hidden = [
            HiddenCall(str(call.get("id") or ""), _arguments(call), place, encode(call))
            for place, call in enumerate(self._calls)
            if _name(call) == tool
        ]
        places = {call.place for call in self.hidden}
        self._shown = [call for place, call in enumerate(self._calls) if place not in places]
        self.visible = len(self._shown)
        response.calls = [str(call.get("id") or "") for call in self._shown]
        text = self._message.get("content")
        self.content = text if isinstance(text, str) else ""
        if self.content:
            response.texts.append(self.content if not response.texts else f"\n\n{self.content}")
        if isinstance(usage := self._value.get("usage"), dict):
            add_usage(response.usage, usage)

    @property
    def unit(self) -> bytes:
        """Return the whole message, with all calls."""
        return encode(self._message)

    def body(self) -> bytes:
        """Return the body for the client, with the texts and the usage of all rounds."""
        shown = self._shown
        message = {**self._message, "content": self._response.text or self._message.get("content")}
        if shown:
            message["tool_calls"] = shown
        else:
            message.pop("tool_calls", None)
        reason = self._choice.get("finish_reason")
        if reason == "tool_calls" and not shown:
            reason = "stop"
        value = {**self._value, "choices": [{**self._choice, "message": message, "finish_reason": reason}]}
        if self._response.usage:
            value["usage"] = self._response.usage
        return encode(value)


def _whole(call: _Call) -> dict[str, Any]:
    function = {**call.entry.get("function", {}), "name": call.name, "arguments": call.arguments}
    fields = {name: value for name, value in call.entry.items() if name != "index"}
    return {"type": "function", **fields, "function": function}


def _merge(known: dict[str, Any], entry: Mapping[str, Any]) -> None:
    """Keep the first value of each field of a call. The name and the arguments are collected apart."""
    for name, value in entry.items():
        if name == "function" and isinstance(value, dict):
            _merge(known.setdefault("function", {}), value)
        elif value is not None:
            known.setdefault(name, value)


def _name(call: Mapping[str, Any]) -> str | None:
    function = call.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _arguments(call: Mapping[str, Any]) -> str:
    arguments = call["function"].get("arguments")
    return arguments if isinstance(arguments, str) else encode(arguments).decode()


class HiddenTool:
    """How to hide a tool in chat completions. See ``dialects.dialect.HiddenTool``."""

    def accepts(self, raw: bytes, name: str) -> bool:
        """Return whether a request lets its model choose among tools, and has none of this name."""
        try:
            fields = fields_of(raw)
        except BadBody:
            return False
        if "functions" in fields or value_of(fields.get("n", NOTHING)) not in (None, 1):
            return False
        if value_of(fields.get("tool_choice", NOTHING)) not in (None, "auto"):
            return False
        names = _names(tools_in(fields))
        return bool(names) and name not in names

    def tool_names(self, raw: bytes) -> list[str]:
        """Return the names of a request's tools, as far as it can be read."""
        return _names(readable_tools(raw))

    def definition(self, raw: bytes, name: str, description: str, parameters: Mapping[str, Any]) -> bytes:
        """Return the tool's JSON. It's strict if all tools of the request are, because some servers demand that."""
        tools = value_of(fields_of(raw)["tools"])
        strict = all(isinstance(tool, dict) and _function(tool).get("strict") is True for tool in tools)
        function: dict[str, Any] = {"name": name, "description": description, "parameters": dict(parameters)}
        return encode({"type": "function", "function": {**function, "strict": True} if strict else function})

    def with_tool(self, raw: bytes, tool: bytes) -> bytes:
        """Return the body with one more tool, the last one."""
        return with_tool(raw, tool)

    def without_tool(self, sent: bytes) -> bytes:
        """Return a body without its last tool."""
        return without_tool(sent)

    def continued(self, sent: bytes, units: Sequence[bytes], *, last: bool) -> bytes:
        """Return a body with further messages. With ``last``, the model may not call tools."""
        fields = fields_of(sent)
        fields["messages"] = longer(fields["messages"], units)
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
        """Return the message that answers a call."""
        return encode({"role": "tool", "tool_call_id": id, "content": text})

    def visible(self, raw: bytes) -> tuple[str, list[str]] | None:
        """Return the text and the ids of the calls in an assistant's message; ``None`` for other messages."""
        message = decode(raw)
        if message.get("role") != "assistant":
            return None
        return text_of(message), [call.id for call in calls_of(message)]

    def restored(self, raw: bytes, round: HiddenRound) -> bytes:
        """Return the client's message with the text of the last round, and with the hidden calls."""
        if round.own_text is not None:
            raw = replace_field(raw, "content", round.own_text or None)
        if round.hidden_calls:
            known = decode(raw).get("tool_calls")
            entries = list(known) if isinstance(known, list) else []
            for place, call in round.hidden_calls:
                entries.insert(place, decode(call))
            raw = replace_field(raw, "tool_calls", entries)
        return raw


def _function(tool: Any) -> Mapping[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    return function if isinstance(function, dict) else {}


def _names(tools: Sequence[Any]) -> list[str]:
    return [str(_function(tool).get("name") or "") for tool in tools]
