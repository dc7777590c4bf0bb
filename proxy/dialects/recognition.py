"""Recognize the API of a recorded request, whose path isn't known."""

from __future__ import annotations

from typing import Any

import msgspec

from proxy.dialects.chat.dialect import CHAT
from proxy.dialects.dialect import Dialect
from proxy.dialects.messages.dialect import MESSAGES
from proxy.dialects.responses.dialect import RESPONSES

DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in (CHAT, RESPONSES, MESSAGES)}

_BLOCKS = frozenset({"tool_use", "tool_result", "thinking", "redacted_thinking"})


def recognized(raw: bytes) -> Dialect:
    """Return the dialect that a body fits. A body that fits several, such as one with short texts only, is chat's.

    Raises ``msgspec.DecodeError``, ``UnicodeDecodeError``, or ``RecursionError`` for a body that isn't JSON.
    """
    body: Any = msgspec.json.decode(raw)
    if not isinstance(body, dict):
        return CHAT
    if "input" in body and "messages" not in body:
        return RESPONSES
    messages = body.get("messages")
    contents = [one.get("content") for one in messages if isinstance(one, dict)] if isinstance(messages, list) else []
    blocks = (block for content in contents if isinstance(content, list) for block in content)
    used = any(isinstance(block, dict) and block.get("type") in _BLOCKS for block in blocks)
    return MESSAGES if used or "system" in body else CHAT
