"""Pinned messages: a policy's patterns select messages that are never changed or removed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from proxy.compaction.format import Format
from proxy.compaction.linear_regex import Search, search_for, whole
from proxy.compaction.turn import Turn


@dataclass(frozen=True)
class Pins:
    """Regular expressions. A message is pinned if its text or call arguments match one of them."""

    patterns: tuple[str, ...] = ()
    _searches: tuple[Search, ...] = field(init=False, compare=False, repr=False, default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "_searches", tuple(search_for(pattern) for pattern in self.patterns))

    def holds(self, turn: Turn, format: Format) -> bool:
        """Return whether a message is pinned. The result is cached in its facts."""
        if not self.patterns:
            return False
        known = turn.facts.pinned
        if self.patterns not in known:
            arguments = (text for _, text in format.arguments(turn.raw))
            text = whole("\n".join([format.text(turn.raw), *arguments]))
            known[self.patterns] = any(search(text) for search in self._searches)
        return known[self.patterns]

    def among(self, body: Sequence[Turn], format: Format) -> frozenset[int]:
        """Return the indexes of the pinned messages."""
        if not self.patterns:
            return frozenset()
        return frozenset(index for index, turn in enumerate(body) if self.holds(turn, format))
