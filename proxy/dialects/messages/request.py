"""Parse the body of a Messages request, and rewrite it with the fewest changes.

An assistant's message is one unit, and so is a user's message without tool results. A user's message with tool results
is split into one unit for each result and one for the other blocks, because a part of it may be kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import msgspec

from proxy.dialects.messages.joining import Split, joined, layouts_of, prefix_of, split
from proxy.dialects.request import (
    NOTHING,
    UNREADABLE,
    Request,
    Wire,
    encoded,
    listed,
    positive,
    value_of,
)
from proxy.limits.budget import LEAST_THINKING, lower_thinking

_FIELDS = ("system", "tools", "tool_choice", "output_config", "output_format", "mcp_servers")


class _Wire(Wire):
    messages: list[msgspec.Raw] | None = None
    max_tokens: msgspec.Raw = NOTHING
    system: msgspec.Raw = NOTHING
    tools: msgspec.Raw = NOTHING
    tool_choice: msgspec.Raw = NOTHING
    output_config: msgspec.Raw = NOTHING
    output_format: msgspec.Raw = NOTHING
    mcp_servers: msgspec.Raw = NOTHING
    thinking: msgspec.Raw = NOTHING
    thread: msgspec.Raw = NOTHING


_decoder = msgspec.json.Decoder(_Wire)


class MessagesRequest(Request, eq=False):
    """A request as the client sent it. See ``dialects.request.Request``.

    ``prefix`` are the messages up to the newest compaction block. The upstream ignores those before the block, so they
    aren't units and stay unchanged. ``splits`` are the messages that several units were made from, by the identity of
    their first unit.
    """

    OVERHEAD = (*_FIELDS, "prefix")

    prefix: Sequence[bytes] = []
    splits: dict[int, Split] = msgspec.field(default_factory=dict)
    continues: bool = False
    budgets_thinking: bool = False
    thinking: int = 0

    @classmethod
    def _read(cls, raw: bytes) -> Self | None:
        try:
            wire = _decoder.decode(raw)
        except UNREADABLE:
            return None
        messages = wire.messages or []
        layouts = layouts_of(messages)
        block, start = prefix_of(layouts)
        units, splits = split(messages[start:], layouts[start:])
        fields = (getattr(wire, name) for name in _FIELDS)
        most, thinking = positive(wire.max_tokens), thinking_tokens(wire.thinking)
        return cls(
            raw=raw,
            model=wire.model_name,
            stream=wire.streams,
            units=units,
            max_output=most,
            overhead=(*map(bytes, fields), bytes(listed(messages[block:start])) if start else b""),
            sent=len(messages),
            prefix=messages[:start],
            splits=splits,
            continues=_continues(value_of(wire.thread)),
            # Only with interleaved thinking, its budget may be larger. It's then for all of a turn's requests.
            thinking=thinking if thinking < (most or 0) else 0,
        )

    @property
    def compacted(self) -> bool:
        return bool(self.prefix)

    @property
    def size(self) -> int:
        made = sum(len(unit) for part in self.splits.values() for unit in part.units if unit is not part.message)
        return super().size + made

    def release(self) -> None:
        super().release()
        self.prefix = []
        self.splits = {}

    def rewritten(
        self, *, units: Sequence[bytes] | None = None, model: str | None = None, max_output: int | None = None
    ) -> bytes:
        if units is not None and self._same(units):
            units = None
        return super().rewritten(units=units, model=model, max_output=max_output)

    def _replace_units(self, fields: dict[str, msgspec.Raw], units: Sequence[bytes]) -> None:
        fields["messages"] = listed([*self.prefix, *joined(units, self.splits)])

    def _lower_output(self, fields: dict[str, msgspec.Raw], most: int) -> None:
        if (positive(fields.get("max_tokens", NOTHING)) or 0) <= most:
            return
        if self.thinking and most <= LEAST_THINKING:
            most = max(most, self.thinking + 1)
        fields["max_tokens"] = encoded(most)
        if (lowered := lower_thinking(self.thinking, most)) < self.thinking:
            fields["thinking"] = encoded({**value_of(fields["thinking"]), "budget_tokens": lowered})

    def _same(self, units: Sequence[bytes]) -> bool:
        return len(units) == len(self.units) and all(a is b for a, b in zip(units, self.units, strict=True))


parse = MessagesRequest.parse


def _continues(thread: object) -> bool:
    """Return whether a request continues a thread, whose earlier messages the server keeps."""
    return isinstance(thread, dict) and (thread.get("type") == "continue" or bool(thread.get("previous_message_id")))


def thinking_tokens(raw: msgspec.Raw) -> int:
    """Return the tokens that manual thinking may take. ``max_tokens`` must be larger."""
    thinking = value_of(raw)
    budget = thinking.get("budget_tokens") if isinstance(thinking, dict) else None
    return budget if isinstance(budget, int) and 0 < budget < 1e12 else 0
