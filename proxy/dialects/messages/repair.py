"""Calls and results of Messages conversations, for ``dialects.repair``."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.compaction.format import Format
from proxy.compaction.turn import Turn
from proxy.dialects import repair
from proxy.dialects.messages.blocks import blocks_of, type_of
from proxy.dialects.repair import CallKey
from proxy.dialects.unit_json import decode, encode, replace_field


class MessagesResults:
    """See ``dialects.repair.Results``."""

    kinds = ("result",)
    last = ""

    def call_keys(self, turn: Turn) -> list[CallKey]:
        return [("result", call.id) for call in turn.facts.calls]

    def result_key(self, turn: Turn) -> CallKey:
        return "result", turn.facts.answers or ""

    def result(self, kind: str, id: str, text: str) -> bytes:
        return encode({"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": text}]})

    def answering(self, raw: bytes, kind: str, id: str) -> bytes:
        first, *others = blocks_of(decode(raw))
        return replace_field(raw, "content", [{**first, "tool_use_id": id}, *others])

    def note(self, text: str) -> bytes:
        # Not the assistant's, because thinking may only be at the start of its turn.
        return encode({"role": "user", "content": text})

    def without_calls(self, raw: bytes) -> bytes:
        return replace_field(raw, "content", [b for b in blocks_of(decode(raw)) if type_of(b) != "tool_use"])

    def with_call_ids(self, raw: bytes, ids: Sequence[str]) -> bytes:
        left = iter(ids)
        blocks = [
            {**block, "id": next(left)} if type_of(block) == "tool_use" else block for block in blocks_of(decode(raw))
        ]
        return replace_field(raw, "content", blocks)


def repaired(turns: Sequence[Turn], format: Format) -> list[Turn]:
    """Return the units of a whole request, with the results of each call right after it."""
    return repair.repaired(turns, format, MessagesResults())
