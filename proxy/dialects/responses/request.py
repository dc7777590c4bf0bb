"""Parse the body of a request for a response, and rewrite it with the fewest changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import msgspec

from proxy.constants import UNDECODABLE
from proxy.dialects.request import (
    NOTHING,
    Request,
    Wire,
    fields_of,
    listed,
    lower,
    positive,
    value_of,
)
from proxy.dialects.responses.references import REFERENCE, References, place_after, places_of, unsized
from proxy.dialects.responses.units import item_row, joined, kind_by
from proxy.dialects.units import ByDigest


class _Fields(Wire):
    instructions: msgspec.Raw = NOTHING
    tools: msgspec.Raw = NOTHING
    tool_choice: msgspec.Raw = NOTHING
    text: msgspec.Raw = NOTHING
    max_output_tokens: msgspec.Raw = NOTHING
    store: msgspec.Raw = NOTHING
    previous_response_id: msgspec.Raw = NOTHING
    conversation: msgspec.Raw = NOTHING
    background: msgspec.Raw = NOTHING


class _Listed(_Fields):
    input: list[msgspec.Raw] = msgspec.field(default_factory=list)


class _Other(_Fields):
    input: msgspec.Raw = NOTHING


class _Item(msgspec.Struct):
    """The fields that decide the kind of an item."""

    type: Any = None
    role: Any = None
    call_id: Any = None
    execution: Any = None
    name: object = None
    id: Any = None


_listed_decoder = msgspec.json.Decoder(_Listed)
_other_decoder = msgspec.json.Decoder(_Other)
_item_decoder = msgspec.json.Decoder(_Item)

OUTPUT_FIELDS = ("max_output_tokens",)


class ResponsesRequest(Request, eq=False):
    """A request as the client sent it. See ``dialects.request.Request``.

    ``prefix`` are the items up to the newest ``compaction`` item. They are sent unchanged, and only the last takes
    tokens. ``placed`` are the items in ``units`` that the client only refers to. ``background``: the upstream may make
    the response in the background.
    """

    OVERHEAD = ("instructions", "tools", "tool_choice", "text", "compaction")
    CONVERSATION = "input"

    prefix: Sequence[bytes] = []
    references: Sequence[str] = ()
    may_refer: bool = False
    continues: bool = False
    hidden: float = 0
    placed: References | None = None
    background: bool = True

    @classmethod
    def _read(cls, raw: bytes) -> Self | None:
        try:
            wire, items = _decoded(raw)
        except UNDECODABLE:
            return None
        split = _split(items)
        prefix, references = split.prefix, split.references
        fields = (wire.instructions, wire.tools, wire.tool_choice, wire.text, prefix[-1] if prefix else b"")
        return cls(
            raw=raw,
            **wire.shared,
            units=split.units,
            max_output=positive(wire.max_output_tokens),
            overhead=tuple(map(bytes, fields)),
            received=items,
            prefix=prefix,
            references=references,
            may_refer=value_of(wire.store) is not False and (bool(references) or not split.repeats),
            continues=_continues(wire.previous_response_id, wire.conversation),
            hidden=float("inf") if references else 0,
            background=value_of(wire.background) is True,
        )

    @property
    def compacted(self) -> bool:
        return bool(self.prefix)

    @property
    def size(self) -> int:
        return super().size + (0 if self.placed is None else self.placed.size)

    def release(self) -> None:
        super().release()
        self.prefix = []
        self.placed = None

    def place(self) -> str:
        return place_after(reversed(self.units))

    def places(self) -> Iterable[tuple[str, str]]:
        return places_of(self.units)

    def resolve(self, items: Mapping[str, bytes], sizes: Mapping[str, int]) -> None:
        self.placed = References(items, sizes)
        self.units = list(map(self.placed.resolved, self.units))
        self.hidden = float("inf") if self.placed.unknown else self.placed.size

    def expanded(self, body: bytes, units: Sequence[bytes] | None = None) -> bytes:
        fields = fields_of(body)
        fields["input"] = _input(bytes(fields["input"]), self.prefix, self.units if units is None else units)
        return msgspec.json.encode(fields)

    def unsized(self, units: Sequence[bytes]) -> list[str]:
        return unsized(units) if self.references else []

    def _replace_units(self, fields: dict[str, msgspec.Raw], units: Sequence[bytes]) -> None:
        if self.placed is not None:
            units = list(map(self.placed.restored, units))
        if self.units or units:
            fields["input"] = _input(bytes(fields["input"]), self.prefix, units)

    def _lower_output(self, fields: dict[str, msgspec.Raw], most: int) -> None:
        lower(fields, OUTPUT_FIELDS, most)


parse = ResponsesRequest.parse


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


def _decoded(raw: bytes) -> tuple[_Fields, Sequence[bytes]]:
    """Return the fields of a body, and the items of its input. A string is one item, and other values have none."""
    try:
        listed = _listed_decoder.decode(raw)
    except msgspec.ValidationError:
        other = _other_decoder.decode(raw)
        return other, [other.input] if bytes(other.input).startswith(b'"') else []
    return listed, listed.input


class _Split(NamedTuple):
    """The items of the fixed prefix, the units after it, and the ids of references in them.

    ``repeats`` is true if the client repeats items that one with references wouldn't repeat in full.
    """

    prefix: Sequence[bytes]
    units: Sequence[bytes]
    references: tuple[str, ...] = ()
    repeats: bool = False


def _split(items: Sequence[bytes]) -> _Split:
    """Split the items of an input."""
    if items and _shape(items[-1]).type == "compaction_trigger":
        return _Split([], [])
    parts = _parts.of(items)
    start = len(parts) - parts[::-1].index(_PREFIX) if _PREFIX in parts else 0
    references: tuple[str, ...] = ()
    if _REFERENCE in parts:
        ids = [_shape(item).id for item, part in zip(items[start:], parts[start:], strict=True) if part == _REFERENCE]
        references = tuple(id for id in ids if isinstance(id, str))
    units = _units(items[start:], parts[start:])
    return _Split(items[:start], units, references, _REPEATED in parts)


def _units(items: Sequence[bytes], parts: Sequence[str]) -> list[bytes]:
    """Join each run of the assistant's items."""
    units: list[bytes] = []
    run: list[bytes] = []
    for item, part in zip(items, parts, strict=True):
        if part in _ASSISTANT:
            run.append(item)
            continue
        if run:
            units.append(joined(run))
            run = []
        # An array isn't an item. As a unit it has brackets around it, like a run.
        units.append(item if part else joined([item]))
    return [*units, joined(run)] if run else units


def _part(item: bytes) -> str:
    """Return the kind of an item, or ``_PREFIX`` if it replaces everything before it.

    Of the assistant's items, references are ``_REFERENCE``. Reasoning and messages with an id are ``_REPEATED``.
    """
    shape = _shape(item)
    if item_row({"type": shape.type}).plays == "prefix":
        return _PREFIX
    if shape.type == REFERENCE:
        return _REFERENCE
    kind = kind_by(shape.type, shape.role, shape.call_id, shape.execution, shape.name)
    if shape.type == "reasoning" or (shape.role == "assistant" and isinstance(shape.id, str)):
        return _REPEATED if kind == "assistant" else ""
    return kind


def _shape(item: bytes) -> _Item:
    try:
        return _item_decoder.decode(item)
    except UNDECODABLE:
        return _Item()


_PREFIX = "prefix"
_REFERENCE = "reference"
_REPEATED = "repeated"
_ASSISTANT = frozenset({"assistant", _REFERENCE, _REPEATED})
_parts = ByDigest(_part)


def _continues(previous_response_id: msgspec.Raw, conversation: msgspec.Raw) -> bool:
    """Return whether the server has a part of the history: by an earlier response, or in a stored conversation.

    A missing field is empty.
    """
    previous = value_of(previous_response_id)
    return (isinstance(previous, str) and previous != "") or value_of(conversation) not in (None, "")
