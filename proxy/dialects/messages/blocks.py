"""Read the content blocks of a message of Anthropic's Messages API.

Clients may send any JSON value, so every function here accepts any value and treats unknown shapes as empty.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from proxy.compaction.turn import Call, Kind
from proxy.dialects.repair import STRAY_RESULT
from proxy.dialects.unit_json import Message
from proxy.tokens.media import MEDIA_LABELS

Block = dict[str, Any]

THINKING = frozenset({"thinking", "redacted_thinking"})
SERVER_CALLS = frozenset({"server_tool_use", "mcp_tool_use"})
"""Calls of tools that the provider runs. Their results are in the same message."""


_REMINDER = re.compile(r"\s*<system-reminder>.*</system-reminder>\s*\Z", re.DOTALL)
"""Text that Claude Code adds to the user's messages."""

_SHOWN = ("title", "url", "text", "stdout", "stderr", "error_code")
"""Fields with visible text in the results of tools that the provider runs."""
_DEEPEST = 6


def blocks_of(message: Message) -> list[Any]:
    """Return the blocks of the content. A string is one text block."""
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return content if isinstance(content, list) else []


def type_of(block: object) -> str:
    """Return the type of a block; empty if it has none."""
    found = block.get("type") if isinstance(block, dict) else None
    return found if isinstance(found, str) else ""


def kind_of(message: Message) -> Kind:
    """Return the part that a message plays. Notes that a program added to the conversation have no kind."""
    role = message.get("role")
    if role in ("system", "developer"):
        return "system"
    if role == "assistant":
        return "assistant"
    if role != "user":
        return ""
    blocks = blocks_of(message)
    if blocks and type_of(blocks[0]) == "tool_result":
        return "result"
    return "" if blocks and all(map(is_note, blocks)) else "user"


def is_note(block: object) -> bool:
    """Return whether a block is text that a program added, and not the user's."""
    text = text_in(block)
    return text is not None and (text.startswith(STRAY_RESULT) or _REMINDER.match(text) is not None)


def text_in(block: object) -> str | None:
    """Return the text of a text block; ``None`` for other blocks."""
    text = block.get("text") if isinstance(block, dict) and block.get("type", "text") == "text" else None
    return text if isinstance(text, str) else None


def is_media(block: object) -> bool:
    """Return whether a block is an image or a document."""
    return type_of(block) in MEDIA_LABELS


def media_in(message: Message) -> bool:
    """Return whether a message has media, in its content or in a result."""
    return any(is_media(inner) for block in blocks_of(message) for inner in (block, *nested(block)))


def nested(block: object) -> list[Any]:
    """Return the blocks of a tool result's content; empty for other blocks."""
    return blocks_of(block) if isinstance(block, dict) and block.get("type") == "tool_result" else []


def calls_of(message: Message) -> tuple[Call, ...]:
    """Return the calls that the client answers."""
    if message.get("role") != "assistant":
        return ()
    uses = (block for block in blocks_of(message) if type_of(block) == "tool_use")
    return tuple(Call(_text(block.get("id")), _text(block.get("name"))) for block in uses)


def arguments_of(message: Message) -> list[tuple[str, str]]:
    """Return the name and the arguments of each call, as JSON. Calls of the provider's tools are included."""
    uses = [block for block in blocks_of(message) if type_of(block) in ("tool_use", *SERVER_CALLS)]
    return [(_text(block.get("name")), json.dumps(block.get("input", {}), ensure_ascii=False)) for block in uses]


def visible(blocks: Sequence[Any], *, media: bool = True) -> str:
    """Return the visible text. Parts that aren't text become a label, for example ``[image]``."""
    return "\n".join(filter(None, (_block_text(block, media=media) for block in blocks)))


def labels_of(message: Message) -> str:
    """Return a label for the media of a message, such as ``[3 × image, file]``; empty if there are none."""
    counts = Counter(MEDIA_LABELS[type_of(block)] for block in blocks_of(message) if is_media(block))
    kinds = [f"{number} × {kind}" if number > 1 else kind for kind, number in counts.most_common(4)]
    return f"[{', '.join(kinds)}]" if kinds else ""


def map_blocks(blocks: Sequence[Any], change: Callable[[Any], Any]) -> list[Any]:
    """Return the blocks with a function applied to each and to those inside of results. ``None`` removes a block."""
    changed = []
    for block in blocks:
        new = change(block)
        if new is block and isinstance(block, dict) and isinstance(block.get("content"), list) and nested(block):
            new = {**block, "content": map_blocks(block["content"], change)}
        if new is not None:
            changed.append(new)
    return changed


def canonical(value: Any, depth: int = 0) -> Any:
    """Return a value without ``cache_control``. A string as content equals a list of one text block.

    Clients move their cache breakpoints from turn to turn, so the marks aren't part of a message's identity.
    """
    if depth > _DEEPEST:
        return value
    if isinstance(value, list):
        return [canonical(item, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    fields = {key: canonical(item, depth + 1) for key, item in value.items() if key != "cache_control"}
    if isinstance(fields.get("content"), str) and ("role" in fields or fields.get("type") == "tool_result"):
        fields["content"] = [{"type": "text", "text": fields["content"]}]
    return fields


def _block_text(block: object, *, media: bool) -> str:
    kind = type_of(block)
    text = text_in(block)
    if text is not None:
        return text
    if not isinstance(block, dict) or kind in THINKING or kind == "tool_use" or kind in SERVER_CALLS:
        return ""
    if kind in MEDIA_LABELS:
        return f"[{MEDIA_LABELS[kind]}]" if media else ""
    if kind == "tool_result":
        return visible(nested(block), media=media)
    return "\n".join(_strings(block, 0)) or f"[{kind or 'part'}]"


def _strings(value: object, depth: int) -> Iterator[str]:
    if depth > _DEEPEST:
        return
    if isinstance(value, dict):
        yield from (value[key] for key in _SHOWN if isinstance(value.get(key), str) and value[key])
        content = value.get("content")
        yield from [content] if isinstance(content, str) and content else _strings(content, depth + 1)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item, depth + 1)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
