"""Decode, encode, and digest the JSON of one unit of a conversation."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Iterable, Mapping
from itertools import repeat
from typing import Any, Generic, TypeVar, cast

import msgspec
import xxhash

from proxy.constants import UNDECODABLE

T = TypeVar("T")

Message = Mapping[str, Any]

DEEPEST = 64
"""Levels of nesting. Deeper messages aren't read, because they could exceed the interpreter's recursion limit."""

MOST_RESULTS = 40_000
"""Results in a cache. A full cache is emptied. A result and its digest take up to a few hundred bytes."""

# Each process has its own seed, so clients can't construct collisions.
_SEED = secrets.randbits(64)


def decode(raw: bytes) -> Message:
    """Return the message as a mapping, empty if the value isn't an object. Never raise.

    Large numbers and lone surrogates, which strict parsers reject, are read like ``json`` reads them. Some values
    can't be read at all: invalid UTF-8, numbers with thousands of digits, or deep nesting. The result is then a
    message without a role that has the JSON as its content. It's counted but never changed.
    """
    try:
        value = _parsed(raw)
    except (ValueError, RecursionError):
        return _unread(raw)
    if not isinstance(value, dict):
        return {}
    # Most messages have fewer brackets than the allowed depth.
    plain = bytes(raw)  # ``msgspec.Raw`` has no ``count``
    brackets = plain.count(b"[") + plain.count(b"{")
    return _unread(raw) if brackets > DEEPEST and _too_deep(value) else value


def _parsed(raw: bytes) -> Any:
    try:
        return msgspec.json.decode(raw)
    except UNDECODABLE:
        return json.loads(bytes(raw))


def _unread(raw: bytes) -> Message:
    return {"content": bytes(raw).decode("utf-8", "replace")}


def _too_deep(value: object) -> bool:
    waiting: list[tuple[object, int]] = [(value, 0)]
    while waiting:
        item, depth = waiting.pop()
        if depth == DEEPEST:
            return True
        children = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        waiting += [(child, depth + 1) for child in children if isinstance(child, dict | list)]
    return False


def digest(value: object) -> bytes:
    """Return a digest of a value that doesn't depend on key order or on how the JSON is written."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")
    return hashlib.sha256(canonical).digest()


def encode(value: object) -> bytes:
    """Encode a value as JSON. Write lone surrogates, which aren't valid UTF-8, as escapes."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(value).encode("ascii")


def replace_field(raw: bytes, key: str, value: object) -> bytes:
    """Replace one field of a message. The other fields keep their bytes."""
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        return encode({**decode(raw), key: value})  # lone surrogates in other fields
    fields[key] = msgspec.Raw(encode(value))
    return msgspec.json.encode(fields)


class ByDigest(Generic[T]):
    """The results of a function of bytes, by the digests of the bytes. A result may not be ``None``. Thread-safe.

    The turns of a conversation begin with the same bytes. Hashing them takes a tenth of the time of parsing them again.
    """

    def __init__(self, compute: Callable[[bytes], T], most: int = MOST_RESULTS) -> None:
        self._compute = compute
        self._most = most
        self._results: dict[bytes, T] = {}

    def of(self, raws: Iterable[bytes | memoryview]) -> list[T]:
        """Return the result of each value."""
        raws = list(raws)
        keys = list(map(xxhash.xxh3_128_digest, raws, repeat(_SEED)))
        results = list(map(self._results.get, keys))
        if None in results:
            for index, (raw, key) in enumerate(zip(raws, keys, strict=True)):
                result = self._results.get(key)
                results[index] = self._computed(raw, key) if result is None else result
        return cast(list[T], results)

    def _computed(self, raw: bytes | memoryview, key: bytes) -> T:
        if len(self._results) >= self._most:
            self._results.clear()
        result = self._results[key] = self._compute(bytes(raw))
        return result
