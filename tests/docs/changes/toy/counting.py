"""Count the tokens of toy turns and requests, and judge what upstreams count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from proxy.dialects.counting import CALL, Counter, FieldEvidence, known_only, objects_in
from proxy.dialects.units import Message, decode
from proxy.limits.profiles.lookup import Profile
from tests.docs.changes.toy.units import ToyUnits, asks_in

TURN = 4
REPLY = 2
"""Tokens of frames."""

_TURN = frozenset({"who", "says", "asks", "asked"})


class ToyCounter(Counter):
    """Counts tokens as one model's provider does."""

    def __init__(self, profile: Profile) -> None:
        super().__init__(profile)
        self.format = ToyUnits(self.turn, self.text)

    def turn(self, turn: Message) -> int:
        """Return the tokens of a turn with its frame."""
        texts = (value for name, value in turn.items() if name not in ("asks", "asked") and value is not None)
        asks = sum(CALL + self._count(ask.get("tool")) + self._count(ask.get("with")) for ask in asks_in(turn))
        return self._scaled(TURN + asks + sum(map(self._count, texts)))

    def at_most(self, raw: bytes) -> float:
        return len(raw) * self.profile.token_ratio

    def overhead(self, fields: Mapping[str, Any]) -> int:
        abilities = fields.get("abilities")
        return self._scaled(REPLY + (0 if abilities is None else self._count(abilities)))


class ToyEvidence(FieldEvidence):
    """See ``dialects.counting.Evidence``."""

    KNOWN = frozenset({"model", "stream", "turns", "abilities", "longest"})
    FORMAT = "shape"

    def has_plain_units(self, fields: Mapping[str, msgspec.Raw]) -> bool:
        return all(known_only(turn, _TURN) for turn in objects_in(fields["turns"]))

    def has_calls(self, unit: bytes) -> bool:
        turn = decode(unit)
        return turn.get("who") == "tool" or bool(asks_in(turn))

    def kept_text(self, unit: bytes, *, tools: bool) -> str:
        turn = decode(unit)
        says = turn.get("says")
        return says if isinstance(says, str) and (tools or turn.get("who") != "tool") else ""
