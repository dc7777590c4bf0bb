"""Parse the body of a Messages request, and rewrite it with the fewest changes.

An assistant's message is one unit, and so is a user's message without tool results. A user's message with tool results
is split into one unit for each result and one for the other blocks, because a part of it may be kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from proxy.dialects.body import (
    INLINE_BYTES,
    check_messages,
    check_values,
    encoded,
    fields_of,
    listed,
    named_fields,
    positive,
    value_of,
    without_lone_surrogates,
)
from proxy.dialects.messages.joining import Split, joined, prefix_length, split

_NOTHING = msgspec.Raw()

OVERHEAD_FIELDS = ("system", "tools", "tool_choice", "output_config", "output_format", "mcp_servers")


class _Wire(msgspec.Struct):
    """The fields that the proxy uses, undecoded."""

    model: msgspec.Raw = _NOTHING
    stream: msgspec.Raw = _NOTHING
    messages: list[msgspec.Raw] | None = None
    max_tokens: msgspec.Raw = _NOTHING
    system: msgspec.Raw = _NOTHING
    tools: msgspec.Raw = _NOTHING
    tool_choice: msgspec.Raw = _NOTHING
    output_config: msgspec.Raw = _NOTHING
    output_format: msgspec.Raw = _NOTHING
    mcp_servers: msgspec.Raw = _NOTHING


class _Threaded(msgspec.Struct):
    thread: msgspec.Raw = _NOTHING


_decoder = msgspec.json.Decoder(_Wire)
_thread_decoder = msgspec.json.Decoder(_Threaded)


class MessagesRequest(msgspec.Struct, eq=False):
    """A request as the client sent it. See ``dialects.dialect.Request``.

    ``prefix`` are the messages up to the newest compaction block. The upstream ignores those before the block, so they
    aren't units and stay unchanged. ``splits`` are the messages that several units were made from, by the identity of
    their first unit. ``strict`` is a body that strict parsers accept, if they reject ``raw``.
    """

    raw: bytes
    model: str | None
    stream: bool
    units: list[bytes | msgspec.Raw]
    max_output: int | None
    overhead: tuple[bytes, ...]
    prefix: list[msgspec.Raw] = []
    splits: dict[int, Split] = {}
    strict: bytes | None = None

    @property
    def size(self) -> int:
        """Return the bytes of memory that the body takes."""
        made = sum(len(unit) for part in self.splits.values() for unit in part.units)
        return len(self.raw) + made + (0 if self.strict is None else len(self.strict))

    def named(self, model: str) -> MessagesRequest:
        """Return the request with another model. Raises ``BadBody`` if the body isn't a JSON object."""
        return self if self.model == model else parse(self.rewritten(model=model))

    def release(self) -> None:
        """Drop every byte of the request from memory. The model and the other decoded fields stay."""
        self.raw = b""
        self.units = []
        self.prefix = []
        self.splits = {}
        self.overhead = (b"",) * len(self.overhead)
        self.strict = None

    def overhead_fields(self) -> dict[str, Any]:
        """Return the fields outside the conversation that take tokens, decoded."""
        names = (*OVERHEAD_FIELDS, "prefix")
        return {name: value_of(raw) for name, raw in zip(names, self.overhead, strict=True) if raw}

    def rewritten(
        self, *, units: Sequence[bytes] | None = None, model: str | None = None, max_output: int | None = None
    ) -> bytes:
        """Return the body with other units, another model, or less output; ``raw`` itself if nothing changes.

        Every other value keeps its bytes and its place. Raises ``BadBody`` if the body isn't a JSON object.
        """
        if units is not None and self._same(units):
            units = None
        if units is None and model is None and max_output is None:
            return self.raw
        fields = fields_of(self.raw if self.strict is None else self.strict)
        if units is not None:
            fields["messages"] = listed([*self.prefix, *joined(units, self.splits)])
        if model is not None:
            fields["model"] = encoded(model)
        if max_output is not None and (positive(fields.get("max_tokens", _NOTHING)) or 0) > max_output:
            least = _thinking_tokens(fields.get("thinking", _NOTHING)) + 1
            fields["max_tokens"] = msgspec.Raw(b"%d" % max(max_output, least))
        return msgspec.json.encode(fields)

    def _same(self, units: Sequence[bytes]) -> bool:
        return len(units) == len(self.units) and all(a is b for a, b in zip(units, self.units, strict=True))


async def parsed(raw: bytes) -> MessagesRequest:
    """Parse a request of any size. Raises ``BadBody`` for too many messages or values."""
    await check_values(raw)
    body = parse(raw) if len(raw) <= INLINE_BYTES else await asyncio.to_thread(parse, raw)
    check_messages(len(body.units), "messages")
    return body


def parse(raw: bytes) -> MessagesRequest:
    """Parse a body. If it isn't a JSON object with a list of messages, read only the model and ``stream``.

    The upstream judges such a body, because its parser may accept it.
    """
    strict = None
    wire = _wire(raw)
    if wire is None and (replaced := without_lone_surrogates(raw)) != raw:
        strict = replaced
        wire = _wire(strict)
    if wire is None:
        model, stream = named_fields(raw)
        return MessagesRequest(raw, model, stream, [], None, (b"",) * (len(OVERHEAD_FIELDS) + 1))
    named = value_of(wire.model)
    messages = wire.messages or []
    start = prefix_length(messages)
    units, splits = split(messages[start:])
    return MessagesRequest(
        raw=raw,
        model=named if isinstance(named, str) else None,
        stream=value_of(wire.stream) is True,
        units=units,
        max_output=positive(wire.max_tokens),
        overhead=(*(bytes(getattr(wire, name)) for name in OVERHEAD_FIELDS), b"".join(_from_block(messages[:start]))),
        prefix=messages[:start],
        splits=splits,
        strict=strict,
    )


def continues(raw: bytes) -> bool:
    """Return whether a request continues a thread, whose earlier messages the server keeps."""
    if b'"thread"' not in raw:
        return False
    try:
        thread = value_of(_thread_decoder.decode(raw).thread)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return isinstance(thread, dict) and (thread.get("type") == "continue" or bool(thread.get("previous_message_id")))


def _from_block(prefix: Sequence[msgspec.Raw]) -> list[bytes]:
    """Return the message with the compaction block and what follows it, as a JSON array; empty without a prefix."""
    if not prefix:
        return []
    first = next(i for i in range(len(prefix) - 1, -1, -1) if prefix_length(prefix[i : i + 1]))
    return [bytes(listed(prefix[first:]))]


def _thinking_tokens(raw: msgspec.Raw) -> int:
    """Return the tokens that thinking may take. ``max_tokens`` must be larger."""
    thinking = value_of(raw)
    budget = thinking.get("budget_tokens") if isinstance(thinking, dict) else None
    return budget if isinstance(budget, int) and 0 < budget < 1e12 else 0


def _wire(raw: bytes) -> _Wire | None:
    try:
        return _decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # ValidationError is a DecodeError
        return None
