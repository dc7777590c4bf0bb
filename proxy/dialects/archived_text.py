"""Read the role and the text of an archived unit, whatever its API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from proxy.dialects.unit_json import decode

_TEXTS = frozenset(
    {
        *("arguments", "content", "input", "output", "reasoning_content", "refusal", "text", "thinking"),
        *("function", "parts", "summary", "tool_calls", "function_call", "name", "action"),
    }
)
"""Fields that contain text, or lead to it. All others are ids, types, and encoded data."""


def archived_text(raw: bytes) -> tuple[str, str]:
    """Return the role, or else the type, of a chat message, a response's item, or a message of blocks, and its text."""
    unit = decode(raw)
    role = unit.get("role") or unit.get("type")
    return role if isinstance(role, str) else "message", "\n".join(filter(None, _texts(unit)))


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts within a message, in order. Structured arguments become JSON."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, list):
            waiting += reversed(item)
        elif isinstance(item, dict):
            inner = [
                json.dumps(field, ensure_ascii=False)
                if name in ("input", "action") and isinstance(field, dict)
                else field
                for name, field in item.items()
                if name in _TEXTS
            ]
            waiting += reversed(inner)
