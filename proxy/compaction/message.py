"""How a chat message looks: the only module of the core that knows.

A message is the JSON object of OpenAI's chat completions. Input is whatever a client sent, so every reader here
takes any JSON value and falls back to "nothing there" for shapes it does not know.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

Message = Mapping[str, Any]
TextCounter = Callable[[str], int]
"""Tokens of a text, as the model that the request is for counts them."""
MessageCounter = Callable[[Message], int]
"""Tokens of a whole message, its framing included."""

HEAD_ROLES = frozenset({"system", "developer"})
RESULT_ROLES = frozenset({"tool", "function"})


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call of an assistant message."""

    id: str
    name: str


@dataclass(slots=True)
class Form:
    """A message as a stage rewrote it."""

    raw: bytes
    tokens: int


@dataclass(slots=True)
class Facts:
    """What is remembered of a message, so that it is read and counted once.

    ``digest`` identifies the content, whatever the spelling of its JSON. ``answers`` is the id of the call that a
    tool message answers. ``forms`` keeps what stages made of the message, by stage and settings; ``None`` means that
    the stage leaves it as it is.
    """

    role: str
    tokens: int
    digest: bytes
    calls: tuple[Call, ...] = ()
    answers: str | None = None
    forms: dict[tuple[str, object], Form | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Turn:
    """A message of the conversation at hand: its bytes as the client sent them, and what is known of it."""

    raw: bytes
    facts: Facts


def decode(raw: bytes) -> Message:
    """The message as a mapping; a value that is no object becomes an empty one.

    Numbers of any size, which strict parsers refuse, are taken as ``json`` takes them.
    """
    try:
        value = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        value = json.loads(bytes(raw))
    return value if isinstance(value, dict) else {}


def read(message: Message, count: MessageCounter) -> Facts:
    """The facts of a message."""
    role = message.get("role")
    return Facts(
        role=role if isinstance(role, str) else "",
        tokens=count(message),
        digest=digest(message),
        calls=calls_of(message),
        answers=_text_or_none(message.get("tool_call_id")),
    )


def digest(message: Message) -> bytes:
    """A digest of the content that does not depend on key order or spelling of the JSON."""
    canonical = json.dumps(message, sort_keys=True, separators=(",", ":")).encode("ascii")
    return hashlib.sha256(canonical).digest()


def calls_of(message: Message) -> tuple[Call, ...]:
    """The tool calls of an assistant message, the legacy ``function_call`` included."""
    calls = []
    for call in _list(message.get("tool_calls")):
        if isinstance(call, dict):
            function = call.get("function") or call.get("custom")
            name = function.get("name") if isinstance(function, dict) else None
            calls.append(Call(_text_or_none(call.get("id")) or "", _text_or_none(name) or ""))
    legacy = message.get("function_call")
    if isinstance(legacy, dict):
        name = _text_or_none(legacy.get("name")) or ""
        calls.append(Call(name, name))
    return tuple(calls)


def arguments_of(message: Message) -> list[tuple[str, str]]:
    """Name and arguments, as text, of each tool call."""
    found = []
    calls = [c for c in _list(message.get("tool_calls")) if isinstance(c, dict)]
    functions = [call.get("function") or call.get("custom") for call in calls]
    for function in [*functions, message.get("function_call")]:
        if isinstance(function, dict):
            arguments = function.get("arguments", function.get("input"))
            found.append((_text_or_none(function.get("name")) or "", _as_text(arguments)))
    return found


def text_of(message: Message) -> str:
    """The visible text: the content, or the text parts of it; other parts become a label such as ``[image]``."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "\n".join(filter(None, (part_text(part) for part in _list(content))))


def part_text(part: object) -> str:
    """The text of one content part, or a label for what is not text."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        return ""
    for key in ("text", "refusal"):
        if isinstance(part.get(key), str):
            return str(part[key])
    kind = _text_or_none(part.get("type")) or "part"
    return f"[{PART_LABELS.get(kind, kind)}]"


PART_LABELS = {"image_url": "image", "input_audio": "audio", "file": "file"}


def is_text_part(part: object) -> bool:
    """Whether a content part is text."""
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def replace_field(raw: bytes, key: str, value: object) -> bytes:
    """The message with one field replaced; the other fields keep their bytes."""
    fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    fields[key] = msgspec.Raw(msgspec.json.encode(value))
    return msgspec.json.encode(fields)


def replace_text(raw: bytes, text: str) -> bytes:
    """The message with its text replaced. A string stays a string, a list of parts a list: its first text part takes
    the text, the other text parts go, parts that are no text stay."""
    content = decode(raw).get("content")
    if not isinstance(content, list):
        return replace_field(raw, "content", text)
    parts: list[object] = []
    placed = False
    for part in content:
        if not is_text_part(part):
            parts.append(part)
        elif not placed:
            parts.append({**part, "text": text})
            placed = True
    return replace_field(raw, "content", parts if placed else [{"type": "text", "text": text}, *parts])


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _as_text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
