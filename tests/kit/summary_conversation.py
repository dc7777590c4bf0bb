"""Short conversations, and a cheap way of counting."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from proxy.compaction.turn import Turn
from proxy.dialects.chat.units import ChatUnits
from proxy.summary.single_flight import Progress, SummaryOrder
from proxy.summary.store import Checkpoint, StoredSummary


def words(text: str) -> int:
    return len(text.split())


FORMAT = ChatUnits(lambda message: words(str(message)), words)


def turn(role: str, content: Any = None, **fields: Any) -> Turn:
    raw = msgspec.json.encode({"role": role, "content": content, **fields})
    return Turn(raw, FORMAT.read(raw))


def calling(name: str, arguments: str, text: str | None = None) -> Turn:
    call = {"id": "a", "type": "function", "function": {"name": name, "arguments": arguments}}
    return turn("assistant", text, tool_calls=[call])


Factory = Callable[[StoredSummary | None, int, Progress], Awaitable[StoredSummary]]


class SimpleOrder(SummaryOrder):
    """A summary that a function makes, or a digest "for now" after some seconds."""

    def __init__(self, tenant: str, checkpoints: Sequence[Checkpoint], make: Factory, seconds: float = 3600.0) -> None:
        super().__init__(tenant, checkpoints, seconds)
        self._make = make

    async def make(self, previous: StoredSummary | None, start: int, progress: Progress) -> StoredSummary:
        return await self._make(previous, start, progress)

    async def digest(self, previous: StoredSummary | None, start: int) -> StoredSummary:
        return StoredSummary("for now", b'{"role":"user","content":"for now"}', {}, cause="timeout")
