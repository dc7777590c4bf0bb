"""Read and rewrite toy turns: ``{"who": "me", "says": "…"}``.

``who`` is ``rules``, ``me``, ``it``, or ``tool``. A turn of ``it`` may have ``asks``, a list of
``{"id", "tool", "with"}``. A turn of ``tool`` has the id in ``asked``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from proxy.compaction.format import ForeignSummary, Rewrite
from proxy.compaction.turn import Call, Kind, Turn
from proxy.dialects.foreign_summaries import find_summary
from proxy.dialects.parts import Part
from proxy.dialects.repair import CallKey
from proxy.dialects.units import Message, Units, changed_fields, decode, encode, replace_field
from proxy.dialects.walk import Change, Swap, rewritten

KINDS: dict[str, Kind] = {"rules": "system", "me": "user", "it": "assistant", "tool": "result"}
TURN = Part(plays="message", reads=("says",), cuts=("says",))
SPEAKERS = {"system": "rules", "developer": "rules", "user": "me", "assistant": "it"}


class ToyUnits(Units[Message]):
    """See ``dialects.units.Units``. A turn has no media."""

    def decoded(self, raw: bytes) -> Message:
        return decode(raw)

    def kind(self, unit: Message) -> Kind:
        return KINDS.get(_text(unit.get("who")), "")

    def role(self, unit: Message, kind: Kind) -> str:
        return _text(unit.get("who"))

    def calls(self, unit: Message) -> tuple[Call, ...]:
        return tuple(Call(_text(ask.get("id")), _text(ask.get("tool"))) for ask in asks_in(unit))

    def answered(self, unit: Message, kind: Kind) -> str | None:
        return _text(unit.get("asked")) or None

    def visible_text(self, unit: Message) -> str:
        return _text(unit.get("says"))

    def walked(self, unit: Message, change: Change | None, swap: Swap | None) -> Message:
        return rewritten(unit, self.TABLE, change, swap, TURN)

    def written(self, raw: bytes, unit: Message, new: Message) -> bytes:
        return changed_fields(raw, unit, new)

    def is_empty(self, unit: Message) -> bool:
        return not unit.get("says") and not unit.get("asks")

    def result_content(self, unit: Message) -> object:
        return unit.get("says")

    def summary_in(self, unit: Message) -> ForeignSummary | None:
        return find_summary(self.kind(unit), [self.visible_text(unit)], listed=False)

    def own_texts(self, unit: Message) -> list[tuple[str, str]]:
        return [(self.visible_text(unit), "")]

    def arguments(self, raw: bytes) -> list[tuple[str, str]]:
        return [(_text(ask.get("tool")), _text(ask.get("with"))) for ask in asks_in(decode(raw))]

    def with_result(self, raw: bytes, text: str) -> bytes:
        return replace_field(raw, "says", text)

    def with_arguments(self, raw: bytes, rewrite: Rewrite) -> bytes:
        asks = asks_in(decode(raw))
        changed = [_rewritten(ask, rewrite) for ask in asks]
        return raw if changed == asks else replace_field(raw, "asks", changed)

    def summary(self, role: str, text: str) -> bytes:
        return encode({"who": SPEAKERS[role], "says": text})

    def call_keys(self, turn: Turn) -> list[CallKey]:
        return [("result", call.id) for call in turn.facts.calls]

    def result_key(self, turn: Turn) -> CallKey:
        return "result", turn.facts.answers or ""

    def result(self, kind: str, id: str, text: str) -> bytes:
        return encode({"who": "tool", "asked": id, "says": text})

    def answering(self, raw: bytes, kind: str, id: str) -> bytes:
        return replace_field(raw, "asked", id)

    def note(self, text: str) -> bytes:
        return encode({"who": "it", "says": text})

    def without_calls(self, raw: bytes) -> bytes:
        return replace_field(raw, "asks", [])

    def with_call_ids(self, raw: bytes, ids: Sequence[str]) -> bytes:
        asks = asks_in(decode(raw))
        return replace_field(raw, "asks", [{**ask, "id": id} for ask, id in zip(asks, ids, strict=True)])


def asks_in(unit: Message) -> list[dict[str, Any]]:
    """Return the calls of a turn."""
    asks = unit.get("asks")
    return [ask for ask in asks if isinstance(ask, dict)] if isinstance(asks, list) else []


def _rewritten(ask: dict[str, Any], rewrite: Rewrite) -> dict[str, Any]:
    text = rewrite(_text(ask.get("tool")), _text(ask.get("with")))
    return ask if text is None else {**ask, "with": text}


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
