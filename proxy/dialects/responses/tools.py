"""Add one tool to a request. Codex has its tools in an item ``additional_tools`` of the input, not in ``tools``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from proxy.dialects import hidden_rounds
from proxy.dialects.request import NOTHING, fields_of, listed, value_of
from proxy.dialects.unit_json import encode

_ITEM = "additional_tools"


def tools_of(raw: bytes) -> list[Any]:
    """Return all tools of a request, and the tools in its items and namespaces. Raises ``BadBody``."""
    fields = fields_of(raw)
    tools = list(hidden_rounds.tools_in(fields))
    for item in _items(fields) if _ITEM.encode() in raw else ():
        if _has_tools(item):
            more = value_of(item).get("tools")
            tools += more if isinstance(more, list) else []
    return list(_flat(tools))


def with_tool(raw: bytes, tool: bytes) -> bytes:
    """Return a body with one more tool, the last one. If its tools are in items, the tool gets an item behind them."""
    fields = fields_of(raw)
    if hidden_rounds.tools_in(fields):
        return hidden_rounds.with_tool(raw, tool)
    items = _items(fields)
    item = encode({"type": _ITEM, "role": "developer", "tools": [msgspec.Raw(tool)]})
    items.insert(_end_of_tools(items), msgspec.Raw(item))
    fields["input"] = listed(items)
    return msgspec.json.encode(fields)


def without_tool(sent: bytes) -> bytes:
    """Return a body without the tool that ``with_tool`` added."""
    fields = fields_of(sent)
    if hidden_rounds.tools_in(fields):
        return hidden_rounds.without_tool(sent)
    items = _items(fields)
    del items[_end_of_tools(items) - 1]
    fields["input"] = listed(items)
    return msgspec.json.encode(fields)


def _items(fields: Mapping[str, msgspec.Raw]) -> list[msgspec.Raw]:
    raw = fields.get("input", NOTHING)
    return msgspec.json.decode(raw, type=list[msgspec.Raw]) if bytes(raw).lstrip()[:1] == b"[" else []


def _has_tools(item: bytes) -> bool:
    if _ITEM.encode() not in bytes(item):
        return False
    value = value_of(item)
    return isinstance(value, dict) and value.get("type") == _ITEM


def _end_of_tools(items: Sequence[bytes]) -> int:
    """Return the place behind the first items with tools."""
    end = 0
    for place, item in enumerate(items):
        if _has_tools(item):
            end = place + 1
        elif end:
            break
    return end


def _flat(tools: Sequence[Any]) -> Iterator[Any]:
    for tool in tools:
        if isinstance(tool, dict) and tool.get("type") == "namespace" and isinstance(tool.get("tools"), list):
            yield from tool["tools"]
        else:
            yield tool
