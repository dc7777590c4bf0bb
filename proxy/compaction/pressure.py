"""The savings of the cheap stages, as running totals by group, and the limits on the number of messages and on bytes.

Providers reject requests over these limits, even if their tokens fit. The planner treats both limits like the token
budget. When a conversation reaches a share of a limit, the planner compacts it so that it has room to grow. The cut
depends only on the messages before it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from proxy.compaction.settings import part
from proxy.compaction.stages.stage import Stage
from proxy.compaction.turn import Turn

if TYPE_CHECKING:
    from proxy.compaction.sizes import Sizes


class Gains:
    """The savings of a stage that looks at one message only, and how far it is applied. Positions are group indexes.

    ``frontier`` is the group up to which the stage is applied. ``seen`` is the number of groups at that decision.
    """

    def __init__(self, by_group: Iterable[int]) -> None:
        self.frontier = 0
        self.seen = 0
        self._total = [0, *accumulate(by_group)]

    def potential(self, start: int, frontier: int, end: int) -> int:
        """Return the savings on the groups from ``start`` to ``frontier`` if there are ``end`` groups.

        ``end`` must not decrease from one call to the next.
        """
        return self._total[frontier] - self._total[start] if frontier > start else 0

    def apply(self, frontier: int, end: int) -> None:
        """Apply the stage up to a frontier."""
        self.frontier, self.seen = frontier, end

    def applied(self, start: int) -> int:
        """Return the savings of the applied part of the stage, on the groups from ``start`` on."""
        return self._total[self.frontier] - self._total[start] if self.frontier > start else 0


class LateGains(Gains):
    """Savings of a stage that may reduce some messages only after a later message has arrived.

    A Fenwick tree receives each saving when the later message arrives. A query for a range of ``n`` groups takes
    O(log n) time.
    """

    def __init__(self, groups: int, gains: Mapping[tuple[int, int], int]) -> None:
        """Take ``gains`` in tokens, by the group of the message and the group of the later message."""
        super().__init__(())
        self._waiting = sorted(((later, group, gain) for (group, later), gain in gains.items()), reverse=True)
        self._tree = [0] * (groups + 1)
        self._applied: list[tuple[int, int]] = []
        self._arrived: list[tuple[int, int]] = []

    def potential(self, start: int, frontier: int, end: int) -> int:
        while self._waiting and self._waiting[-1][0] < end:
            _, group, gain = self._waiting.pop()
            self._arrived.append((group, gain))
            self._add(group, gain)
        return self._before(frontier) - self._before(start) if frontier > start else 0

    def apply(self, frontier: int, end: int) -> None:
        self.potential(0, 0, end)
        self.frontier, self.seen = frontier, end
        total = 0
        self._applied = []
        for group, gain in sorted(self._arrived):
            if group < frontier:
                total += gain
                self._applied.append((group, total))

    def applied(self, start: int) -> int:
        if not self._applied or self.frontier <= start:
            return 0
        place = bisect_right(self._applied, (start - 1, 1 << 62))
        before = self._applied[place - 1][1] if place else 0
        return self._applied[-1][1] - before

    def _add(self, group: int, gain: int) -> None:
        position = group + 1
        while position < len(self._tree):
            self._tree[position] += gain
            position += position & -position

    def _before(self, group: int) -> int:
        total = 0
        while group > 0:
            total += self._tree[group]
            group -= group & -group
        return total


def stage_gains(
    stages: Sequence[Stage], body: Sequence[Turn], sizes: Sizes, pinned: frozenset[int]
) -> tuple[dict[str, Gains], dict[str, list[int]]]:
    """Return the tokens that each stage saves; and the bytes by group, without messages that wait for a later one.

    A message that waits counts only the tokens that a stage saves beyond all other stages. The conversation is then
    never larger than estimated, whichever stages are applied. Messages that arrive afterwards don't change the
    estimate.
    """
    savings: dict[str, list[int]] = {}
    lighter: dict[str, list[int]] = {}
    groups = sizes.segments
    clips = sizes.clips
    tokens = [turn.facts.tokens for turn in body]
    least = tokens.copy()
    for index, held in clips.items():
        least[index] = held
    for stage in stages:
        by_group = savings[stage.name] = [0] * len(sizes)
        bytes_by_group = lighter[stage.name] = [0] * len(sizes)
        waiting, reduce = stage.later(), stage.reduce
        for index, turn in enumerate(body):
            if index in waiting or (form := reduce(index, turn)) is None or index in pinned:
                continue
            # The limit of an oversized result already saves some of these tokens.
            gain = clips.get(index, tokens[index]) - form.facts.tokens
            if gain > 0:
                group = groups[index]
                by_group[group] += gain
                least[index] -= gain
                bytes_by_group[group] += len(turn.raw) - len(form.raw)
    gains: dict[str, Gains] = {}
    for stage in stages:
        by_group = savings[stage.name]
        if not stage.later():
            gains[stage.name] = Gains(by_group)
            continue
        late = {(group, group): gain for group, gain in enumerate(by_group) if gain}
        for index, later in stage.later().items():
            form = stage.reduce(index, body[index])
            if form is not None and index not in pinned and form.facts.tokens < least[index]:
                pair = groups[index], groups[later]
                late[pair] = late.get(pair, 0) + least[index] - form.facts.tokens
                least[index] = form.facts.tokens
        gains[stage.name] = LateGains(len(sizes), late)
    return gains, lighter


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
