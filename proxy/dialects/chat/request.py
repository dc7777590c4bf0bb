"""Parse the body of a chat completion request, and rewrite it with the fewest changes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import xxhash

from proxy.errors import BadBody

MAX_MESSAGES = 40_000
"""Messages that a request can have."""

MAX_VALUES = 300_000
"""JSON values in a request, counted by the commas between them. A conversation has about seven in each message."""

INLINE_BYTES = 4_000_000
"""A body of at most this many bytes is measured and parsed on the event loop, a larger one in a thread."""

_SLICE = 1_000_000

_COUNTED_SLICE = 65_536
_MOST_COUNTED = 20_000
_counted: dict[bytes, int] = {}
"""The commas of slices of bodies, by digest, so that each slice is counted once in a conversation. Takes about 3 MB."""

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_TOO_MANY_MESSAGES = "The request has {count} messages, and this proxy takes {most} at most. Send fewer messages."
_TOO_MANY_VALUES = "The request has over {most} JSON values. Send fewer messages, content parts, or tools."

_NOTHING = msgspec.Raw()


class _Wire(msgspec.Struct):
    """The fields that the proxy uses, undecoded."""

    model: msgspec.Raw = _NOTHING
    stream: msgspec.Raw = _NOTHING
    messages: list[msgspec.Raw] | None = None
    tools: msgspec.Raw = _NOTHING
    functions: msgspec.Raw = _NOTHING
    tool_choice: msgspec.Raw = _NOTHING
    response_format: msgspec.Raw = _NOTHING
    max_tokens: msgspec.Raw = _NOTHING
    max_completion_tokens: msgspec.Raw = _NOTHING


class _Lists(msgspec.Struct):
    messages: msgspec.Raw = _NOTHING
    tools: msgspec.Raw = _NOTHING


_decoder = msgspec.json.Decoder(_Wire)
_lists_decoder = msgspec.json.Decoder(_Lists)
_any_decoder = msgspec.json.Decoder()
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])

OUTPUT_FIELDS = ("max_completion_tokens", "max_tokens")
OVERHEAD_FIELDS = ("tools", "functions", "tool_choice", "response_format")

# A lone surrogate, as JavaScript writes it after cutting a text within an emoji. Python's parser accepts it, msgspec
# doesn't. An even number of backslashes before it belongs to other escapes.
_LONE_SURROGATE = re.compile(
    rb"(?<!\\)((?:\\\\)*)\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD])[c-fC-F][0-9a-fA-F]{2})"
)


class ChatRequest(msgspec.Struct, eq=False):
    """A request as the client sent it. ``units`` are the bytes of each message, unchanged.

    ``model`` is ``None`` if the field is missing or isn't a string. ``max_output`` is the requested limit on output, in
    tokens. ``strict`` is a body that strict parsers accept, if they reject ``raw``.
    """

    raw: bytes
    model: str | None
    stream: bool
    units: list[msgspec.Raw]
    max_output: int | None
    overhead: tuple[bytes, ...]
    strict: bytes | None = None

    @property
    def size(self) -> int:
        """Return the bytes of memory that the body takes."""
        return len(self.raw) + (0 if self.strict is None else len(self.strict))

    def named(self, model: str) -> ChatRequest:
        """Return the request with another model. Raises ``BadBody`` if the body isn't a JSON object."""
        return self if self.model == model else parse(self.rewritten(model=model))

    def release(self) -> None:
        """Drop every byte of the request from memory. The model and the other decoded fields stay."""
        self.raw = b""
        self.units = []
        self.overhead = (b"", b"", b"", b"")
        self.strict = None

    def overhead_fields(self) -> dict[str, Any]:
        """Return tools, functions, tool choice, and response format, decoded. They take tokens, too."""
        return {name: _value(raw) for name, raw in zip(OVERHEAD_FIELDS, self.overhead, strict=True) if raw}

    def rewritten(
        self,
        *,
        units: Sequence[bytes] | None = None,
        model: str | None = None,
        max_output: int | None = None,
    ) -> bytes:
        """Return the body with other messages, another model, or a request for at most ``max_output`` tokens of output.

        Every other value keeps its bytes and its place. Raises ``BadBody`` if the body isn't a JSON object.
        """
        if units is None and model is None and max_output is None:
            return self.raw
        try:
            fields = _fields_decoder.decode(self.raw if self.strict is None else self.strict)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadBody("The body is not plain JSON in UTF-8. Send it as the API asks for it.") from error
        if units is not None:
            fields["messages"] = msgspec.Raw(b"[" + b",".join(units) + b"]")
        if model is not None:
            fields["model"] = msgspec.Raw(msgspec.json.encode(model))
        if max_output is not None:
            for name in OUTPUT_FIELDS:
                if name in fields and (_positive(fields[name]) or 0) > max_output:
                    fields[name] = msgspec.Raw(b"%d" % max_output)
        return msgspec.json.encode(fields)


async def parsed(raw: bytes, *, chat: bool = True) -> ChatRequest:
    """Parse a request of any size. Raises ``BadBody`` for more than ``MAX_VALUES`` values or ``MAX_MESSAGES`` messages.

    A body is measured before any of its values takes memory. Without ``chat``, a body without messages and
    tools has no limit: an embeddings request can have millions of tokens as numbers, which aren't decoded.
    """
    if len(raw) > MAX_VALUES and (chat or _may_have_lists(raw)):
        quick = len(raw) <= INLINE_BYTES
        few = _has_few_commas(raw) if quick else await asyncio.to_thread(_has_few_commas, raw)
        if not few and await asyncio.to_thread(_has_many_values, raw):
            raise BadBody(_TOO_MANY_VALUES.format(most=MAX_VALUES))
    body = parse(raw) if len(raw) <= INLINE_BYTES else await asyncio.to_thread(parse, raw)
    if len(body.units) > MAX_MESSAGES:
        message = _TOO_MANY_MESSAGES.format(count=len(body.units), most=MAX_MESSAGES)
        raise BadBody(message, param="messages")
    return body


def _may_have_lists(raw: bytes) -> bool:
    """Return whether a body has messages or tools, which are decoded, or can't be read."""
    try:
        lists = _lists_decoder.decode(raw)
        return bool(bytes(lists.messages) or bytes(lists.tools))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return True


def _has_few_commas(raw: bytes) -> bool:
    """Return whether a body has at most ``MAX_VALUES`` commas, including those within strings.

    The turns of a conversation begin with the same bytes. Hashing a slice that was counted before takes a tenth of the
    time of counting it again.
    """
    commas = 0
    view = memoryview(raw)
    for start in range(0, len(raw), _COUNTED_SLICE):
        end = start + _COUNTED_SLICE
        digest = xxhash.xxh3_128_digest(view[start:end])
        found = _counted.get(digest)
        if found is None:
            found = raw.count(b",", start, end)
            if len(_counted) >= _MOST_COUNTED:
                _counted.clear()
            _counted[digest] = found
        commas += found
        if commas > MAX_VALUES:
            return False
    return True


def _has_many_values(raw: bytes) -> bool:
    """Return whether more than ``MAX_VALUES`` commas are outside of strings."""
    commas = end = 0
    for string in _STRING.finditer(raw):
        commas += raw.count(b",", end, string.start())
        if commas > MAX_VALUES:
            return True
        end = string.end()
    return commas + raw.count(b",", end) > MAX_VALUES


def parse(raw: bytes) -> ChatRequest:
    """Parse a body. If it isn't a JSON object with a list of messages, read only the model and ``stream``.

    The upstream judges such a body, because its parser may accept it.
    """
    strict = None
    wire = _wire(raw)
    if wire is None and (replaced := without_lone_surrogates(raw)) != raw:
        strict = replaced
        wire = _wire(strict)
    if wire is None:
        return _unread(raw)
    model = _value(wire.model)
    return ChatRequest(
        raw=raw,
        model=model if isinstance(model, str) else None,
        stream=_value(wire.stream) is True,
        units=wire.messages or [],
        max_output=_positive(wire.max_completion_tokens) or _positive(wire.max_tokens),
        overhead=(
            bytes(wire.tools),
            bytes(wire.functions),
            bytes(wire.tool_choice),
            bytes(wire.response_format),
        ),
        strict=strict,
    )


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


def _wire(raw: bytes) -> _Wire | None:
    try:
        return _decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # ValidationError is a DecodeError
        return None


def _unread(raw: bytes) -> ChatRequest:
    """Read only the model and ``stream`` of a body, if possible."""
    value = _leniently(raw)
    fields = value if isinstance(value, dict) else {}
    model = fields.get("model")
    # A URL or a log can't contain a lone surrogate.
    named = model.encode("utf-8", "replace").decode() if isinstance(model, str) else None
    return ChatRequest(raw, named, fields.get("stream") is True, [], None, (b"", b"", b"", b""))


def _value(raw: msgspec.Raw | bytes) -> Any:
    if not bytes(raw):
        return None
    try:
        return _any_decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _leniently(bytes(raw))


def _leniently(raw: bytes) -> Any:
    """Parse with Python's parser, which accepts numbers of any size, NaN, and any Unicode encoding."""
    try:
        return json.loads(raw, strict=False)
    except (ValueError, RecursionError):
        return None


def _positive(raw: msgspec.Raw) -> int | None:
    value = _value(raw)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 1:
        return None
    return int(value) if value < 1e12 else None
