"""Decode and encode the JSON of one unit of a conversation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import msgspec

from proxy.constants import UNDECODABLE

Message = Mapping[str, Any]

DEEPEST = 64
"""Levels of nesting. Deeper messages aren't read, because they could exceed the interpreter's recursion limit."""


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
