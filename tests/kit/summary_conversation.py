"""Short conversations, and a cheap way of counting."""

from typing import Any

import msgspec

from proxy.compaction.turn import Turn
from proxy.dialects.chat.units import ChatUnits


def words(text: str) -> int:
    return len(text.split())


FORMAT = ChatUnits(lambda message: words(str(message)), words)


def turn(role: str, content: Any = None, **fields: Any) -> Turn:
    raw = msgspec.json.encode({"role": role, "content": content, **fields})
    return Turn(raw, FORMAT.read(raw))


def calling(name: str, arguments: str, text: str | None = None) -> Turn:
    call = {"id": "a", "type": "function", "function": {"name": name, "arguments": arguments}}
    return turn("assistant", text, tool_calls=[call])
