"""Calls and results of chat messages, for ``dialects.repair``."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.compaction.format import Format
from proxy.compaction.turn import Call, Turn
from proxy.dialects import repair
from proxy.dialects.repair import CallKey
from proxy.dialects.unit_json import decode, encode, replace_field

ID_FIELDS = {"tool": "tool_call_id", "function": "name"}
"""The field with the call's id, by the role of the result. The legacy ``function`` role uses the function's name."""


class ChatResults:
    """See ``dialects.repair.Results``. The kind of a result is its role."""

    kinds = tuple(ID_FIELDS)
    last = "function"

    def call_keys(self, turn: Turn) -> list[CallKey]:
        calls = turn.facts.calls
        keys = [("tool", call.id) for call in calls]
        last = calls[-1]
        # Usually only a legacy call has its name as its id, so most messages aren't decoded.
        if last == Call(last.name, last.name) and isinstance(decode(turn.raw).get("function_call"), dict):
            keys[-1] = ("function", last.id)
        return keys

    def result_key(self, turn: Turn) -> CallKey:
        return turn.facts.role, turn.facts.answers or ""

    def result(self, kind: str, id: str, text: str) -> bytes:
        return encode({"role": kind, ID_FIELDS[kind]: id, "content": text})

    def answering(self, raw: bytes, kind: str, id: str) -> bytes:
        return replace_field(raw, ID_FIELDS[kind], id)

    def note(self, text: str) -> bytes:
        return encode({"role": "assistant", "content": text})

    def without_calls(self, raw: bytes) -> bytes:
        for key in ("tool_calls", "function_call"):
            if decode(raw).get(key) is not None:
                raw = replace_field(raw, key, None)
        return raw

    def with_call_ids(self, raw: bytes, ids: Sequence[str]) -> bytes:
        left = iter(ids)
        calls = decode(raw)["tool_calls"]
        fixed = [{**call, "id": next(left)} if isinstance(call, dict) else call for call in calls]
        return replace_field(raw, "tool_calls", fixed)


def repaired(turns: Sequence[Turn], format: Format) -> list[Turn]:
    """Return the messages of a whole request, with the results of each call right after it."""
    return repair.repaired(turns, format, ChatResults())
