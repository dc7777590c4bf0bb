"""Anthropic's compaction on demand: a signed ``compaction`` block in place of the messages that it summarizes.

See platform.claude.com/docs/en/build-with-claude/compaction-on-demand, September 2026.
"""

from __future__ import annotations

from typing import Any

import msgspec

from proxy.dialects.dialect import NativeCompaction, NativeSummary
from proxy.dialects.messages.request import thinking_tokens
from proxy.dialects.messages.units import type_of
from proxy.dialects.request import NOTHING, encoded, fields_of, value_of
from proxy.dialects.units import encode
from proxy.overflow.silent import Finished

_SEARCHED = (b'"context_management"', b'"task_budget"')
_REFUSED = ("stop_sequences", "output_format")
_FORCED = ("any", "tool")


class MessagesCompaction(NativeCompaction):
    """See ``dialects.dialect.NativeCompaction``."""

    path = "/messages"
    beta = "compact-2026-09-04"
    listed = True

    def accepts(self, raw: bytes) -> bool:
        if not any(name in raw for name in _SEARCHED):
            return True
        fields = fields_of(raw)
        budget = _object(_field(fields, "output_config").get("task_budget"))
        return not value_of(fields.get("context_management", NOTHING)) and "remaining" not in budget

    def request(self, sent: bytes, instructions: str, max_output: int) -> bytes | None:
        fields = fields_of(sent)
        if any(value_of(fields.get(name, NOTHING)) for name in _REFUSED):
            return None
        if _field(fields, "output_config").get("format") or _field(fields, "tool_choice").get("type") in _FORCED:
            return None
        fields.pop("stream", None)
        fields["max_tokens"] = encoded(max_output + thinking_tokens(fields.get("thinking", NOTHING)))
        fields["compaction"] = encoded({"type": "summarize", "instructions": instructions})
        return msgspec.json.encode(fields)

    def read(self, answer: bytes) -> NativeSummary | None:
        fields = _object(value_of(answer))
        blocks = fields.get("content")
        found = [block for block in blocks if type_of(block) == "compaction"] if isinstance(blocks, list) else []
        if fields.get("stop_reason") != "compaction" or len(found) != 1:
            return None
        text = found[0].get("content")
        if not isinstance(text, str) or not text or not found[0].get("signature"):
            return None
        return NativeSummary(encode({"role": "assistant", "content": found}), text)

    def read_usage(self, body: bytes) -> Finished:
        usage = _object(_object(value_of(body)).get("usage"))
        rounds = usage.get("iterations")
        counted = [_object(one) for one in rounds] if isinstance(rounds, list) else []

        def total(name: str) -> int:
            return sum(one[name] for one in counted if isinstance(one.get(name), int))

        read, write = total("cache_read_input_tokens"), total("cache_creation_input_tokens")
        prompt = total("input_tokens") + read + write
        rest = {name: value for name, value in usage.items() if name != "iterations"}
        return Finished(None, prompt, total("output_tokens"), False, read, write, rest)


def _field(fields: dict[str, msgspec.Raw], name: str) -> dict[str, Any]:
    return _object(value_of(fields.get(name, NOTHING)))


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
