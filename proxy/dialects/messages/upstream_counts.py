"""Decide whether the proxy and an upstream count the same parts of a Messages request."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from proxy.dialects.messages.blocks import blocks_of, calls_of, kind_of, nested, text_in, type_of
from proxy.dialects.unit_json import decode

_FIELDS = frozenset(
    {
        *("model", "messages", "system", "tools", "tool_choice", "max_tokens", "stream", "stop_sequences"),
        *("temperature", "top_p", "top_k", "metadata", "service_tier", "cache_control", "inference_geo"),
    }
)
"""Fields that the proxy counts, or that the provider doesn't put into the prompt except for a few tokens."""

_PLAIN_TYPES = frozenset({"text", "tool_use", "tool_result"})
_PLAIN_VALUE = 200
"""Bytes that an unknown field may have if it adds no text."""

_EMPTY: tuple[object, ...] = (None, [], {}, "", False)
_CALL = re.compile(rb'"(?:tool_use|tool_result)"')


def comparable(raw: bytes) -> bool:
    """Return whether the proxy's count of a body and an upstream's usage cover the same parts.

    Thinking isn't comparable, because some models drop that of earlier turns.
    """
    fields = decode(raw)
    tools, messages = fields.get("tools") or [], fields.get("messages")
    if any(name not in _FIELDS and value not in _EMPTY for name, value in fields.items()):
        return False
    # Tools that the provider runs put their results into the prompt.
    if not isinstance(tools, list) or any(type_of(tool) not in ("", "custom") for tool in tools):
        return False
    return isinstance(messages, list) and all(isinstance(one, dict) and _plain(one) for one in messages)


def adds_text(raw: bytes) -> bool:
    """Return whether a body has a field that may add text to the prompt besides its units."""
    unknown = {name: value for name, value in decode(raw).items() if name not in _FIELDS and value not in _EMPTY}
    return any(isinstance(value, list) or len(str(value)) > _PLAIN_VALUE for value in unknown.values())


def has_calls(unit: bytes) -> bool:
    """Return whether a unit has a tool call or a tool's result."""
    return _CALL.search(unit) is not None and (
        bool(calls_of(decode(unit))) or any(type_of(block) == "tool_result" for block in blocks_of(decode(unit)))
    )


def kept_text(unit: bytes, *, tools: bool) -> str:
    """Return the text of a unit that every upstream keeps. ``tools``: this upstream keeps tool results."""
    message = decode(unit)
    blocks = blocks_of(message)
    if kind_of(message) == "result":
        blocks = [inner for block in blocks for inner in nested(block)] if tools else []
    return "\n".join(text for block in blocks if (text := text_in(block)) is not None)


def _plain(message: Mapping[str, Any]) -> bool:
    blocks = blocks_of(message)
    inner = [part for block in blocks for part in nested(block)]
    return all(type_of(block) in _PLAIN_TYPES for block in [*blocks, *inner])
