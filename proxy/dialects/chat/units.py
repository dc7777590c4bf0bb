"""Read, count, and rewrite chat messages.

A message is the JSON object of OpenAI's chat completions. Clients may send any JSON value, so every function here
accepts any value and treats unknown shapes as empty.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from sys import intern
from typing import Any

from proxy.compaction.effects import note_key
from proxy.compaction.format import ForeignSummary, Rewrite, TextCounter
from proxy.compaction.turn import NO_LINKS, Call, Effect, Facts, Kind, Links, OutgoingMessage, Turn
from proxy.dialects.chat.alternation import alternating
from proxy.dialects.messages.units import MessagesUnits
from proxy.dialects.parts import CHAT
from proxy.dialects.repair import CallKey
from proxy.dialects.units import (
    Message,
    MessageUnits,
    argument_text,
    content_text,
    decode,
    encode,
    own_text,
    parts_of,
    replace_field,
    string,
    summary_in,
    type_of,
)
from proxy.dialects.walk import is_noted, linked, links_in, notes_of, part_text

KINDS: dict[str, Kind] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "result",
    "function": "result",
}
ID_FIELDS = {"tool": "tool_call_id", "function": "name"}
"""The field with the call's id, by the role of the result. The legacy ``function`` role uses the function's name."""

_UNNAMED = re.compile(r"[^\w .@-]")  # characters that the names of participants don't have
_SEALED = ("reasoning_details", "thinking_blocks")  # fields of a message that carry signed reasoning

_SEAL = "thought_signature"
_UNCHECKED = "skip_thought_signature_validator"
"""Google's value for the signature of a call whose prompt isn't the one that it was made for. A call can't lack one."""

_INSTEAD_OF_CONTENT = ("tool_calls", "function_call", "refusal", "audio")

MessageCounter = Callable[[Message], int]  # count the tokens of a whole message, including its framing


class ChatUnits(MessageUnits):
    """See ``dialects.units.Units``. A unit is a message, and the kind of a result is its role.

    ``parallel`` counts the result of one of several calls, if that differs from ``message``.
    """

    TABLE = CHAT
    RESULT_KINDS = tuple(ID_FIELDS)
    LAST_RESULTS = "function"
    COUNTS_WIDE = True

    def __init__(self, message: MessageCounter, text: TextCounter, parallel: MessageCounter | None = None) -> None:
        super().__init__(message, text)
        self._parallel = parallel or message
        self._blocks = MessagesUnits(message, text, "")

    def kind(self, unit: Message) -> Kind:
        role = string(unit.get("role"))
        if role != "user":
            return KINDS.get(role, "")
        if type_of(next(iter(parts_of(unit)), None)) == "tool_result":
            return "result"
        return "" if is_noted(unit.get("content"), CHAT) else "user"

    def calls(self, unit: Message) -> tuple[Call, ...]:
        return self._blocks.calls(unit) if in_blocks(unit) else calls_of(unit)

    def links(self, unit: Message) -> Links:
        kind = KINDS.get(string(unit.get("role")), "")
        return linked(links_in(unit, CHAT, whole=not kind)) if kind in ("assistant", "") else NO_LINKS

    def answered(self, unit: Message, kind: Kind) -> str | None:
        if in_blocks(unit):
            return self._blocks.answered(unit, kind)
        answered = unit.get("name" if unit.get("role") == "function" else "tool_call_id")
        return answered if isinstance(answered, str) else None

    def visible_text(self, unit: Message) -> str:
        return text_of(unit) if "role" in unit else part_text(unit, CHAT)

    def effects(self, unit: Message) -> tuple[Effect, ...]:
        return tuple([(note_key(note),) for note in _notes_of(unit)])

    def in_effect(self, raw: bytes) -> list[bytes]:
        unit = decode(raw)
        return [encode({**unit, "content": note}) for note in _notes_of(unit)]

    def single_calls(self, raw: bytes) -> dict[str, bytes]:
        unit = decode(raw)
        kept = _unsealed({name: value for name, value in unit.items() if name not in _SEALED})
        calls = [call for call in _list(kept.get("tool_calls")) if isinstance(call, dict)]
        return {string(call.get("id")): encode({**kept, "content": "", "tool_calls": [call]}) for call in calls}

    def is_empty(self, unit: Message) -> bool:
        return unit.get("content") in (None, "", []) and not any(unit.get(key) for key in _INSTEAD_OF_CONTENT)

    def result_content(self, unit: Message) -> object:
        return self._blocks.result_content(unit) if in_blocks(unit) else unit.get("content")

    def summary_in(self, unit: Message) -> ForeignSummary | None:
        return summary_in(unit)

    def own_texts(self, unit: Message) -> list[tuple[str, str]]:
        return [own_text(unit.get("content"), CHAT)]

    def speaker(self, raw: bytes) -> str:
        message = decode(raw)
        name = message.get("name") if KINDS.get(str(message.get("role"))) != "result" else None
        return " ".join(_UNNAMED.sub(" ", name).split())[:64] if isinstance(name, str) else ""

    def without_reasoning(self, raw: bytes) -> bytes:
        message = decode(raw)
        kept = _unsealed({name: value for name, value in message.items() if name not in _SEALED})
        if kept == message:
            return raw
        return b"" if self.is_empty(kept) else encode(kept)

    def without_media(self, raw: bytes) -> bytes:
        return encode(self.bare(decode(raw)))

    def inner_tokens(self, facts: Facts) -> TextCounter:
        count = self._counter(facts)
        bare = count({"content": ""})
        return lambda text: count({"content": text}) - bare

    def arguments(self, raw: bytes) -> list[tuple[str, str]]:
        message = decode(raw)
        return self._blocks.arguments(raw) if in_blocks(message) else arguments_of(message)

    def with_result(self, raw: bytes, text: str) -> bytes:
        if in_blocks(message := decode(raw)):
            return self._blocks.with_result(raw, text)
        listed = isinstance(message.get("content"), list)
        return replace_field(raw, "content", [{"type": "text", "text": text}] if listed else text)

    def with_arguments(self, raw: bytes, rewrite: Rewrite) -> bytes:
        message = decode(raw)
        if in_blocks(message):
            return self._blocks.with_arguments(raw, rewrite)
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            changed = [_rewritten_call(call, "function", rewrite) for call in calls]
            if changed != calls:
                raw = replace_field(raw, "tool_calls", changed)
        legacy = _rewritten_call(message, "function_call", rewrite)
        if legacy is not message and isinstance(legacy, dict):
            raw = replace_field(raw, "function_call", legacy["function_call"])
        return raw

    def summary(self, role: str, text: str) -> bytes:
        return encode({"role": role, "content": text})

    def alternating(self, pieces: Sequence[OutgoingMessage]) -> list[OutgoingMessage]:
        return alternating(pieces, self)

    def call_keys(self, turn: Turn) -> list[CallKey]:
        calls = turn.facts.calls
        keys = [("tool", call.id) for call in calls]
        last = calls[-1]
        # Usually only a legacy call has its name as its id, so most messages aren't decoded.
        if last == Call(last.name, last.name) and isinstance(decode(turn.raw).get("function_call"), dict):
            keys[-1] = ("function", last.id)
        return keys

    def result_key(self, turn: Turn) -> CallKey:
        return "function" if turn.facts.role == "function" else "tool", turn.facts.answers or ""

    def result(self, kind: str, id: str, text: str, of: bytes = b"") -> bytes:
        if in_blocks(decode(of)):
            return self._blocks.result(kind, id, text)
        return encode({"role": kind, ID_FIELDS[kind]: id, "content": text})

    def answering(self, raw: bytes, kind: str, id: str) -> bytes:
        if in_blocks(decode(raw)):
            return self._blocks.answering(raw, kind, id)
        return replace_field(raw, ID_FIELDS[kind], id)

    def note(self, text: str) -> bytes:
        return encode({"role": "assistant", "content": text})

    def without_calls(self, raw: bytes) -> bytes:
        if in_blocks(decode(raw)):
            return self._blocks.without_calls(raw)
        for key in ("tool_calls", "function_call"):
            if decode(raw).get(key) is not None:
                raw = replace_field(raw, key, None)
        return raw

    def with_call_ids(self, raw: bytes, ids: Sequence[str]) -> bytes:
        if in_blocks(message := decode(raw)):
            return self._blocks.with_call_ids(raw, ids)
        left = iter(ids)
        calls = message["tool_calls"]
        fixed = [{**call, "id": next(left)} if isinstance(call, dict) else call for call in calls]
        return replace_field(raw, "tool_calls", fixed)

    def _counter(self, facts: Facts | None) -> MessageCounter:
        return self._parallel if facts is not None and facts.rare.parallel else self._count


def in_blocks(message: Message) -> bool:
    """Return whether a message has its calls or its result as blocks of the Messages API, as Cursor sends them."""
    fields = message.get("tool_calls"), message.get("function_call"), message.get("tool_call_id")
    return not any(fields) and any(type_of(block) in ("tool_use", "tool_result") for block in parts_of(message))


def _notes_of(message: Message) -> list[str]:
    """Return the reminders in a user's message or a tool's result."""
    role = message.get("role")
    return notes_of(message.get("content"), CHAT, elements=role == "user") if role in ("user", "tool") else []


def text_of(message: Message) -> str:
    """Return the visible text of a message: its content, or its refusal."""
    return "\n".join(filter(None, (content_text(message.get("content"), CHAT), string(message.get("refusal")))))


def _unsealed(value: Any) -> Any:
    """Return a value with unchecked signatures of calls."""
    if isinstance(value, list):
        return list(map(_unsealed, value))
    if not isinstance(value, dict):
        return value
    return {name: _UNCHECKED if name == _SEAL else _unsealed(inner) for name, inner in value.items()}


def calls_of(message: Message) -> tuple[Call, ...]:
    """Return the tool calls of an assistant message.

    They include the legacy ``function_call``, with the function's name as its id.
    """
    calls = []
    for call in _list(message.get("tool_calls")):
        if isinstance(call, dict):
            function = call.get("function") or call.get("custom")
            name = function.get("name") if isinstance(function, dict) else None
            calls.append(Call(string(call.get("id")), intern(string(name))))
    legacy = message.get("function_call")
    if isinstance(legacy, dict):
        name = string(legacy.get("name"))
        calls.append(Call(name, name))
    return tuple(calls)


def arguments_of(message: Message) -> list[tuple[str, str]]:
    """Return the name and the arguments of each tool call, as text."""
    calls = [call for call in _list(message.get("tool_calls")) if isinstance(call, dict)]
    functions = [call.get("function") or call.get("custom") for call in calls]
    return [
        (string(function.get("name")), argument_text(function.get("arguments", function.get("input"))))
        for function in [*functions, message.get("function_call")]
        if isinstance(function, dict)
    ]


def _rewritten_call(call: Any, key: str, rewrite: Rewrite) -> Any:
    """Return a call with other arguments; the same object if they stay."""
    function = call.get(key) if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments, str):
        return call
    rewritten = rewrite(string(function.get("name")), arguments)
    return call if rewritten is None else {**call, key: {**function, "arguments": rewritten}}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
