"""Identify units by what they say to the model: roles, texts, names, arguments, and media.

Clients write old messages in other forms. They make ids or signed URLs anew, drop reasoning, or send a text as a list
of one part. None of this changes the identity of a unit, so a stored summary still fits.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from typing import Any

import msgspec

from proxy.compaction.pieces import sub
from proxy.constants import UNDECODABLE
from proxy.dialects.parts import SILENT, Table
from proxy.dialects.walk import row_of

_MARKS = (SILENT - {"type", "role"}) | {"created", "created_at", "completed_at", "timestamp"}
"""Fields that say nothing. The order of the parts shows which call a result answers."""

_MESSAGE_FIELDS = frozenset({"role", "content", "refusal", "name", "tool_calls", "function_call", "audio"})
_REASONING = re.compile("reasoning|thinking|thought")
_WORD = 100  # characters of a word without spaces that says nothing in an unknown field of a message, such as a status

_SIGNED = ("ignature=", "sig=", "oken=")
_SIGNED_QUERY = re.compile(r"""\?[^\s"'<>?]*?(?:ignature|sig|oken)=[^\s"'<>?]*""")

DEEPEST = 64
"""Levels of nesting. Deeper messages aren't read, because they could exceed the interpreter's recursion limit."""

_TEXT = frozenset({str})


def meaning(value: Any, table: Table) -> Any:
    """Return what a unit, a part, or another value says; ``None`` for reasoning, which clients drop."""
    if isinstance(value, str):
        return _unsigned(value.strip())
    if isinstance(value, list):
        items = [one for item in value if (one := meaning(item, table)) is not None and one != ""]
        return items[0] if len(items) == 1 and isinstance(items[0], str) else items
    if not isinstance(value, dict):
        return value
    message = "role" in value and value.get("type") in (None, "message")
    row = table["message"] if message else row_of(value, table)
    if row.plays == "text" and ("type" in value or len(value) == 1):
        return meaning(value["text"], table) if isinstance(value.get("text"), str) else value
    if row.plays in ("reasoning", "reference", "prefix"):
        return None if row.plays == "reasoning" else value
    made: dict[str, Any] = {}
    for name, inner in value.items():
        if inner is None or name in _MARKS or (name == "type" and inner in ("message", "function")):
            continue
        said: Any
        if isinstance(inner, str) and name not in ("arguments", row.arguments) and row.plays != "media":
            said = _unsigned(inner.strip())
        elif name in ("arguments", row.arguments):
            said = _arguments(inner)
        else:
            said = _place(inner) if row.plays == "media" else meaning(inner, table)
        if not said and type(said) not in (int, float):
            continue
        if not message or name in _MESSAGE_FIELDS or not (_is_word(said) or _REASONING.search(name)):
            made[name] = said
    if made.get("role") == "tool":
        made.pop("name", None)  # that of the call
    return made


def _is_word(value: object) -> bool:
    """Return whether a value has no text, such as a time or a status."""
    if isinstance(value, dict | list):
        return all(map(_is_word, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, str) or (len(value) <= _WORD and not any(map(str.isspace, value)))


def _arguments(value: Any) -> Any:
    """Return the arguments of a call, which some clients encode again, as values."""
    if not isinstance(value, str):
        return value
    try:
        parsed = msgspec.json.decode(value)
    except UNDECODABLE:
        return value
    flat = value.count("{") + value.count("[") < DEEPEST
    return parsed if isinstance(parsed, dict | list) and (flat or not too_deep(parsed)) else value


def _place(value: Any) -> Any:
    """Return a media part's fields without the queries of URLs, which have signatures and times."""
    if isinstance(value, dict):
        return {name: _place(inner) for name, inner in value.items() if name not in _MARKS}
    return value.partition("?")[0] if isinstance(value, str) and "://" in value[:16] else value


def _unsigned(text: str) -> str:
    """Return a text without the queries of signed URLs."""
    if "?" not in text or not any(word in text for word in _SIGNED):
        return text
    return sub(_SIGNED_QUERY, lambda _: "", text)


def too_deep(value: object) -> bool:
    """Return whether a value has more than ``DEEPEST`` levels."""
    waiting: list[tuple[object, int]] = [(value, 0)]
    while waiting:
        item, depth = waiting.pop()
        if depth == DEEPEST:
            return True
        children = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        waiting += [(child, depth + 1) for child in children if isinstance(child, dict | list)]
    return False


def digest(value: object, *, large: bool = False) -> bytes:
    """Return a digest of a value that doesn't depend on key order or on how the JSON is written.

    With ``large``, the value is encoded string by string. A call for all of it would block other threads.
    """
    if not large:
        # For strings in ASCII, msgspec writes the same bytes in a fifth of the time. Numbers may differ.
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
        if isinstance(value, str) or (inner is not None and _TEXT.issuperset(map(type, inner))):
            with contextlib.suppress(UnicodeEncodeError):
                canonical = _sorted(value)
                if canonical.isascii() and b"\x7f" not in canonical:
                    return hashlib.sha256(canonical).digest()
        return hashlib.sha256(_encoder.encode(value).encode("ascii")).digest()
    hashed = hashlib.sha256()
    for piece in _encoder.iterencode(value):
        hashed.update(piece.encode("ascii"))
    return hashed.digest()


_encoder = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
_sorted = msgspec.json.Encoder(order="sorted").encode
