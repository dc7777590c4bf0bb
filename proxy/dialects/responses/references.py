"""Put items in the place of references to them, and back.

The engine works with the items, so it counts and summarizes their text. The upstream gets the references that the
client sent, unless an item changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from proxy.dialects.identity import digest
from proxy.dialects.responses.units import items_of, joined, kind_of, raws_of, with_content
from proxy.dialects.units import ByDigest, Message, decode, encode

REFERENCE = "item_reference"

TOKENS = "tokens"  # The field with the reported size of an item that the proxy doesn't know. It never leaves the proxy.

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


PLACED_BY = 4
"""The newest of the client's own items that identify a place. Older ones don't count, because clients trim them."""


def place_after(units: Iterable[bytes]) -> str:
    """Return what identifies the end of a conversation: the client's newest messages and results.

    ``units`` are the newest first. The result is the same when the client refers to the answer later. In another
    conversation it differs, even if the upstream uses the answer's id there again.
    """
    newest = filter(None, map(_own.one, units))
    return _place([*islice(newest, PLACED_BY)][::-1])


def places_of(units: Sequence[bytes]) -> Iterator[tuple[str, str]]:
    """Yield the id of each reference, and what identifies its place."""
    recent: deque[bytes] = deque(maxlen=PLACED_BY)
    for unit, mark in zip(units, _own.of(units), strict=True):
        if mark:
            recent.append(mark)
        elif _MARK in bytes(unit):
            place = _place(recent)
            for item in items_of(unit):
                if item.get("type") == REFERENCE and isinstance(item.get("id"), str):
                    yield item["id"], place


def _place(marks: Iterable[bytes]) -> str:
    return digest([mark.hex() for mark in marks]).hex()[:32]


def _own_mark(unit: bytes) -> bytes:
    """Return the digest of a user's message or a tool's result; no bytes for other units."""
    item = next(iter(items_of(unit)), {})
    if kind_of(item) not in ("user", "result"):
        return b""
    content = with_content(item).get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and set(part) == {"type", "text"} for part in content):
        content = "".join(str(part["text"]) for part in content)
    return digest([item.get("call_id"), content])


_own: ByDigest[bytes] = ByDigest(_own_mark)


def reported_tokens(reference: Message) -> int:
    """Return the reported size of an unknown item; 0 if there is none."""
    tokens = reference.get(TOKENS)
    return tokens if isinstance(tokens, int) and tokens > 0 else 0


def unsized(units: Sequence[bytes]) -> list[str]:
    """Return the ids of references without a size."""
    items = (item for unit in units if _MARK in bytes(unit) for item in items_of(unit))
    return [item["id"] for item in items if item.get("type") == REFERENCE and TOKENS not in item and "id" in item]
