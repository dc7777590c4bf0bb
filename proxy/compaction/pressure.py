"""Limits on the number of messages and on bytes.

Providers reject requests over these limits, even if their tokens fit. The planner treats both limits like the token
budget. When a conversation reaches a share of a limit, the planner compacts it so that it has room to grow. The cut
depends only on the messages before it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

from proxy.compaction.gains import Gains
from proxy.compaction.settings import part
from proxy.compaction.turn import Turn

COMMA = 1  # bytes between two messages in an outgoing body

SEPARATOR = 2
"""Most bytes between two messages in an incoming body: many encoders add a space. The planner counts with these."""

SUMMARY_BYTES = 6  # Bytes per token of a summary message. English text has 4 to 5, and JSON escapes add some.


class Pressure(ABC):
    """How much of one limit a conversation uses. Positions are group indexes.

    ``grown`` is a running total: entry ``g`` is the usage of all groups before ``g``.
    """

    def __init__(self, most: int, grown: Sequence[int]) -> None:
        self.most = most
        self.grown = grown

    @abstractmethod
    def outside(self, cut: int) -> int:
        """Return the usage of everything except the groups that are kept after a cut."""

    def at(self, cut: int, end: int) -> int:
        """Return the usage of a conversation with ``end`` groups that is cut before the group ``cut``."""
        return self.outside(cut) + self.grown[end] - self.grown[cut]

    def level(self, cut: int, share: float) -> int:
        """Return the value of ``grown`` at which a conversation with this cut reaches a share of the limit."""
        return part(share, self.most) - self.outside(cut) + self.grown[cut]


class MessagePressure(Pressure):
    """The messages of a request. ``replacement`` returns how many messages replace the groups before a cut."""

    def __init__(self, most: int, head: int, ends: Sequence[int], replacement: Callable[[int], int]) -> None:
        super().__init__(most, [0, *ends])
        self._head = head
        self._replacement = replacement

    def outside(self, cut: int) -> int:
        return self._head + self._replacement(cut)


class BytePressure(Pressure):
    """The bytes of a request.

    ``sizes`` are the most bytes that each message keeps. ``gains`` lists the bytes that each stage saves, by group.
    ``replacement`` returns the bytes that replace the groups before a cut, including the summary.
    """

    def __init__(
        self,
        most: int,
        overhead: int,
        groups: Sequence[tuple[int, int]],
        sizes: Sequence[int],
        gains: Mapping[str, Sequence[int]],
        replacement: Callable[[int], int],
    ) -> None:
        grown = [0]
        for start, end in groups:
            grown.append(grown[-1] + sum(sizes[start:end]) + SEPARATOR * (end - start))
        super().__init__(most, grown)
        self._overhead = overhead
        self._gains = {name: Gains(by_group) for name, by_group in gains.items()}
        self._replacement = replacement

    def outside(self, cut: int) -> int:
        """Return the bytes around the kept groups, minus the bytes that stages have saved."""
        saved = sum([gains.applied(cut) for gains in self._gains.values()])
        return self._overhead + self._replacement(cut) - saved

    def apply(self, name: str, frontier: int, end: int) -> None:
        """Apply a stage up to a frontier."""
        if name in self._gains:
            self._gains[name].apply(frontier, end)

    def frontier(self, name: str, cut: int, first: int, last: int, needed: int) -> tuple[int, int]:
        """Find the frontier between ``first`` and ``last`` at which a stage saves ``needed`` more bytes.

        Return the frontier and the bytes that it saves.
        """
        gains = self._gains[name]
        applied = gains.applied(cut)
        first = max(first, gains.frontier)
        reaches = range(first, max(first, last) + 1)
        place = bisect_left(reaches, needed, key=lambda reach: gains.potential(cut, reach, reach) - applied)
        frontier = reaches[min(place, len(reaches) - 1)]
        return frontier, gains.potential(cut, frontier, frontier) - applied


def kept_sizes(body: Sequence[Turn], clips: Mapping[int, int]) -> list[int]:
    """Return the bytes of each message of a body. Oversized results count with the part that is kept."""
    sizes = [len(turn.raw) for turn in body]
    for index, tokens in clips.items():
        facts = body[index].facts
        if not facts.media:
            sizes[index] = min(sizes[index], sizes[index] * tokens // max(1, facts.tokens))
    return sizes
