"""Decide whether the proxy and an upstream count the same parts of a Messages request."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from proxy.dialects.messages.units import THINKING, blocks_of, calls_of, kind_of, nested, text_in, type_of
from proxy.dialects.unit_json import decode, encode

_FIELDS = frozenset(
    {
        *("model", "messages", "system", "tools", "tool_choice", "max_tokens", "stream", "stop_sequences"),
        *("temperature", "top_p", "top_k", "metadata", "service_tier", "cache_control", "inference_geo", "thinking"),
    }
)
"""Fields that the proxy counts, or that the provider doesn't put into the prompt except for a few tokens."""

_PLAIN_TYPES = frozenset({"text", "tool_use", "tool_result"})
_PLAIN_VALUE = 200
"""Bytes that an unknown field may have if it adds no text."""

_CLEARS_THINKING = "clear_thinking"
"""The start of the types of edits that remove only thinking."""

_THINKING_PART = 20
"""Thinking of at most this part of a body changes its size less than a step of the calibration."""

_EMPTY: tuple[object, ...] = (None, [], {}, "", False)
_CALL = re.compile(rb'"(?:tool_use|tool_result)"')


def comparable(raw: bytes) -> bool:
    """Return whether the proxy's count of a body and an upstream's usage cover the same parts.

    Much thinking isn't comparable, because some models drop that of earlier turns.
    """
    fields = decode(raw)
    tools, messages = fields.get("tools") or [], fields.get("messages")
    if any(
        name not in _FIELDS and value not in _EMPTY and not _plain_field(name, value) for name, value in fields.items()
    ):
        return False
    # Tools that the provider runs put their results into the prompt.
    if not isinstance(tools, list) or any(type_of(tool) not in ("", "custom") for tool in tools):
        return False
    if not isinstance(messages, list) or not all(isinstance(one, dict) and _plain(one) for one in messages):
        return False
    thinking = [block for one in messages for block in blocks_of(one) if type_of(block) in THINKING]
    return sum(len(encode(block)) for block in thinking) * _THINKING_PART <= len(raw)


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


def _plain_field(name: str, value: Any) -> bool:
    """Return whether a field adds nothing to the prompt. Claude Code sends both."""
    if name == "output_config":
        return isinstance(value, dict) and set(value) == {"effort"}
    edits = value.get("edits") if name == "context_management" and isinstance(value, dict) else None
    return isinstance(edits, list) and all(type_of(edit).startswith(_CLEARS_THINKING) for edit in edits)


def _plain(message: Mapping[str, Any]) -> bool:
    blocks = [block for block in blocks_of(message) if type_of(block) not in THINKING]
    inner = [part for block in blocks for part in nested(block)]
    return all(type_of(block) in _PLAIN_TYPES for block in [*blocks, *inner])
