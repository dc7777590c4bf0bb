"""Count the tokens of texts, content parts, and tools, as all APIs have them, and judge what upstreams count."""

from __future__ import annotations

import math
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Set
from typing import Any, ClassVar

import msgspec
import tiktoken

from proxy.compaction.format import Format
from proxy.constants import UNDECODABLE
from proxy.dialects.parts import NEVER_MEDIA, SEALED, TEXT_FIELDS
from proxy.dialects.walk import file_text
from proxy.limits.profiles import Profile
from proxy.tokens import tools
from proxy.tokens.media import MEDIA, Media, data_in
from proxy.tokens.text import TextCount, check, count, dump, encoding, escaped, loaded

CALL = 3  # tokens of a call's frame, and of a tool's


class Counter(ABC):
    """Counts tokens as one model's provider does. Thread-safe.

    ``format`` reads units with this counter's tokenizer. No method raises for unusual input: a body is any JSON. The
    first count loads the encoding (0.2 to 0.4 s).

    Raises ``ConfigurationError`` if the profile names an encoding that isn't installed, or an unknown rule for images.
    """

    format: Format

    def __init__(self, profile: Profile) -> None:
        if not loaded(profile.tokenizer):
            check(profile.tokenizer)
        self.profile = profile
        self.text = TextCount(profile.tokenizer, profile.token_ratio)
        self._media = Media(profile.images)

    @classmethod
    def key_of(cls, profile: Profile) -> Hashable:
        """Return the parts of a profile that decide how to count."""
        return (profile.tokenizer, profile.token_ratio, profile.images, profile.tools, profile.escapes)

    @property
    def key(self) -> Hashable:
        """Return the key. Counters with the same key count alike."""
        return self.key_of(self.profile)

    @property
    def ready(self) -> bool:
        """Return whether the encoding is loaded, so that a count starts immediately."""
        return loaded(self.profile.tokenizer)

    @property
    def _encoding(self) -> tiktoken.Encoding:
        return encoding(self.profile.tokenizer)

    @abstractmethod
    def at_most(self, raw: bytes) -> float:
        """Return an upper bound for a body's tokens, without tokenizing."""

    @abstractmethod
    def overhead(self, fields: Mapping[str, Any]) -> int:
        """Return a request's tokens outside its units. ``fields`` are those of ``Request.overhead_fields``."""

    def _scaled(self, tokens: int) -> int:
        return self.text.scaled(tokens)

    def _count(self, value: object) -> int:
        return count(self._encoding, dump(value))

    def _value(self, value: object) -> tuple[int, int]:
        """Return the tokens of a value with texts, such as a field of a part, and those of its media.

        Sealed data counts by its length.
        """
        value, media = self._without_media(value)
        value, sealed = opened(value)
        return count(self._encoding, plain_json(value)) + sealed, media

    def _without_media(self, value: Any) -> tuple[Any, int]:
        """Return a value without media anywhere in it, and their tokens.

        Data that isn't in a media part counts as no more than one token per byte, like any text.
        """
        found: list[tuple[str, Mapping[str, Any], float]] = []
        value = without_media(value, {}, "", found)
        return value, int(sum(min(most, self._media.tokens(kind, part, self.text)) for kind, part, most in found))

    def deferred(self, fields: Mapping[str, Any]) -> dict[str, int]:
        """Return the tokens of the tools that parts of the conversation may load, by name."""
        return {}

    def _content(self, content: object, *, parallel: bool = False) -> tuple[int, int]:
        """Return the tokens of the content's text, and those of its images, audio, and files."""
        if content is None:
            return 0, 0
        tokens = media = 0
        counts: dict[str, int] = {}
        for part in content if isinstance(content, list) else [content]:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if isinstance(kind, str) and kind in MEDIA and isinstance(part, Mapping):
                if (file := file_text(part)) is not None:
                    tokens += count(self._encoding, file)
                    continue
                media += self._media.tokens(kind, part, self.text)
                continue
            if isinstance(part, Mapping) and not part.keys() <= _KNOWN_PART:
                part, inside = self._without_media(part)
                part, sealed = opened(part)
                tokens, media = tokens + sealed, media + inside
            texts: list[Any] = []
            if isinstance(part, Mapping) and part.keys() <= _KNOWN_PART:
                texts = [part[field] for field in TEXT_FIELDS if isinstance(part.get(field), str)]
            text = str(texts[0]) if len(texts) == 1 else plain_json(part)  # the JSON of a part of an unknown form
            if (found := counts.get(text)) is None:
                # An attack may repeat one short part very often.
                found = counts[text] = count(self._encoding, escaped(text) if parallel else text)
            tokens += found
        return tokens, media

    def _tools(self, body: Mapping[str, Any]) -> int:
        functions, others = tools.functions(body)
        tokens = sum(self._count(other) for other in others)
        if self.profile.tools != "typescript":
            tokens += sum(self._count(function) + CALL for function in functions)
            return tokens + tools.PROMPT[self.profile.tools] if functions or others else 0
        if functions:
            tokens += self._count(tools.typescript(functions)) + tools.DECLARATIONS
        return tokens

    def _choice(self, choice: object, named: int) -> int:
        if choice is None or choice == "auto":
            return 0
        if isinstance(choice, Mapping):
            function = choice.get("function", choice)
            name = function.get("name") if isinstance(function, Mapping) else None
            return named + self._count(name if isinstance(name, str) else choice)
        return tools.CHOICE_NONE if choice == "none" else named

    def _response_format(self, wanted: object) -> int:
        if not isinstance(wanted, Mapping) or wanted.get("type") in ("text", "json_object"):
            return 0
        schema = wanted.get("json_schema")
        return tools.RESPONSE_FORMAT + self._count(schema if isinstance(schema, Mapping) else wanted)


_KNOWN_PART: Set[str] = {"type", "cache_control", *TEXT_FIELDS}


def plain_json(value: object) -> str:
    """Return a value as JSON whose strings aren't escaped, as a model reads it."""
    text = dump(value)
    if isinstance(value, str) or "\\" not in text:
        return text
    return text.replace("\\n", "\n").replace("\\t", "\t").replace('\\"', '"').replace("\\\\", "\\")


TOKENS_PER_SEALED_CHARACTER = 3 / 16  # sealed data is base64, and has about four bytes per token
_SEALED_TYPES = ("encrypted", "redacted")  # what the types of parts contain whose `data` is sealed


_DEEPEST = 16  # levels of nesting in which sealed data is searched


def opened(value: Any, depth: int = 0) -> tuple[Any, int]:
    """Return a value without sealed data, and the tokens of that. Without any, the value is the same object."""
    if depth > _DEEPEST:
        return value, 0
    if isinstance(value, list):
        items = [opened(item, depth + 1) for item in value]
        changed = any(new is not old for (new, _), old in zip(items, value, strict=True))
        return [new for new, _ in items] if changed else value, sum([tokens for _, tokens in items])
    if not isinstance(value, Mapping):
        return value, 0
    kind = value.get("type")
    names = {*SEALED, "data"} if isinstance(kind, str) and any(word in kind for word in _SEALED_TYPES) else SEALED
    made: dict[str, Any] = {}
    characters = tokens = 0
    for name, one in value.items():
        if name in names and isinstance(one, str):
            characters += len(one)
            continue
        made[name], more = opened(one, depth + 1) if isinstance(one, Mapping | list) else (one, 0)
        tokens += more
    same = len(made) == len(value) and all(new is value[name] for name, new in made.items())
    return value if same else made, tokens + int(characters * TOKENS_PER_SEALED_CHARACTER)


def without_media(
    value: Any, fields: Mapping[str, Any], name: str, found: list[tuple[str, Mapping[str, Any], float]], depth: int = 0
) -> Any:
    """Return a value without media, which are added to ``found`` with their most tokens; the same object without any.

    ``fields`` and ``name`` are the object that has the value, and its field.
    """
    if isinstance(value, str):
        data = None if name in NEVER_MEDIA else data_in(value, fields)
        if data is not None:
            found.append((*data, len(value)))
        return value if data is None else ""
    if depth > _DEEPEST or not isinstance(value, list | Mapping):
        return value
    if isinstance(value, list):
        items = [without_media(item, fields, name, found, depth + 1) for item in value]
        return value if all(map(operator.is_, items, value)) else items
    kind = value.get("type")
    held = value.get(kind, value.get("source")) if isinstance(kind, str) and kind in MEDIA else None
    apart = held.get("type") not in ("text", "content") if isinstance(held, Mapping) else False
    if isinstance(kind, str) and (apart or (isinstance(held, str) and _ADDRESS.match(held))):
        found.append((kind, value, math.inf))
        return {name: value[name] for name in ("title", "context") if name in value} or ""
    made = {name: without_media(one, value, name, found, depth + 1) for name, one in value.items()}
    return value if all(map(operator.is_, made.values(), value.values())) else made


_ADDRESS = re.compile(r"data:|\w+://")

FORMAT_PART = 20
"""Divide a body's bytes by this for the most that a response format may take. Not every upstream counts its schema."""

PLAIN_VALUE = 200  # bytes that an unknown field may have if it adds no text

_FUNCTION = b'"function"'
_EMPTY = frozenset({b"null", b"[]", b"{}", b'""', b"false"})
_Object = dict[str, msgspec.Raw]
_body = msgspec.json.Decoder(_Object)
_objects = msgspec.json.Decoder(list[_Object] | None)
_NONE = msgspec.Raw(b"null")


class Evidence(ABC):
    """Which requests show, by the reported usage, how an upstream counts.

    Upstreams put fields into the prompt that the proxy doesn't count, such as ``documents``. Their templates drop parts
    that the proxy does count, such as the ``reasoning_content`` of earlier turns. The usage of such a request shows
    nothing about tokenizers, so only requests made of known parts are compared.

    ``KNOWN`` are the fields that the proxy counts, or that no provider puts into the prompt except for a few tokens.
    """

    KNOWN: ClassVar[frozenset[str]]

    @abstractmethod
    def comparable(self, raw: bytes) -> bool:
        """Return whether the proxy's count of a body and an upstream's usage cover the same parts."""

    @abstractmethod
    def adds_text(self, raw: bytes) -> bool:
        """Return whether a body has a field that may add text to the prompt besides its units, such as ``documents``.

        Unknown fields with a few plain values, such as the ``options`` of Ollama, add none.
        """

    @abstractmethod
    def has_calls(self, unit: bytes) -> bool:
        """Return whether a unit has a tool call or a tool's result."""

    @abstractmethod
    def kept_text(self, unit: bytes, *, tools: bool) -> str:
        """Return the text of a unit that every upstream keeps. ``tools``: this upstream keeps tool results."""


class FieldEvidence(Evidence):
    """Evidence of OpenAI's APIs, from the bytes of a body's fields. Reads every byte once: 1 to 2 ms per MB.

    ``FORMAT`` is the field with the response format.
    """

    FORMAT: ClassVar[str]

    def comparable(self, raw: bytes) -> bool:
        try:
            fields = _body.decode(raw)
            if not known_only(fields, self.KNOWN) or len(bytes(fields.get(self.FORMAT, b""))) * FORMAT_PART > len(raw):
                return False
            tools = _objects.decode(fields.get("tools", _NONE)) or ()
            # Tools that the provider runs, such as a search, put their results into the prompt.
            if any(bytes(tool.get("type", b"")) != _FUNCTION for tool in tools):
                return False
            return self.has_plain_units(fields)
        except (*UNDECODABLE, KeyError):
            return False

    @abstractmethod
    def has_plain_units(self, fields: Mapping[str, msgspec.Raw]) -> bool:
        """Return whether every upstream counts the same text of a body's units.

        Raises ``KeyError`` or ``msgspec.DecodeError`` if the body has no list of them.
        """

    def adds_text(self, raw: bytes) -> bool:
        try:
            fields = _body.decode(raw)
        except UNDECODABLE:
            return True
        unknown = (bytes(value) for name, value in fields.items() if name not in self.KNOWN)
        return any((len(value) > PLAIN_VALUE or b"[" in value) and value not in _EMPTY for value in unknown)


def objects_in(raw: bytes) -> list[dict[str, msgspec.Raw]]:
    """Return the objects of a list with their bytes. Raises ``msgspec.DecodeError`` for other values."""
    return _objects.decode(raw) or []


def known_only(fields: Mapping[str, msgspec.Raw], known: frozenset[str]) -> bool:
    """Return whether every field is a known one, or empty: ``null`` adds nothing to a prompt."""
    return fields.keys() <= known or all(name in known or bytes(value) in _EMPTY for name, value in fields.items())
