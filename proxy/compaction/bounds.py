"""What a request may have besides tokens: so many messages, so many bytes.

Providers refuse what has more, whatever its tokens are. The scan takes both as it takes tokens: from a share of a bound
on the conversation is compacted, at a place that depends on the prefix alone, and so far that it has room to grow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from proxy.compaction.gains import PlainGains
from proxy.compaction.message import Turn

PRESSING = 0.95
"""From this share of a bound on a conversation is compacted: the next turn may be refused."""

NEARING = 0.85
"""From this share on the summary is prepared, where the policy prepares any."""

ROOM = 0.60
"""A compaction brings a conversation to this share of the bound or below, if it can."""

COMMA = 1
"""Bytes between two messages in what leaves."""

SEPARATOR = 2
"""The same in what comes, at most: many encoders put a space there. The scan takes all messages with it."""

SUMMARY_BYTES = 6
"""Bytes for each token that a summary message may have. English has 4 to 5, and escapes in JSON take some."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The most messages, and the most bytes of the body, that a request may have; ``None`` where nobody knows."""

    messages: int | None = None
    bytes: int | None = None

    def reached(self, messages: int, size: int, share: float = PRESSING) -> bool:
        """Whether a request with so many messages and bytes has come to a share of a bound."""
        return (self.messages is not None and messages >= part(share, self.messages)) or (
            self.bytes is not None and size >= part(share, self.bytes)
        )


UNBOUNDED = Bounds()


def part(share: float, most: int) -> int:
    """A share of a bound, at least one."""
    return max(1, int(share * most))


class Pressure(ABC):
    """One bound in one scan: how much of it a conversation takes. Positions are groups.

    ``grown`` is what the groups take that stand before each.
    """

    def __init__(self, most: int, grown: Sequence[int]) -> None:
        self.most = most
        self.grown = grown

    @abstractmethod
    def beside(self, cut: int) -> int:
        """What stands beside the groups that are kept from a cut on."""

    def at(self, cut: int, end: int) -> int:
        """What a conversation of ``end`` groups takes, cut before the group ``cut``."""
        return self.beside(cut) + self.grown[end] - self.grown[cut]

    def level(self, cut: int, share: float) -> int:
        """The entry of ``grown`` from which a conversation, cut so, takes a share of the bound."""
        return part(share, self.most) - self.beside(cut) + self.grown[cut]


class MessagePressure(Pressure):
    """The messages of a request. ``standing`` says of each cut how many stand beside the kept ones in its body."""

    def __init__(self, most: int, head: int, ends: Sequence[int], standing: Callable[[int], int]) -> None:
        super().__init__(most, [0, *ends])
        self._head = head
        self._standing = standing

    def beside(self, cut: int) -> int:
        """See ``Weight``."""
        return self._head + self._standing(cut)


class BytePressure(Pressure):
    """The bytes of a request.

    ``sizes`` are the bytes of each message as it is kept at most, ``gains`` what each stage takes off a group in bytes.
    ``standing`` says of each cut which bytes stand beside the kept ones in its body, the summary's among them.
    """

    def __init__(
        self,
        most: int,
        overhead: int,
        groups: Sequence[tuple[int, int]],
        sizes: Sequence[int],
        gains: Mapping[str, Sequence[int]],
        standing: Callable[[int], int],
    ) -> None:
        grown = [0]
        for start, end in groups:
            grown.append(grown[-1] + sum(sizes[start:end]) + SEPARATOR * (end - start))
        super().__init__(most, grown)
        # As in the frame, what moves slowly is rounded up.
        step = max(1, most // 128)
        self._overhead = -(-overhead // step) * step
        self._gains = {name: PlainGains(by_group) for name, by_group in gains.items()}
        self._standing = standing

    def beside(self, cut: int) -> int:
        """See ``Weight``. What stages have taken off is taken off here."""
        saved = sum([gains.applied(cut) for gains in self._gains.values()])
        return self._overhead + self._standing(cut) - saved

    def apply(self, name: str, frontier: int, end: int) -> None:
        """A stage is applied up to a frontier."""
        if name in self._gains:
            self._gains[name].apply(frontier, end)

    def frontier(self, name: str, cut: int, first: int, last: int, needed: int) -> tuple[int, int]:
        """How far to apply a stage to save ``needed`` bytes more, from ``first`` to ``last``; and what that saves."""
        gains = self._gains[name]
        applied = gains.applied(cut)
        first = max(first, gains.frontier)
        reaches = range(first, max(first, last) + 1)
        place = bisect_left(reaches, needed, key=lambda reach: gains.potential(cut, reach, reach) - applied)
        frontier = reaches[min(place, len(reaches) - 1)]
        return frontier, gains.potential(cut, frontier, frontier) - applied


def kept_sizes(body: Sequence[Turn], clips: Mapping[int, int]) -> list[int]:
    """The bytes of each message of a body; of a result that is held to a size, the part of them that stays."""
    sizes = [len(turn.raw) for turn in body]
    for index, tokens in clips.items():
        facts = body[index].facts
        if not facts.media:
            sizes[index] = min(sizes[index], sizes[index] * tokens // max(1, facts.tokens))
    return sizes
