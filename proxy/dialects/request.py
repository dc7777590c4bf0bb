"""Read and rewrite the JSON body of a request, whatever its API."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from operator import is_
from typing import Any, ClassVar, NamedTuple, Self

import msgspec

from proxy.constants import UNDECODABLE
from proxy.dialects.units import ByDigest
from proxy.errors import BadBody
from proxy.overflow.silent import asks_for_removal
from proxy.tokens.media import has_remote_media

MAX_MESSAGES = 40_000  # messages that a request can have

MAX_VALUES = 300_000
"""JSON values in a request, counted by the commas between them. A conversation has about seven in each message."""

INLINE_BYTES = 4_000_000
"""A body of at most this many bytes is measured and parsed on the event loop, a larger one in a thread."""

LONG_BETA = b"context-1m-"  # the beginning of the names of Anthropic's beta for the long window
SEARCHED = 2_000  # a body with at least this many bytes isn't searched for media, but its new messages are

_SLICE = 1_000_000

_THINKING_WORDS = (b"udget", b"thinking", b"reasoning")
_THINKING_BUDGET = re.compile(
    rb'"(?:\w*[bB]udget\w*|max_(?:thinking|reasoning)\w*|reasoning"\s*:\s*\{[^{}]{0,200}"max_tokens)"\s*:\s*(\d{1,12})'
)
"""Budgets for thinking: OpenRouter's ``reasoning.max_tokens``, DashScope's ``thinking_budget``, and others."""

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_TOO_MANY_MESSAGES = "The request has {count} messages, and this proxy takes {most} at most. Send fewer messages."
_TOO_MANY_VALUES = "The request has over {most} JSON values. Send fewer messages, content parts, or tools."

NOTHING = msgspec.Raw()
_any_decoder = msgspec.json.Decoder()
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])

# A lone surrogate, as JavaScript writes it after cutting a text within an emoji. Python's parser accepts it, msgspec
# doesn't. An even number of backslashes before it belongs to other escapes.
_LONE_SURROGATE = re.compile(
    rb"(?<!\\)((?:\\\\)*)\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD])[c-fC-F][0-9a-fA-F]{2})"
)


class Wire(msgspec.Struct):
    """The fields that every API has, undecoded. Each API adds those that the proxy uses."""

    model: msgspec.Raw = NOTHING
    stream: msgspec.Raw = NOTHING
    user: msgspec.Raw = NOTHING
    safety_identifier: msgspec.Raw = NOTHING
    metadata: msgspec.Raw = NOTHING
    prompt_cache_key: msgspec.Raw = NOTHING
    betas: msgspec.Raw = NOTHING
    anthropic_beta: msgspec.Raw = NOTHING
    context_management: msgspec.Raw = NOTHING

    @property
    def shared(self) -> dict[str, Any]:
        """Return the decoded fields of ``Request`` that every API has."""
        model = value_of(self.model)
        return {
            "model": model if isinstance(model, str) else None,
            "stream": bytes(self.stream) == b"true",  # JSON has one spelling of it
            "sender": self.sender,
            "long_context": LONG_BETA in bytes(self.betas) or LONG_BETA in bytes(self.anthropic_beta),
            "removes": self.context_management is not NOTHING and asks_for_removal(self.context_management),
        }

    @property
    def sender(self) -> tuple[str, str]:
        """Return the end user and the session that the client names. Each is empty if the client names none."""
        metadata = value_of(self.metadata)
        stated = metadata.get("user_id") if isinstance(metadata, dict) else None
        users = value_of(self.user), value_of(self.safety_identifier), stated
        session = value_of(self.prompt_cache_key)
        user = next((one for one in users if isinstance(one, str) and one), "")
        return user, session if isinstance(session, str) else ""


class Request(msgspec.Struct, eq=False):
    """A request as the client sent it. A struct can't be abstract, so methods that each API must define raise an error.

    - ``model`` is ``None`` if the field is missing or isn't a string.
    - ``units`` are the bytes of the conversation's units, unchanged. ``received`` are the messages or items that the
      client sent.
    - ``max_output`` is the requested limit on output, in tokens.
    - ``overhead`` are the bytes of the fields outside the conversation that take tokens, such as tools. ``OVERHEAD``
      are their names, and ``CONVERSATION`` is the name of the field with the conversation.
    - ``sender`` is the end user and the session that the client names, empty if there is none.
    - ``long_context`` is true if the body asks for Anthropic's long window, and ``removes`` if it asks the upstream to
      remove old content.
    - ``strict`` is a body that strict parsers accept, if they reject ``raw``.
    """

    OVERHEAD: ClassVar[Sequence[str]] = ()
    CONVERSATION: ClassVar[str] = "messages"

    raw: bytes
    model: str | None = None
    stream: bool = False
    units: Sequence[bytes] = []
    max_output: int | None = None
    overhead: tuple[bytes, ...] = ()
    received: Sequence[bytes] = []
    strict: bytes | None = None
    sender: tuple[str, str] = ("", "")
    long_context: bool = False
    removes: bool = False
    _media: bool | None = None
    _fixed_thinking: int | None = None

    @classmethod
    async def read(cls, raw: bytes) -> Self:
        """Parse a body of any size. Raises ``BadBody`` for over ``MAX_VALUES`` values or ``MAX_MESSAGES`` messages.

        A body is measured before any of its values takes memory.
        """
        await check_values(raw)
        return await cls._read_bounded(raw)

    @classmethod
    async def _read_bounded(cls, raw: bytes) -> Self:
        """Parse a body. Raises ``BadBody`` for more than ``MAX_MESSAGES`` messages, items, or units."""
        request = cls.parse(raw) if len(raw) <= INLINE_BYTES else await asyncio.to_thread(cls.parse, raw)
        count = max(len(request.received), len(request.units))
        if count > MAX_MESSAGES:
            raise BadBody(_TOO_MANY_MESSAGES.format(count=count, most=MAX_MESSAGES), param=cls.CONVERSATION)
        return request

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        """Parse a body. If it isn't a JSON object with a conversation, read only the model and ``stream``.

        The upstream judges such a body, because its parser may accept it.
        """
        request = cls._read(raw)
        if request is None and (replaced := without_lone_surrogates(raw)) != raw:
            request = cls._read(replaced)
            if request is not None:
                request.raw, request.strict = raw, replaced
        if request is None:
            model, stream = named_fields(raw)
            request = cls(raw, model, stream)
        return request

    @classmethod
    def _read(cls, raw: bytes) -> Self | None:
        """Return the request; ``None`` if strict parsers reject it."""
        raise NotImplementedError

    def has_remote_media(self) -> bool:
        """Return whether the body may contain parts whose tokens can exceed their bytes. See ``tokens.media``."""
        if self._media is None:
            around = _around(self.raw, self.received)
            found = has_remote_media(self.raw if around is None else around)
            self._media = found or (around is not None and True in _media.of(self.received))
        return self._media

    @property
    def size(self) -> int:
        """Return the bytes of memory that the body takes."""
        return len(self.raw) + (0 if self.strict is None else len(self.strict))

    @property
    def references(self) -> Sequence[str]:
        """Return the ids of items that the body only refers to."""
        return ()

    @property
    def may_refer(self) -> bool:
        """Return whether later requests of the client may refer to the items of the answer."""
        return False

    @property
    def continues(self) -> bool:
        """Return whether the request continues a history that the server keeps, so that its size is unknown."""
        return False

    @property
    def loads_tools(self) -> bool:
        """Return whether a part of the conversation may load tools of the request that aren't in the prompt."""
        return False

    @property
    def fixed_thinking(self) -> int:
        """Return the tokens of a budget for thinking that ``rewritten`` can't lower with the output; 0 without any."""
        if self._fixed_thinking is None:
            self._fixed_thinking = self._largest_budget()
        return self._fixed_thinking

    def _largest_budget(self) -> int:
        try:
            fields = self.outer_fields()
        except BadBody:
            return 0
        outer = msgspec.json.encode({name: raw for name, raw in fields.items() if name != self.CONVERSATION})
        if not any(word in outer for word in _THINKING_WORDS):
            return 0
        return max(map(int, _THINKING_BUDGET.findall(outer)), default=0)

    @property
    def thinking(self) -> int:
        """Return the tokens of the output that are reserved for thinking. ``rewritten`` lowers them if it has to."""
        return 0

    @property
    def compacted(self) -> bool:
        """Return whether the client sent a compaction of its own, a prefix that stays as it is."""
        return False

    @property
    def hidden(self) -> float:
        """Return an upper bound on the tokens of items that the body refers to; infinity if they are unknown."""
        return 0

    def place(self) -> str:
        """Return what identifies the end of the conversation, where the items of the answer come; empty without any."""
        return ""

    def places(self) -> Iterable[tuple[str, str]]:
        """Return the id of each reference, and what identifies its place: ``place`` of the request for that item."""
        return ()

    def resolve(self, items: Mapping[str, bytes], sizes: Mapping[str, int]) -> None:
        """Put known items in the place of references in ``units``, by id. ``rewritten`` puts the references back.

        ``sizes`` are the tokens of unknown items, if an upstream has reported them.
        """

    def unsized(self, units: Sequence[bytes]) -> list[str]:
        """Return the ids of references in units whose items and sizes are unknown."""
        return []

    def named(self, model: str) -> Self:
        """Return the request with another model. Raises ``BadBody`` if the body isn't a JSON object."""
        return self if self.model == model else self.parse(self.rewritten(model=model))

    def release(self) -> None:
        """Drop every byte of the request from memory. The model and the other decoded fields stay."""
        self.raw = b""
        self.units = self.received = []
        self.overhead = ()
        self.strict = None

    def outer_fields(self) -> dict[str, msgspec.Raw]:
        """Return the fields of the body with their bytes. Raises ``BadBody``."""
        return fields_of(self.raw if self.strict is None else self.strict)

    def overhead_fields(self) -> dict[str, Any]:
        """Return the fields of ``overhead``, decoded."""
        return {name: value_of(raw) for name, raw in zip(self.OVERHEAD, self.overhead, strict=False) if raw}

    def instructions(self) -> Self:
        """Return the request with no other overhead than the fields that instruct the model."""
        stated = zip(self.OVERHEAD, self.overhead, strict=False)
        kept = tuple([raw if name in ("system", "instructions") else b"" for name, raw in stated])
        return msgspec.structs.replace(self, overhead=kept)

    def expanded(self, body: bytes, units: Sequence[bytes] | None = None) -> bytes:
        """Return a body that ``rewritten`` made, with known items in the place of references.

        ``units`` are those of ``rewritten``.
        """
        return body

    def rewritten(
        self, *, units: Sequence[bytes] | None = None, model: str | None = None, max_output: int | None = None
    ) -> bytes:
        """Return the body with other units, another model, or less output; ``raw`` itself if nothing changes.

        Every other value keeps its bytes and its place. Raises ``BadBody`` if the body isn't a JSON object.
        """
        if units is None and model is None and max_output is None:
            return self.raw
        raw = self.raw if self.strict is None else self.strict
        fields = fields_of(raw)
        if units is not None:
            self._replace_units(fields, units)
        if model is not None:
            fields["model"] = encoded(model)
        if max_output is not None:
            self._lower_output(fields, max_output)
        made = msgspec.json.encode(fields)
        return made if self.strict is None else with_surrogates(made, self.strict, self.raw)

    def _replace_units(self, fields: dict[str, msgspec.Raw], units: Sequence[bytes]) -> None:
        """Put other units into the fields of a body."""
        raise NotImplementedError

    def _lower_output(self, fields: dict[str, msgspec.Raw], most: int) -> None:
        """Limit the output in the fields of a body to ``most`` tokens."""
        raise NotImplementedError


class Split(NamedTuple):
    """A message, and the units that were made from it."""

    message: bytes
    units: tuple[bytes, ...]
    role: bytes = b"user"


class BlocksRequest(Request, eq=False):
    """A request whose messages may have blocks.

    ``splits`` are the messages that several units were made from, by the identity of their first unit.
    """

    splits: dict[int, Split] = msgspec.field(default_factory=dict)

    @property
    def size(self) -> int:
        made = sum(len(unit) for part in self.splits.values() for unit in part.units if unit is not part.message)
        return super().size + made

    def release(self) -> None:
        super().release()
        self.splits = {}

    def rewritten(
        self, *, units: Sequence[bytes] | None = None, model: str | None = None, max_output: int | None = None
    ) -> bytes:
        if units is not None and len(units) == len(self.units) and all(map(is_, units, self.units)):
            units = None
        return super().rewritten(units=units, model=model, max_output=max_output)


_media = ByDigest(has_remote_media)


def _around(raw: bytes, parts: Sequence[bytes]) -> bytes | None:
    """Return the bytes of a body before and after a list of its parts; ``None`` if they aren't found in a large one."""
    if len(raw) < SEARCHED or not parts:
        return None
    # A few bytes find a place sooner than a whole message does.
    start, last = raw.find(memoryview(parts[0])[:64]), memoryview(parts[-1])[-64:]
    end, commas = raw.rfind(last) + len(last), len(parts) - 1
    between = end - start - sum(map(len, parts))
    return raw[:start] + raw[end:] if start >= 0 and between in (commas, 2 * commas) else None


async def check_values(raw: bytes) -> None:
    """Raise ``BadBody`` if a body has more than ``MAX_VALUES`` values. None of its values takes memory."""
    if len(raw) <= MAX_VALUES:
        return
    quick = len(raw) <= INLINE_BYTES
    commas = _commas(raw) if quick else await asyncio.to_thread(_commas, raw)
    if commas > MAX_VALUES and await asyncio.to_thread(_has_many_values, raw):
        raise BadBody(_TOO_MANY_VALUES.format(most=MAX_VALUES))


def fields_of(raw: bytes) -> dict[str, msgspec.Raw]:
    """Return the fields of a body with their bytes. Raises ``BadBody`` if the body isn't a JSON object."""
    try:
        return _fields_decoder.decode(raw)
    except UNDECODABLE as error:
        raise BadBody("The body is not plain JSON in UTF-8. Send it as the API asks for it.") from error


def listed(raws: Sequence[bytes]) -> msgspec.Raw:
    """Return a JSON array of encoded values."""
    return msgspec.Raw(b"[" + b",".join(raws) + b"]")


def encoded(value: object) -> msgspec.Raw:
    """Return a value as JSON."""
    return msgspec.Raw(msgspec.json.encode(value))


def lower(fields: dict[str, msgspec.Raw], names: Sequence[str], most: int) -> None:
    """Lower each of the named numbers to at most ``most``. If there is none, add the last one."""
    if not any(name in fields and positive(fields[name]) for name in names):
        fields[names[-1]] = msgspec.Raw(b"%d" % most)
    for name in names:
        if name in fields and (positive(fields[name]) or 0) > most:
            fields[name] = msgspec.Raw(b"%d" % most)


def named_fields(raw: bytes) -> tuple[str | None, bool]:
    """Return the model and ``stream`` of a body that strict parsers reject."""
    value = leniently(raw)
    fields = value if isinstance(value, dict) else {}
    model = fields.get("model")
    # A URL or a log can't contain a lone surrogate.
    named = model.encode("utf-8", "replace").decode() if isinstance(model, str) else None
    return named, fields.get("stream") is True


def _commas(raw: bytes) -> int:
    """Return the commas in a body, including those within strings. No other thread runs during each search."""
    return sum([raw.count(b",", start, start + _SLICE) for start in range(0, len(raw), _SLICE)])


def _has_many_values(raw: bytes) -> bool:
    """Return whether more than ``MAX_VALUES`` commas are outside of strings."""
    commas = end = 0
    for string in _STRING.finditer(raw):
        commas += raw.count(b",", end, string.start())
        if commas > MAX_VALUES:
            return True
        end = string.end()
    return commas + raw.count(b",", end) > MAX_VALUES


def without_lone_surrogates(raw: bytes) -> bytes:
    """Return JSON with U+FFFD, as encoders write it, in place of each escaped lone surrogate. The length stays."""
    if b"\\ud" not in raw and b"\\uD" not in raw:
        return raw
    # A regular expression blocks all threads while it runs, so a large body is searched in pieces. No escape
    # contains a space or a quote. A megabyte of escapes without either isn't text and stays unchanged.
    pieces = []
    start = 0
    while start < len(raw):
        end = start + _SLICE
        if end < len(raw):
            border = max(raw.rfind(b" ", start, end), raw.rfind(b'"', start, end)) + 1
            if not border and raw.find(b"\\", end - 16, end) >= 0:
                return raw
            end = border or end
        pieces.append(_LONE_SURROGATE.sub(rb"\1\\ufffd", raw[start:end]))
        start = end
    return b"".join(pieces)


def with_surrogates(made: bytes, strict: bytes, raw: bytes) -> bytes:
    """Return a body with the lone surrogates of the strings that it has from ``strict``, as the client sent them.

    ``strict`` is ``raw`` with U+FFFD in their place, and as long.
    """
    known: dict[bytes, bytes] = {}
    for string in _STRING.finditer(strict):
        if (sent := raw[string.start() : string.end()]) != string[0]:
            known[string[0]] = sent
    pieces: list[bytes] = []
    end = 0
    for string in _STRING.finditer(made):
        if (sent := known.get(string[0], b"")) and b"\\ufffd" in string[0]:
            pieces += (made[end : string.start()], sent)
            end = string.end()
    return b"".join([*pieces, made[end:]])


def value_of(raw: msgspec.Raw | bytes) -> Any:
    """Return a decoded value; ``None`` if it is missing or no parser reads it."""
    if raw is NOTHING or not bytes(raw):
        return None
    try:
        return _any_decoder.decode(raw)
    except UNDECODABLE:
        return leniently(bytes(raw))


def leniently(raw: bytes) -> Any:
    """Parse with Python's parser, which accepts numbers of any size, NaN, and any Unicode encoding."""
    try:
        return json.loads(raw, strict=False)
    except (ValueError, RecursionError):
        return None


def positive(raw: msgspec.Raw) -> int | None:
    """Return a number of tokens; ``None`` if the value isn't a positive number below 10¹²."""
    plain = bytes(raw)
    if not plain:
        return None
    if plain.isdigit() and len(plain) <= 12:
        return int(plain) or None
    value = value_of(plain)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 1:
        return None
    return int(value) if value < 1e12 else None
