"""Take the calls of one tool out of chat completions, so that the client never sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from proxy.dialects.chat.units import calls_of
from proxy.dialects.parts import CHAT
from proxy.dialects.request import NOTHING, fields_of, value_of
from proxy.dialects.rounds import (
    DONE,
    AnswerPart,
    HiddenCall,
    HiddenRound,
    HiddenTool,
    StreamedRound,
    VisibleResponse,
    WholeRound,
    field_of,
    longer,
    place_of,
)
from proxy.dialects.units import content_text, decode, encode, replace_field, string
from proxy.http.sse import encode as event_of


class ChatTool(HiddenTool):
    """See ``dialects.rounds.HiddenTool``. The parts of an answer are its calls."""

    RESTORES = True
    SEPARATOR = "\n\n"

    def allows_choice(self, fields: Mapping[str, msgspec.Raw]) -> bool:
        if "functions" in fields or value_of(fields.get("n", NOTHING)) not in (None, 1):
            return False
        return value_of(fields.get("tool_choice", NOTHING)) in (None, "auto")

    def tool_name(self, tool: Any) -> Any:
        return field_of(field_of(tool, "function"), "name")

    def definition(self, raw: bytes, name: str, description: str, parameters: Mapping[str, Any]) -> bytes:
        """Return the tool's JSON. It's strict if all tools of the request are, because some servers demand that."""
        tools = value_of(fields_of(raw)["tools"])
        strict = all(field_of(field_of(tool, "function"), "strict") is True for tool in tools)
        function: dict[str, Any] = {"name": name, "description": description, "parameters": dict(parameters)}
        return encode({"type": "function", "function": {**function, "strict": True} if strict else function})

    def lengthened(self, conversation: bytes, units: Sequence[bytes]) -> msgspec.Raw:
        return longer(conversation, units)

    def result(self, id: str, text: str) -> bytes:
        return encode({"role": "tool", "tool_call_id": id, "content": text})

    def visible(self, raw: bytes) -> tuple[str, list[str]] | None:
        message = decode(raw)
        if message.get("role") != "assistant":
            return None
        return content_text(message.get("content"), CHAT), [call.id for call in calls_of(message)]

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

    def round(self, name: str, response: VisibleResponse, *, first: bool) -> StreamedRound:
        return ChatRound(self, name, response, first=first)

    def parts(self, answer: dict[str, Any]) -> list[Any]:
        calls = _message(answer).get("tool_calls")
        return [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []

    def is_call(self, part: Any) -> bool:
        return True

    def calls_tool(self, part: Any, tool: str) -> bool:
        return bool(field_of(part.get("function"), "name") == tool)

    def call_ids(self, parts: Sequence[Any]) -> list[str]:
        return [string(call.get("id")) for call in parts]

    def hidden_call(self, call: dict[str, Any], arguments: str, place: int) -> HiddenCall:
        given = call["function"].get("arguments")
        arguments = given if isinstance(given, str) else encode(given).decode()
        return HiddenCall(str(call.get("id") or ""), arguments, place, encode(call))

    def text(self, answer: Mapping[str, Any], parts: Sequence[Any]) -> str:
        return string(_message(answer).get("content"))

    def unit(self, answer: Mapping[str, Any], parts: Sequence[Any]) -> bytes:
        message = _message(answer)
        return encode({**message, "tool_calls": parts} if parts else message)

    def shown(self, round: WholeRound) -> dict[str, Any]:
        choice = _choice(round.answer)
        message = _message(round.answer)
        message = {**message, "content": round.response.text or message.get("content")}
        if round.calls:
            message["tool_calls"] = round.calls
        else:
            message.pop("tool_calls", None)
        reason = choice.get("finish_reason")
        if reason == "tool_calls" and not round.calls:
            reason = "stop"
        return {**round.answer, "choices": [{**choice, "message": message, "finish_reason": reason}]}


class _StreamedCall(AnswerPart):
    """A call in a stream. ``value`` are its first fields. It's the client's if ``shown`` is a place."""

    def __init__(self) -> None:
        super().__init__({})
        self.name = ""

    @property
    def id(self) -> str:
        return string(self.value.get("id"))

    def add(self, entry: Mapping[str, Any], tool: str) -> None:
        """Add what an event has of the call."""
        function = entry.get("function")
        name, arguments = field_of(function, "name"), field_of(function, "arguments")
        if isinstance(name, str) and not (self.hidden and name == tool):
            self.name += name
        if isinstance(arguments, str):
            self.arguments += arguments
        _merge(self.value, entry)

    def whole(self) -> dict[str, Any]:
        fields = {name: value for name, value in self.value.items() if name != "index"}
        return {"type": "function", **fields, "function": self.function()}

    def function(self) -> dict[str, Any]:
        return {**self.value.get("function", {}), "name": self.name, "arguments": self.arguments}


class ChatRound(StreamedRound):
    """One round of a streamed response. Whether a call is hidden is known once its name is complete."""

    def __init__(self, api: HiddenTool, tool: str, response: VisibleResponse, *, first: bool) -> None:
        super().__init__(api, tool, response, first=first)
        self._calls: list[_StreamedCall] = []
        self.parts = self._calls
        self._by_index: dict[Any, _StreamedCall] = {}
        self._fields: dict[str, Any] = {"role": "assistant", "content": None}
        self.answer = {"choices": [{"message": self._fields}]}
        self._ended = False

    def event(self, value: dict[str, Any] | None, data: bytes, as_it_came: bytes) -> bytes:
        choices = value.get("choices") if value is not None else None
        if value is None or not isinstance(choices, list):
            self.failed = self.failed or (value is not None and "error" in value)
            return self.close(as_it_came) if data.strip() == DONE else as_it_came
        usage = value.get("usage")
        if isinstance(usage, dict):
            self.usage = usage
            if self.response.usage:
                value["usage"], as_it_came = self.total_usage(), b""
        if not self.response.identity:
            self.response.identity = {name: value[name] for name in ("id", "created", "model") if name in value}
        if not self.first:
            value.update(self.response.identity)
            as_it_came = b""
        choice = choices[0] if choices and isinstance(choices[0], dict) else None
        if choice is None:
            return self.close(as_it_came or event_of(encode(value)))
        return self._choice(value, choice, as_it_came)

    def close(self, event: bytes) -> bytes:
        self._ended = True
        return super().close(event)

    def _choice(self, value: dict[str, Any], choice: dict[str, Any], as_it_came: bytes) -> bytes:
        delta = choice.get("delta")
        if not isinstance(delta, dict):
            delta = {}
        if not self.first and delta.pop("role", None) is not None:
            as_it_came = b""
        calls = delta.get("tool_calls")
        changed = self._take_calls(delta, calls) if isinstance(calls, list) else False
        self._collect(delta)
        finished = choice.get("finish_reason") not in (None, "")
        if choice.get("finish_reason") == "tool_calls" and self._calls and all(call.hidden for call in self._calls):
            choice["finish_reason"], as_it_came = "stop", b""
        if finished and (late := self._undecided()):
            delta["tool_calls"] = [*delta.get("tool_calls", ()), *late]
            changed = True
        if changed:
            as_it_came = b""
            if not delta and not finished and not isinstance(value.get("usage"), dict):
                return b""
        if finished and delta and self.hides and any(content for name, content in delta.items() if name != "role"):
            # The text of this event isn't held, even if its end is.
            shown = {**value, "choices": [{**choice, "finish_reason": None}]}
            choice["delta"] = {}
            shown.pop("usage", None)
            return event_of(encode(shown)) + self.close(event_of(encode(value)))
        if finished or self._ended:
            return self.close(as_it_came or event_of(encode(value)))
        return as_it_came or event_of(encode(value))

    def _collect(self, delta: Mapping[str, Any]) -> None:
        """Add a delta's fields to the message."""
        for name, value in delta.items():
            if name in ("role", "tool_calls") or value is None:
                continue
            before = self._fields.get(name)
            if isinstance(value, str):
                self._fields[name] = (before if isinstance(before, str) else "") + value
                if name == "content" and value:
                    self.response.texts.append(value)
            elif isinstance(value, list) and isinstance(before, list):
                self._fields[name] = [*before, *value]
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
        call.add(entry, self.tool)
        if call.hidden:
            return []
        if call.shown is not None:
            return [entry] if entry.get("index", call.shown) == call.shown else [{**entry, "index": call.shown}]
        if call.name == self.tool:
            call.hidden = True
            return []
        if not call.arguments and self.tool.startswith(call.name):
            return []
        return [self._reveal(call)]

    def _reveal(self, call: _StreamedCall) -> dict[str, Any]:
        """Return all that came of a call that is the client's."""
        call.shown = len(self.response.calls)
        self.response.calls.append(call.id)
        return {**call.value, "index": call.shown, "function": call.function()}

    def _undecided(self) -> list[dict[str, Any]]:
        """Reveal the calls whose names were never completed."""
        return [self._reveal(call) for call in self._calls if not call.hidden and call.shown is None]

    def _call_of(self, entry: dict[str, Any]) -> _StreamedCall:
        index, id = entry.get("index"), entry.get("id")
        if not isinstance(index, int):
            # Some servers send no index: a new id begins a call.
            last = self._calls[-1] if self._calls else None
            if last is not None and (not id or last.value.get("id") == id):
                return last
            index = ("id", place_of(id))
        call = self._by_index.get(index)
        # Some servers number all calls 0, so another id begins a call, too.
        if call is None or (id and call.id and id != call.id):
            call = self._by_index[index] = _StreamedCall()
            self._calls.append(call)
        return call


def _choice(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first choice of an answer; empty if there is none."""
    choices = answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    return choice if isinstance(choice, dict) else {}


def _message(answer: Mapping[str, Any]) -> dict[str, Any]:
    message = _choice(answer).get("message")
    return message if isinstance(message, dict) else {}


def _merge(fields: dict[str, Any], entry: Mapping[str, Any]) -> None:
    """Keep the first value of each field of a call. The name and the arguments are collected apart."""
    for name, value in entry.items():
        if name == "function":
            if isinstance(value, dict):
                _merge(fields.setdefault("function", {}), value)
        elif value is not None:
            fields.setdefault(name, value)
