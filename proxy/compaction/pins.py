"""Pinned messages: a policy's patterns select messages that are never changed or removed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from proxy.compaction.message import Turn, arguments_of, decode, text_of
from proxy.compaction.searching import Search, search_for, whole


@dataclass(frozen=True)
class Pins:
    """Regular expressions. A message is pinned if its text or call arguments match one of them."""

    patterns: tuple[str, ...] = ()
    _searches: tuple[Search, ...] = field(init=False, compare=False, repr=False, default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "_searches", tuple(search_for(pattern) for pattern in self.patterns))

    def holds(self, turn: Turn) -> bool:
        """Return whether a message is pinned. The result is cached in its facts."""
        if not self.patterns:
            return False
        known = turn.facts.pinned
        if self.patterns not in known:
            message = decode(turn.raw)
            text = whole("\n".join([text_of(message), *(arguments for _, arguments in arguments_of(message))]))
            known[self.patterns] = any(search(text) for search in self._searches)
        return known[self.patterns]

    def among(self, body: Sequence[Turn]) -> frozenset[int]:
        """Return the indexes of the pinned messages."""
        if not self.patterns:
            return frozenset()
        return frozenset(index for index, turn in enumerate(body) if self.holds(turn))
