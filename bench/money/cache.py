"""A provider's prompt cache: it serves the part of a prompt that begins like an earlier one.

Prompts are sequences of parts: the tools, then the messages, as bytes. A part that differs is served up to the first
byte that differs, like a cache that compares tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

LIFETIME = 300.0
"""Seconds after its last use for which an entry stays."""

LEAST = 1_024
"""Tokens of the shortest prefix that providers cache."""


@dataclass(slots=True)
class _Node:
    """A part after the parts before it."""

    used: float = 0.0
    after: dict[bytes, _Node] = field(default_factory=dict)


class PrefixCache:
    """The cache. ``size`` returns the tokens of a part. Times are in seconds, of any clock."""

    def __init__(self, size: Callable[[bytes], int]) -> None:
        self._size = size
        self._root = _Node()

    def read(self, parts: Sequence[bytes], now: float) -> int:
        """Return the tokens of a prompt that the cache serves, and keep the whole prompt."""
        served, node = 0, self._root
        for part in parts:
            after = node.after.get(part)
            if after is None or now - after.used > LIFETIME:
                served += self._begun(part, node, now)
                break
            served += self._size(part)
            node = after
        self._keep(parts, now)
        return served if served >= LEAST else 0

    def _begun(self, part: bytes, node: _Node, now: float) -> int:
        """Return the tokens of a part's beginning that another part after the same prompt has, too."""
        others = (other for other, after in node.after.items() if now - after.used <= LIFETIME)
        same = max((_same(part, other) for other in others), default=0)
        return int(self._size(part) * same / len(part)) if part else 0

    def _keep(self, parts: Sequence[bytes], now: float) -> None:
        node = self._root
        for part in parts:
            node = node.after.setdefault(part, _Node())
            node.used = now


def _same(one: bytes, other: bytes) -> int:
    """Return the number of bytes that both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
