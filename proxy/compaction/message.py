"""Read and write the JSON of chat messages.

A message is the JSON object of OpenAI's chat completions. Clients may send any JSON value, so every function here
accepts any value and treats unknown shapes as empty.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from proxy.compaction.foreign import recognised
from proxy.compaction.parts import Message as Message
from proxy.compaction.parts import is_media_part, is_text_part, parts_of, without_media
from proxy.compaction.parts import text_of as text_of

TextCounter = Callable[[str], int]
"""Count the tokens of a text with the tokenizer of the requested model."""
MessageCounter = Callable[[Message], int]
"""Count the tokens of a whole message, including its framing."""

HEAD_ROLES = frozenset({"system", "developer"})
RESULT_ROLES = frozenset({"tool", "function"})
_INSTEAD_OF_CONTENT = ("tool_calls", "function_call", "refusal", "audio")


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call of an assistant message."""

    id: str
    name: str


@dataclass(slots=True)
class Facts:
    """Cached properties of a message, so that it's read and counted only once.

    - ``digest`` identifies the content. It doesn't depend on how the JSON is written.
    - ``answers`` is the id of the call that a tool message answers; for a legacy ``function`` message, the function's
      name.
    - ``length`` is the length of a tool result's text in characters. ``said`` is a digest of its content only.
    - ``media`` means that there are media parts; ``apart`` is their share of ``tokens``.
    - ``estimated`` means that the tokens of some media can't be derived from their bytes.
    - ``foreign`` means that the message contains another tool's summary.
    - ``empty`` means that the message is an assistant's and has neither content nor calls.
    - ``wide`` means that a result's text contains non-ASCII characters. Some providers count those differently if the
      result answers one of several calls. ``one_of_several`` caches the facts for that case.
    - ``count`` is the counter for this message, if it differs from the usual one.
    - ``forms`` caches the output of the stages, by stage and settings; ``None`` means unchanged.
    - ``pinned`` caches whether the message matches a policy's pin patterns.
    """

    role: str
    tokens: int
    digest: bytes
    calls: tuple[Call, ...] = ()
    answers: str | None = None
    length: int = 0
    said: bytes = b""
    media: bool = False
    apart: int = 0
    estimated: bool = False
    foreign: bool = False
    empty: bool = False
    wide: bool = False
    count: MessageCounter | None = None
    one_of_several: Facts | None = None
    forms: dict[tuple[str, object], Turn | None] = field(default_factory=dict)
    pinned: dict[tuple[str, ...], bool] = field(default_factory=dict)

    @property
    def text_tokens(self) -> int:
        """Return the tokens of the message without its media parts. Limits on texts apply to these."""
        return self.tokens - self.apart

    @property
    def id(self) -> str:
        """Return the message's id in the archive: 20 hexadecimal digits."""
        return self.digest.hex()[:20]


class Turn(msgspec.Struct, frozen=True):
    """A message of a conversation, with its facts.

    ``raw`` contains the bytes from the client or from the stage that rewrote them.
    """

    raw: bytes
    facts: Facts

    def rewritten(self, raw: bytes, count: MessageCounter) -> Turn | None:
        """Return the message with new bytes and the same identity; ``None`` if it isn't shorter."""
        if len(raw) >= len(self.raw):
            return None
        message = decode(raw)
        tokens = (self.facts.count or count)(message)
        if tokens >= self.facts.tokens:
            return None
        media = self.facts.media and any(map(is_media_part, parts_of(message)))
        apart = self.facts.apart if media else 0
        return Turn(raw, replace(self.facts, tokens=tokens, media=media, apart=apart, forms={}))


DEEPEST = 64
"""Levels of nesting. Deeper messages aren't read, because they could exceed the interpreter's recursion limit."""


def decode(raw: bytes) -> Message:
    """Return the message as a mapping, empty if the value isn't an object. Never raise.

    Large numbers and lone surrogates, which strict parsers reject, are read like ``json`` reads them. Some values
    can't be read at all: invalid UTF-8, numbers with thousands of digits, or deep nesting. The result is then a
    message without a role that has the JSON as its content. It's counted but never changed.
    """
    try:
        value = _parsed(raw)
    except (ValueError, RecursionError):
        return _unread(raw)
    if not isinstance(value, dict):
        return {}
    # Most messages have fewer brackets than the allowed depth.
    plain = bytes(raw)  # ``msgspec.Raw`` has no ``count``
    brackets = plain.count(b"[") + plain.count(b"{")
    return _unread(raw) if brackets > DEEPEST and _too_deep(value) else value


def _parsed(raw: bytes) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return json.loads(bytes(raw))


def _unread(raw: bytes) -> Message:
    return {"content": bytes(raw).decode("utf-8", "replace")}


def _too_deep(value: object) -> bool:
    waiting: list[tuple[object, int]] = [(value, 0)]
    while waiting:
        item, depth = waiting.pop()
        if depth == DEEPEST:
            return True
        children = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        waiting += [(child, depth + 1) for child in children if isinstance(child, dict | list)]
    return False


def read(message: Message, count: MessageCounter) -> Facts:
    """Return the facts of a message."""
    role = _text_or_none(message.get("role")) or ""
    facts = Facts(
        role=role,
        tokens=count(message),
        digest=digest(message),
        calls=calls_of(message),
        answers=_text_or_none(message.get("name" if role == "function" else "tool_call_id")),
        media=any(map(is_media_part, parts_of(message))),
        foreign=role == "user" and recognised(message) is not None,
        empty=role == "assistant" and _is_empty(message),
    )
    if facts.media:
        facts.apart = max(0, facts.tokens - count(without_media(message)))
    if role in RESULT_ROLES:
        text = text_of(message)
        facts.length = len(text)
        facts.wide = not text.isascii()
        facts.said = _digest(message.get("content"))
    return facts


def _is_empty(message: Message) -> bool:
    return message.get("content") in (None, "", []) and not any(message.get(key) for key in _INSTEAD_OF_CONTENT)


def among_several(turn: Turn, count: MessageCounter) -> Facts:
    """Return the facts of a result that answers one of several calls, counted with ``count``."""
    message = decode(turn.raw)
    return replace(turn.facts, tokens=count(message), count=count, one_of_several=None, forms={})


def digest(message: Message) -> bytes:
    """Return a digest of the content that doesn't depend on key order or on how the JSON is written."""
    return _digest(message)


def _digest(value: object) -> bytes:
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")
    return hashlib.sha256(canonical).digest()


def calls_of(message: Message) -> tuple[Call, ...]:
    """Return the tool calls of an assistant message.

    They include the legacy ``function_call``, with the function's name as its id.
    """
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
    """Return the name and the arguments of each tool call, as text."""
    found = []
    calls = [c for c in _list(message.get("tool_calls")) if isinstance(c, dict)]
    functions = [call.get("function") or call.get("custom") for call in calls]
    for function in [*functions, message.get("function_call")]:
        if isinstance(function, dict):
            arguments = function.get("arguments", function.get("input"))
            found.append((_text_or_none(function.get("name")) or "", _as_text(arguments)))
    return found


def replaceable_text(message: Message) -> str | None:
    """Return the text that ``replace_text`` replaces: the content or its text parts; ``None`` if there is none."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    texts = [part["text"] for part in _list(content) if is_text_part(part)]
    return "\n".join(texts) if texts else None


def encode(value: object) -> bytes:
    """Encode a value as JSON. Write lone surrogates, which aren't valid UTF-8, as escapes."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(value).encode("ascii")


def replace_field(raw: bytes, key: str, value: object) -> bytes:
    """Replace one field of a message. The other fields keep their bytes."""
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        return encode({**decode(raw), key: value})  # lone surrogates in other fields
    fields[key] = msgspec.Raw(encode(value))
    return msgspec.json.encode(fields)


def replace_text(raw: bytes, text: str) -> bytes:
    """Replace the text of a message (see ``replaceable_text``).

    A string remains a string. In a list of parts, the first text part gets the new text, the other text parts are
    removed, and the remaining parts are kept.
    """
    content = decode(raw).get("content")
    if not isinstance(content, list):
        return replace_field(raw, "content", text)
    first = next(i for i, part in enumerate(content) if is_text_part(part))
    rest = [part for part in content[first + 1 :] if not is_text_part(part)]
    return replace_field(raw, "content", [*content[:first], {**content[first], "text": text}, *rest])


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _as_text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
