"""The prompts that an engine sends for a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec


@dataclass
class Outcome:
    """The prompts as indexes into ``messages``, which has every message once.

    ``reads`` has the tokens of each request for a summary. ``archived`` has the archived messages of each id that a
    prompt names, or is ``None`` if the engine has no archive.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    archived: dict[str, list[dict[str, Any]]] | None = None


class Prompts:
    """Collect prompts from the bytes of their messages."""

    def __init__(self) -> None:
        self.outcome = Outcome()
        self._places: dict[bytes, int] = {}

    def add(self, raws: Sequence[bytes]) -> None:
        """Add a prompt."""
        self.outcome.prompts.append([self._place(bytes(raw)) for raw in raws])

    def _place(self, raw: bytes) -> int:
        place = self._places.setdefault(raw, len(self._places))
        if place == len(self.outcome.messages):
            self.outcome.messages.append(msgspec.json.decode(raw))
        return place
