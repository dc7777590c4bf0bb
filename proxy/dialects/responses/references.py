"""Put items in the place of references to them, and back.

The engine works with the items, so it counts and summarizes their text. The upstream gets the references that the
client sent, unless an item changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from proxy.dialects.responses.items import items_of, joined, kind_of, raws_of
from proxy.dialects.unit_json import Message, decode, encode

REFERENCE = "item_reference"

TOKENS = "tokens"
"""The field with the reported size of an item that the proxy doesn't know. It never leaves the proxy."""

_MARK = b"item_reference"


class References:
    """The references of a request, with the items that replace them.

    ``size`` is an upper bound on their bytes and their tokens. ``unknown`` is true if it doesn't cover all references.
    """

    def __init__(self, items: Mapping[str, bytes], sizes: Mapping[str, int]) -> None:
        """``items`` and ``sizes`` are by id. ``sizes`` are in tokens."""
        self._items = items
        self._sizes = sizes
        self._references: dict[bytes, bytes] = {}
        self.size = 0
        self.unknown = False

    def resolved(self, unit: bytes) -> bytes:
        """Return a unit with the known items of its references."""
        if _MARK not in bytes(unit):  # a ``msgspec.Raw`` can't be searched
            return unit
        return joined([self._item(raw) for raw in raws_of(unit)])

    def restored(self, unit: bytes) -> bytes:
        """Return a unit with references in the place of items that didn't change."""
        if not self._references:
            return unit
        raws = raws_of(unit)
        before = [self._references.get(bytes(raw), raw) for raw in raws]
        return unit if all(new is old for new, old in zip(before, raws, strict=True)) else joined(before)

    def _item(self, raw: bytes) -> bytes:
        reference = decode(raw)
        id = reference.get("id")
        if reference.get("type") != REFERENCE or not isinstance(id, str):
            return raw
        item = self._items.get(id)
        if item is not None and kind_of(decode(item)) != "assistant":
            item = None  # an output isn't a part of the assistant's run
        if item is None and id in self._sizes:
            item = encode({**reference, TOKENS: self._sizes[id]})
            self.size += self._sizes[id]
        if item is None:
            self.unknown = True
            return raw
        self._references[item] = raw
        self.size += len(item)
        return item


def reported_tokens(reference: Message) -> int:
    """Return the reported size of an unknown item; 0 if there is none."""
    tokens = reference.get(TOKENS)
    return tokens if isinstance(tokens, int) and tokens > 0 else 0


def unsized(units: Sequence[bytes]) -> list[str]:
    """Return the ids of references without a size."""
    items = (item for unit in units if _MARK in bytes(unit) for item in items_of(unit))
    return [item["id"] for item in items if item.get("type") == REFERENCE and TOKENS not in item and "id" in item]
