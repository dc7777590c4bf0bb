"""What one engine made of one conversation, request by request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec


@dataclass
class Outcome:
    """The prompts, each as indexes into ``messages``, where every message stands once.

    ``reads`` are the tokens of each request for a summary. ``archived`` has, by every id that a prompt names, the
    messages that looking it up returns; ``None``: there is no archive.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    archived: dict[str, list[dict[str, Any]]] | None = None


class Prompts:
    """Collects prompts given as the bytes of their messages."""

    def __init__(self) -> None:
        self.outcome = Outcome()
        self._places: dict[bytes, int] = {}

    def add(self, raws: Sequence[bytes]) -> None:
        """One more prompt."""
        self.outcome.prompts.append([self._place(bytes(raw)) for raw in raws])

    def _place(self, raw: bytes) -> int:
        place = self._places.setdefault(raw, len(self._places))
        if place == len(self.outcome.messages):
            self.outcome.messages.append(msgspec.json.decode(raw))
        return place
