"""Texts that differ in their numbers and ids alone, counted together."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_NUMBER = re.compile(r"\d+")
_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f-]{20,}|[0-9a-f]{16,}")

ALIKE = 150
"""Texts that begin with so many of the same characters are of one shape."""


@dataclass(slots=True)
class Shapes:
    """How often each shape came, and the first text of it."""

    _times: dict[str, int] = field(default_factory=dict)
    _examples: dict[str, str] = field(default_factory=dict)

    def note(self, text: str) -> None:
        """Count a text."""
        shape = _NUMBER.sub("#", _ID.sub("#", text))[:ALIKE]
        self._times[shape] = self._times.get(shape, 0) + 1
        self._examples.setdefault(shape, text)

    def __iter__(self) -> Iterator[tuple[int, str]]:
        return ((times, self._examples[shape]) for shape, times in self._times.items())

    def as_json(self) -> list[dict[str, object]]:
        """The shapes as JSON takes them."""
        return [{"times": times, "example": example} for times, example in self]
