"""Parse the body of a chat completion request, and rewrite it with the fewest changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import msgspec

from proxy.constants import UNDECODABLE
from proxy.dialects.messages.request import layouts_of, regrouped, split
from proxy.dialects.request import (
    MAX_VALUES,
    NOTHING,
    BlocksRequest,
    Wire,
    encoded,
    fields_of,
    listed,
    lower,
    positive,
    value_of,
)
from proxy.errors import BadBody


class _Wire(Wire):
    messages: list[msgspec.Raw] | None = None
    tools: msgspec.Raw = NOTHING
    functions: msgspec.Raw = NOTHING
    tool_choice: msgspec.Raw = NOTHING
    response_format: msgspec.Raw = NOTHING
    max_tokens: msgspec.Raw = NOTHING
    max_completion_tokens: msgspec.Raw = NOTHING


class _Lists(msgspec.Struct):
    messages: msgspec.Raw = NOTHING
    tools: msgspec.Raw = NOTHING


_decoder = msgspec.json.Decoder(_Wire)
_lists_decoder = msgspec.json.Decoder(_Lists)

_RESULT_BLOCK = b'"tool_result"'

OUTPUT_FIELDS = ("max_completion_tokens", "max_tokens")


class ChatRequest(BlocksRequest, eq=False):
    """A request as the client sent it. ``units`` are the bytes of each message, unchanged.

    Messages with results as blocks of the Messages API are split like there.
    """

    OVERHEAD = ("tools", "functions", "tool_choice", "response_format")

    @classmethod
    def _read(cls, raw: bytes) -> Self | None:
        try:
            wire = _decoder.decode(raw)
        except UNDECODABLE:
            return None
        messages: Sequence[bytes] = wire.messages or []
        with_blocks = _RESULT_BLOCK in raw
        units, splits = split(messages, layouts_of(messages)) if with_blocks else (messages, {})
        return cls(
            raw=raw,
            **wire.shared,
            units=units,
            splits=splits,
            received=messages,
            max_output=positive(wire.max_completion_tokens) or positive(wire.max_tokens),
            overhead=(bytes(wire.tools), bytes(wire.functions), bytes(wire.tool_choice), bytes(wire.response_format)),
        )

    def _replace_units(self, fields: dict[str, msgspec.Raw], units: Sequence[bytes]) -> None:
        fields["messages"] = listed(regrouped(units, self.splits) if self.splits else units)

    def _lower_output(self, fields: dict[str, msgspec.Raw], most: int) -> None:
        lower(fields, OUTPUT_FIELDS, most)

    @classmethod
    async def read_any(cls, raw: bytes) -> Self:
        """Parse a body that may not be a conversation. One without messages and tools has any number of values.

        An embeddings request can have millions of tokens as numbers, which aren't decoded. Raises ``BadBody``.
        """
        if len(raw) > MAX_VALUES and not _may_have_lists(raw):
            return await cls._read_bounded(raw)
        return await cls.read(raw)


parse = ChatRequest.parse


def _may_have_lists(raw: bytes) -> bool:
    """Return whether a body has messages or tools, which are decoded, or can't be read."""
    try:
        lists = _lists_decoder.decode(raw)
        return bool(bytes(lists.messages) or bytes(lists.tools))
    except UNDECODABLE:
        return True


def asks_usage(raw: bytes) -> bool:
    """Return whether a body asks for the usage of its stream, or can't be changed to do so."""
    if b"stream_options" not in raw:
        return False
    try:
        options = value_of(fields_of(raw).get("stream_options", msgspec.Raw(b"null")))
    except BadBody:
        return True
    if options is None:
        return False
    # The upstream judges a value that isn't valid.
    return not isinstance(options, dict) or options.get("include_usage", False) is not False


_ASKED = b'"stream_options":{"include_usage":true}'


def with_usage(body: bytes) -> bytes:
    """Return a body that asks for the usage of its stream. Every other value keeps its bytes and its place.

    Raises ``BadBody`` if the body isn't a JSON object.
    """
    end = body.rfind(b"}")
    if b'"stream_options"' not in body and b":" in body[:end]:
        return b"%b,%b%b" % (body[:end], _ASKED, body[end:])
    fields = fields_of(body)
    options = value_of(fields.get("stream_options", msgspec.Raw(b"null")))
    asked = {**(options or {}), "include_usage": True}
    fields["stream_options"] = encoded(asked)
    return msgspec.json.encode(fields)
