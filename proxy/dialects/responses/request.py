"""Parse the body of a request for a response, and rewrite it with the fewest changes."""

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
    lower,
    named_fields,
    positive,
    value_of,
    without_lone_surrogates,
)
from proxy.dialects.responses.items import PREFIX_TYPES, joined, kind_by

_NOTHING = msgspec.Raw()


class _Wire(msgspec.Struct):
    """The fields that the proxy uses, undecoded."""

    model: msgspec.Raw = _NOTHING
    stream: msgspec.Raw = _NOTHING
    input: msgspec.Raw = _NOTHING
    instructions: msgspec.Raw = _NOTHING
    tools: msgspec.Raw = _NOTHING
    tool_choice: msgspec.Raw = _NOTHING
    text: msgspec.Raw = _NOTHING
    max_output_tokens: msgspec.Raw = _NOTHING


class _Item(msgspec.Struct):
    """The fields that decide the kind of an item."""

    type: Any = None
    role: Any = None
    call_id: Any = None


_decoder = msgspec.json.Decoder(_Wire)
_list_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_item_decoder = msgspec.json.Decoder(_Item)
_items_decoder = msgspec.json.Decoder(list[_Item])

OUTPUT_FIELDS = ("max_output_tokens",)
OVERHEAD_FIELDS = ("instructions", "tools", "tool_choice", "text", "compaction")
"""The fields that take tokens besides the units. ``compaction`` is the newest item of this type in the input."""


class ResponsesRequest(msgspec.Struct, eq=False):
    """A request as the client sent it. See ``dialects.dialect.Request``.

    ``prefix`` are the items up to the newest ``compaction`` item. They are sent unchanged, and only the last takes
    tokens. ``strict`` is a body that strict parsers accept, if they reject ``raw``.
    """

    raw: bytes
    model: str | None
    stream: bool
    units: list[bytes]
    max_output: int | None
    overhead: tuple[bytes, ...]
    prefix: list[bytes]
    strict: bytes | None = None

    @property
    def size(self) -> int:
        """Return the bytes of memory that the body takes."""
        return len(self.raw) + (0 if self.strict is None else len(self.strict))

    def named(self, model: str) -> ResponsesRequest:
        """Return the request with another model. Raises ``BadBody`` if the body isn't a JSON object."""
        return self if self.model == model else parse(self.rewritten(model=model))

    def release(self) -> None:
        """Drop every byte of the request from memory. The model and the other decoded fields stay."""
        self.raw = b""
        self.units = []
        self.prefix = []
        self.overhead = (b"",) * len(OVERHEAD_FIELDS)
        self.strict = None

    def overhead_fields(self) -> dict[str, Any]:
        """Return the fields of ``OVERHEAD_FIELDS``, decoded."""
        return {name: value_of(raw) for name, raw in zip(OVERHEAD_FIELDS, self.overhead, strict=True) if raw}

    def rewritten(
        self,
        *,
        units: Sequence[bytes] | None = None,
        model: str | None = None,
        max_output: int | None = None,
    ) -> bytes:
        """Return the body with other units, another model, or a request for at most ``max_output`` tokens of output.

        Every other value keeps its bytes and its place. Raises ``BadBody`` if the body isn't a JSON object.
        """
        if units is None and model is None and max_output is None:
            return self.raw
        fields = fields_of(self.raw if self.strict is None else self.strict)
        if units is not None and (self.units or units):
            fields["input"] = _input(bytes(fields["input"]), self.prefix, units)
        if model is not None:
            fields["model"] = encoded(model)
        if max_output is not None:
            lower(fields, OUTPUT_FIELDS, max_output)
        return msgspec.json.encode(fields)


def _input(before: bytes, prefix: Sequence[bytes], units: Sequence[bytes]) -> msgspec.Raw:
    """Return the input with these items and units. A string stays one if it is the only unit."""
    if before[:1] != b'"':
        return listed([*prefix, *filter(None, map(_items, units))])
    if len(units) == 1 and bytes(units[0][:1]) == b'"':
        return msgspec.Raw(units[0])
    return listed([_message(bytes(unit)) for unit in units])


def _items(unit: bytes) -> bytes:
    """Return the items of a unit, separated by commas."""
    raw = bytes(unit)
    return raw[1:-1] if raw[:1] == b"[" else raw


def _message(unit: bytes) -> bytes:
    """Return the user's message for a string."""
    return b'{"role":"user","content":' + unit + b"}" if unit[:1] == b'"' else unit


async def parsed(raw: bytes) -> ResponsesRequest:
    """Parse a request of any size. Raises ``BadBody`` for too many values or items.

    A body is measured before any of its values takes memory.
    """
    await check_values(raw)
    body = parse(raw) if len(raw) <= INLINE_BYTES else await asyncio.to_thread(parse, raw)
    check_messages(len(body.units), "input")
    return body


def parse(raw: bytes) -> ResponsesRequest:
    """Parse a body. If it isn't a JSON object, read only the model and ``stream``.

    The upstream judges such a body, because its parser may accept it.
    """
    strict = None
    wire = _wire(raw)
    if wire is None and (replaced := without_lone_surrogates(raw)) != raw:
        strict = replaced
        wire = _wire(strict)
    if wire is None:
        model, stream = named_fields(raw)
        return ResponsesRequest(raw, model, stream, [], None, (b"",) * len(OVERHEAD_FIELDS), [])
    model = value_of(wire.model)
    prefix, units = _split(wire.input)
    return ResponsesRequest(
        raw=raw,
        model=model if isinstance(model, str) else None,
        stream=value_of(wire.stream) is True,
        units=units,
        max_output=positive(wire.max_output_tokens),
        overhead=(
            bytes(wire.instructions),
            bytes(wire.tools),
            bytes(wire.tool_choice),
            bytes(wire.text),
            prefix[-1] if prefix else b"",
        ),
        prefix=prefix,
        strict=strict,
    )


def _wire(raw: bytes) -> _Wire | None:
    try:
        return _decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # ValidationError is a DecodeError
        return None


def _split(value: msgspec.Raw) -> tuple[list[bytes], list[bytes]]:
    """Return the items of the fixed prefix, and the units after it."""
    raw = bytes(value)
    if raw[:1] == b'"':
        return [], [raw]
    if raw[:1] != b"[":
        return [], []
    try:
        items = [bytes(item) for item in _list_decoder.decode(raw)]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return [], []
    shapes = _shapes(raw, items)
    if shapes and shapes[-1].type == "compaction_trigger":
        return [], []  # the client asks the upstream to compact
    start = max((place + 1 for place, shape in enumerate(shapes) if _replaces(shape)), default=0)
    return items[:start], _units(items[start:], shapes[start:])


def _replaces(shape: _Item) -> bool:
    return isinstance(shape.type, str) and shape.type in PREFIX_TYPES


def _units(items: Sequence[bytes], shapes: Sequence[_Item]) -> list[bytes]:
    """Join each run of the assistant's items."""
    units: list[bytes] = []
    run: list[bytes] = []
    for item, shape in zip(items, shapes, strict=True):
        if kind_by(shape.type, shape.role, shape.call_id) == "assistant":
            run.append(item)
            continue
        if run:
            units.append(joined(run))
            run = []
        # An array isn't an item. As a unit it has brackets around it, like a run.
        units.append(joined([item]))
    return [*units, joined(run)] if run else units


def _shapes(raw: bytes, items: Sequence[bytes]) -> list[_Item]:
    """Return the fields that decide the kind of each item. Usually all items are objects."""
    try:
        return _items_decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return [_shape(item) for item in items]


def _shape(item: bytes) -> _Item:
    try:
        return _item_decoder.decode(item)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _Item()
