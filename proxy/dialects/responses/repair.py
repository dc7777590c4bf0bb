"""Calls and outputs of Responses items, for ``dialects.repair``."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.compaction.format import Format
from proxy.compaction.turn import Turn
from proxy.dialects import repair
from proxy.dialects.repair import CallKey
from proxy.dialects.responses.items import is_client_call, items_of, rewritten_items
from proxy.dialects.unit_json import Message, encode, replace_field

FUNCTION, CUSTOM = "function_call_output", "custom_tool_call_output"


class ItemResults:
    """See ``dialects.repair.Results``. Clients answer all calls but custom ones with outputs of functions."""

    kinds = (FUNCTION, CUSTOM)
    last = ""

    def call_keys(self, turn: Turn) -> list[CallKey]:
        calls = [item for item in items_of(turn.raw) if is_client_call(item)]
        return [
            (CUSTOM if item["type"] == "custom_tool_call" else FUNCTION, call.id)
            for item, call in zip(calls, turn.facts.calls, strict=True)
        ]

    def result_key(self, turn: Turn) -> CallKey:
        type_ = items_of(turn.raw)[0].get("type")
        return CUSTOM if type_ == CUSTOM else FUNCTION, turn.facts.answers or ""

    def result(self, kind: str, id: str, text: str) -> bytes:
        return encode({"type": kind, "call_id": id, "output": text})

    def answering(self, raw: bytes, kind: str, id: str) -> bytes:
        return replace_field(raw, "call_id", id)

    def note(self, text: str) -> bytes:
        return encode({"type": "message", "role": "assistant", "content": text})

    def without_calls(self, raw: bytes) -> bytes:
        return rewritten_items(raw, lambda item, old: b"" if is_client_call(item) else old)

    def with_call_ids(self, raw: bytes, ids: Sequence[str]) -> bytes:
        left = iter(ids)

        def renamed(item: Message, old: bytes) -> bytes:
            return replace_field(old, "call_id", next(left)) if is_client_call(item) else old

        return rewritten_items(raw, renamed)


def repaired(turns: Sequence[Turn], format: Format) -> list[Turn]:
    """Return the units of a whole request, with the outputs of each call right after it."""
    return repair.repaired(turns, format, ItemResults())
