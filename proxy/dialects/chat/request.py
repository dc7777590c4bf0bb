"""Parse the body of a chat completion request, and rewrite it with the fewest changes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from proxy.dialects.body import (
    INLINE_BYTES,
    MAX_VALUES,
    check_messages,
    check_values,
    encoded,
    fields_of,
    listed,
    lower,
    named_fields,
    positive,
    value_of,
    without_lone_surrogates,
)

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

OUTPUT_FIELDS = ("max_completion_tokens", "max_tokens")
OVERHEAD_FIELDS = ("tools", "functions", "tool_choice", "response_format")


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
        return {name: value_of(raw) for name, raw in zip(OVERHEAD_FIELDS, self.overhead, strict=True) if raw}

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
        fields = fields_of(self.raw if self.strict is None else self.strict)
        if units is not None:
            fields["messages"] = listed(units)
        if model is not None:
            fields["model"] = encoded(model)
        if max_output is not None:
            lower(fields, OUTPUT_FIELDS, max_output)
        return msgspec.json.encode(fields)


async def parsed(raw: bytes, *, chat: bool = True) -> ChatRequest:
    """Parse a request of any size. Raises ``BadBody`` for more than ``MAX_VALUES`` values or ``MAX_MESSAGES`` messages.

    A body is measured before any of its values takes memory. Without ``chat``, a body without messages and
    tools has no limit: an embeddings request can have millions of tokens as numbers, which aren't decoded.
    """
    if len(raw) > MAX_VALUES and (chat or _may_have_lists(raw)):
        await check_values(raw)
    body = parse(raw) if len(raw) <= INLINE_BYTES else await asyncio.to_thread(parse, raw)
    check_messages(len(body.units), "messages")
    return body


def _may_have_lists(raw: bytes) -> bool:
    """Return whether a body has messages or tools, which are decoded, or can't be read."""
    try:
        lists = _lists_decoder.decode(raw)
        return bool(bytes(lists.messages) or bytes(lists.tools))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return True


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
    model = value_of(wire.model)
    return ChatRequest(
        raw=raw,
        model=model if isinstance(model, str) else None,
        stream=value_of(wire.stream) is True,
        units=wire.messages or [],
        max_output=positive(wire.max_completion_tokens) or positive(wire.max_tokens),
        overhead=(
            bytes(wire.tools),
            bytes(wire.functions),
            bytes(wire.tool_choice),
            bytes(wire.response_format),
        ),
        strict=strict,
    )


def _wire(raw: bytes) -> _Wire | None:
    try:
        return _decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # ValidationError is a DecodeError
        return None


def _unread(raw: bytes) -> ChatRequest:
    """Read only the model and ``stream`` of a body, if possible."""
    model, stream = named_fields(raw)
    return ChatRequest(raw, model, stream, [], None, (b"", b"", b"", b""))
