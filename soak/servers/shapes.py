"""Count texts that differ only in their numbers and ids together."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_NUMBER = re.compile(r"\d+")
_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f-]{20,}|[0-9a-f]{16,}")

ALIKE = 150
"""Characters at the beginning of a text that define its shape."""


@dataclass(slots=True)
class Shapes:
    """The count of each shape, and its first text."""

    _times: dict[str, int] = field(default_factory=dict)
    _examples: dict[str, str] = field(default_factory=dict)

    def add(self, text: str) -> None:
        """Count a text."""
        shape = _NUMBER.sub("#", _ID.sub("#", text))[:ALIKE]
        self._times[shape] = self._times.get(shape, 0) + 1
        self._examples.setdefault(shape, text)

    def __iter__(self) -> Iterator[tuple[int, str]]:
        return ((times, self._examples[shape]) for shape, times in self._times.items())

    def as_json(self) -> list[dict[str, object]]:
        """Return the shapes for JSON."""
        return [{"times": times, "example": example} for times, example in self]
