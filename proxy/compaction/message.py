"""How a chat message looks: the only module of the core that knows.

A message is the JSON object of OpenAI's chat completions. Input is whatever a client sent, so every reader here
takes any JSON value and falls back to "nothing there" for shapes it does not know.
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
"""Tokens of a text, as the model that the request is for counts them."""
MessageCounter = Callable[[Message], int]
"""Tokens of a whole message, its framing included."""

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
    """What is remembered of a message, so that it is read and counted once.

    ``digest`` identifies the content, whatever the spelling of its JSON. ``answers`` is the id of the call that a
    tool message answers; for a legacy ``function`` message it is its function's name. Of a tool result ``length`` is
    its text's in characters, and ``said`` a digest of its content alone. ``media`` says that there are media parts,
    which take ``apart`` of the tokens; ``estimated`` that the tokens of some may not follow from their bytes;
    ``foreign`` that it holds a summary which another tool made; ``empty`` that it is an assistant's and has neither
    content nor calls.

    ``wide`` says that a result's text has other characters than ASCII. Some providers count those otherwise where the
    result is one of several calls'; ``one_of_several`` keeps what is known of it there, and ``count``, where it is not
    ``None``, is how the message is counted in its place.

    ``forms`` keeps what stages made of the message, by stage and settings; ``None`` means that the stage leaves it as
    it is. ``pinned`` keeps whether a policy's expressions are found in it.
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
        """The tokens of the message without its media parts: limits on texts apply to these."""
        return self.tokens - self.apart

    @property
    def id(self) -> str:
        """The id under which the archive keeps the message: 20 hexadecimal digits."""
        return self.digest.hex()[:20]


class Turn(msgspec.Struct, frozen=True):
    """A message of the conversation at hand: its bytes, as the client sent them or as a stage rewrote them, and what is
    known of it."""

    raw: bytes
    facts: Facts

    def rewritten(self, raw: bytes, count: MessageCounter) -> Turn | None:
        """The message in a shorter form, which keeps its identity; ``None`` if it is no shorter."""
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
"""A message nested deeper than this is not read, so that no reader of it meets the interpreter's own limit."""


def decode(raw: bytes) -> Message:
    """The message as a mapping; a value that is no object becomes an empty one.

    Large numbers and lone surrogates, which strict parsers refuse, are taken as ``json`` takes them. What cannot be
    read at all (bytes that are no UTF-8, numbers of thousands of digits, nesting without end) becomes a message of no
    role whose content is the JSON as text: it is counted, and nothing touches it. Never raises.
    """
    try:
        value = _parsed(raw)
    except (ValueError, RecursionError):
        return _unread(raw)
    if not isinstance(value, dict):
        return {}
    # Most messages have fewer brackets than would be too deep.
    plain = bytes(raw)  # an undecoded part of a body can't count
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
    """The facts of a message."""
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
    """The facts of a result that is one of several calls', which are counted so."""
    message = decode(turn.raw)
    return replace(turn.facts, tokens=count(message), count=count, one_of_several=None, forms={})


def digest(message: Message) -> bytes:
    """A digest of the content that does not depend on key order or spelling of the JSON."""
    return _digest(message)


def _digest(value: object) -> bytes:
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")
    return hashlib.sha256(canonical).digest()


def calls_of(message: Message) -> tuple[Call, ...]:
    """The tool calls of an assistant message, the legacy ``function_call`` included: its id is its function's name."""
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


def replaceable_text(message: Message) -> str | None:
    """What ``replace_text`` replaces: the content, or its text parts; ``None`` where there is no such text."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    texts = [part["text"] for part in _list(content) if is_text_part(part)]
    return "\n".join(texts) if texts else None


def encode(value: object) -> bytes:
    """As JSON. Lone surrogates, which are no UTF-8, are written as escapes."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(value).encode("ascii")


def replace_field(raw: bytes, key: str, value: object) -> bytes:
    """The message with one field replaced; the other fields keep their bytes."""
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        return encode({**decode(raw), key: value})  # lone surrogates in other fields
    fields[key] = msgspec.Raw(encode(value))
    return msgspec.json.encode(fields)


def replace_text(raw: bytes, text: str) -> bytes:
    """The message with its text (``replaceable_text``) replaced. A string stays a string, a list of parts a list: its
    first text part takes the text, the other text parts go, parts that are no text stay."""
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
