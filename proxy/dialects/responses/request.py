"""Parse the body of a request for a response, and rewrite it with the fewest changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import msgspec

from proxy.dialects.body import (
    NOTHING,
    UNREADABLE,
    BodyRequest,
    Wire,
    check_values,
    listed,
    lower,
    parse_bounded,
    positive,
)
from proxy.dialects.digests import ByDigest
from proxy.dialects.responses.items import PREFIX_TYPES, joined, kind_by


class _Fields(Wire):
    instructions: msgspec.Raw = NOTHING
    tools: msgspec.Raw = NOTHING
    tool_choice: msgspec.Raw = NOTHING
    text: msgspec.Raw = NOTHING
    max_output_tokens: msgspec.Raw = NOTHING


class _Listed(_Fields):
    input: list[msgspec.Raw] = msgspec.field(default_factory=list)


class _Other(_Fields):
    input: msgspec.Raw = NOTHING


class _Item(msgspec.Struct):
    """The fields that decide the kind of an item."""

    type: Any = None
    role: Any = None
    call_id: Any = None


_listed_decoder = msgspec.json.Decoder(_Listed)
_other_decoder = msgspec.json.Decoder(_Other)
_item_decoder = msgspec.json.Decoder(_Item)

OUTPUT_FIELDS = ("max_output_tokens",)


class ResponsesRequest(BodyRequest, eq=False):
    """A request as the client sent it. See ``dialects.dialect.Request``.

    ``prefix`` are the items up to the newest ``compaction`` item. They are sent unchanged, and only the last takes
    tokens.
    """

    OVERHEAD = ("instructions", "tools", "tool_choice", "text", "compaction")

    prefix: Sequence[bytes] = []

    @classmethod
    def _read(cls, raw: bytes) -> Self | None:
        try:
            wire, items = _decoded(raw)
        except UNREADABLE:
            return None
        prefix, units = _split(items)
        fields = (wire.instructions, wire.tools, wire.tool_choice, wire.text, prefix[-1] if prefix else b"")
        return cls(
            raw=raw,
            model=wire.model_name,
            stream=wire.streams,
            units=units,
            max_output=positive(wire.max_output_tokens),
            overhead=tuple(map(bytes, fields)),
            sent=len(items),
            prefix=prefix,
        )

    def release(self) -> None:
        super().release()
        self.prefix = []

    def _replace_units(self, fields: dict[str, msgspec.Raw], units: Sequence[bytes]) -> None:
        if self.units or units:
            fields["input"] = _input(bytes(fields["input"]), self.prefix, units)

    def _lower_output(self, fields: dict[str, msgspec.Raw], most: int) -> None:
        lower(fields, OUTPUT_FIELDS, most)


parse = ResponsesRequest.parse


async def parsed(raw: bytes) -> ResponsesRequest:
    """Parse a request of any size. Raises ``BadBody`` for too many values or items.

    A body is measured before any of its values takes memory.
    """
    await check_values(raw)
    return await parse_bounded(raw, parse, "input")


def _input(before: bytes, prefix: Sequence[bytes], units: Sequence[bytes]) -> msgspec.Raw:
    """Return the input with these items and units. A string stays one if it is the only unit."""
    if before[:1] != b'"':
        return listed([*prefix, *filter(None, map(_items, units))])
    if len(units) == 1 and bytes(units[0])[:1] == b'"':
        return msgspec.Raw(units[0])
    return listed([_message(bytes(unit)) for unit in units])


def _items(unit: bytes) -> bytes:
    """Return the items of a unit, separated by commas."""
    raw = bytes(unit)
    return raw[1:-1] if raw[:1] == b"[" else raw


def _message(unit: bytes) -> bytes:
    """Return the user's message for a string."""
    return b'{"role":"user","content":' + unit + b"}" if unit[:1] == b'"' else unit


def _decoded(raw: bytes) -> tuple[_Fields, list[msgspec.Raw]]:
    """Return the fields of a body, and the items of its input. A string is one item, and other values have none."""
    try:
        listed = _listed_decoder.decode(raw)
    except msgspec.ValidationError:
        other = _other_decoder.decode(raw)
        return other, [other.input] if bytes(other.input).startswith(b'"') else []
    return listed, listed.input


def _split(items: list[msgspec.Raw]) -> tuple[list[msgspec.Raw], list[bytes]]:
    """Return the items of the fixed prefix, and the units after it."""
    if items and _shape(items[-1]).type == "compaction_trigger":
        return [], []  # the client asks the upstream to compact
    parts = _parts.of(items)
    start = len(parts) - parts[::-1].index(_PREFIX) if _PREFIX in parts else 0
    return items[:start], _units(items[start:], parts[start:])


def _units(items: Sequence[bytes], parts: Sequence[str]) -> list[bytes]:
    """Join each run of the assistant's items."""
    units: list[bytes] = []
    run: list[bytes] = []
    for item, part in zip(items, parts, strict=True):
        if part == "assistant":
            run.append(item)
            continue
        if run:
            units.append(joined(run))
            run = []
        # An array isn't an item. As a unit it has brackets around it, like a run.
        units.append(item if part else joined([item]))
    return [*units, joined(run)] if run else units


def _part(item: bytes) -> str:
    """Return the kind of an item, or ``_PREFIX`` if it replaces everything before it."""
    shape = _shape(item)
    if isinstance(shape.type, str) and shape.type in PREFIX_TYPES:
        return _PREFIX
    return kind_by(shape.type, shape.role, shape.call_id)


def _shape(item: bytes) -> _Item:
    try:
        return _item_decoder.decode(item)
    except UNREADABLE:
        return _Item()


_PREFIX = "prefix"
_parts = ByDigest(_part)
