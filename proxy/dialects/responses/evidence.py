"""Decide which requests for a response show, by the reported usage, how an upstream counts.

See ``chat.upstream_counts``: only requests made of parts that both sides count are compared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from proxy.dialects.chat.upstream_counts import FORMAT_PART, has_unknown_text, known_only
from proxy.dialects.responses.units import items_of, kind_of, with_content
from proxy.dialects.units import is_text_part, parts_of

_FIELDS = frozenset(
    {
        *("model", "input", "instructions", "tools", "tool_choice", "text", "stream", "stream_options", "include"),
        *("max_output_tokens", "max_tool_calls", "temperature", "top_p", "top_logprobs", "parallel_tool_calls"),
        *("metadata", "store", "service_tier", "user", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "prompt_cache_options", "background", "reasoning", "truncation"),
    }
)
"""Fields that the proxy counts, or that no provider puts into the prompt except for a few tokens."""

_PLAIN = frozenset({None, "message", "function_call", "function_call_output"})
"""Items of which every upstream counts the same text."""

_CALL = re.compile(rb'"call_id"')
_FUNCTION = b'"function"'

_body = msgspec.json.Decoder(dict[str, msgspec.Raw])
_objects = msgspec.json.Decoder(list[dict[str, msgspec.Raw]] | None)
_NONE = msgspec.Raw(b"null")
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError)


def comparable(raw: bytes) -> bool:
    """Return whether the proxy's count of a body and an upstream's usage cover the same parts."""
    try:
        fields = _body.decode(raw)
        if not known_only(fields, _FIELDS) or len(bytes(fields.get("text", b""))) * FORMAT_PART > len(raw):
            return False
        tools = _objects.decode(fields.get("tools", _NONE)) or ()
        # Tools that the provider runs, such as a search, put their results into the prompt.
        if any(bytes(tool.get("type", b"")) != _FUNCTION for tool in tools):
            return False
        return all(map(_is_plain, items_of(bytes(fields["input"]))))
    except _UNREADABLE:
        return False


def _is_plain(item: Mapping[str, Any]) -> bool:
    """Return whether an item is text only, without reasoning."""
    type_ = item.get("type")
    if not (type_ is None or isinstance(type_, str)) or type_ not in _PLAIN:
        return False
    return all(map(is_text_part, parts_of(with_content(item))))


def adds_text(raw: bytes) -> bool:
    """Return whether a body has a field that may add text to the prompt besides the items, such as ``prompt``."""
    try:
        return has_unknown_text(_body.decode(raw), _FIELDS)
    except _UNREADABLE:
        return True


def has_calls(unit: bytes) -> bool:
    """Return whether a unit has a tool call or a tool's output."""
    return _CALL.search(unit) is not None


def kept_text(unit: bytes, *, tools: bool) -> str:
    """Return the text of a unit that every upstream keeps. ``tools``: this upstream keeps outputs of tools."""
    texts = []
    for item in items_of(unit):
        if kind_of(item) == "result" and not tools:
            continue
        message = with_content(item)
        content = message.get("content")
        texts += [content] if isinstance(content, str) else []
        texts += [part["text"] for part in parts_of(message) if is_text_part(part)]
    return "\n".join(texts)
