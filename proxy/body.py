"""The body of a chat completion request: read as it is, and written again with nothing changed but what must be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

_NOTHING = msgspec.Raw()


class _Wire(msgspec.Struct):
    """The fields that matter here, undecoded; all others are passed over."""

    model: msgspec.Raw = _NOTHING
    stream: msgspec.Raw = _NOTHING
    messages: list[msgspec.Raw] | None = None
    tools: msgspec.Raw = _NOTHING
    functions: msgspec.Raw = _NOTHING
    tool_choice: msgspec.Raw = _NOTHING
    response_format: msgspec.Raw = _NOTHING
    max_tokens: msgspec.Raw = _NOTHING
    max_completion_tokens: msgspec.Raw = _NOTHING


_decoder = msgspec.json.Decoder(_Wire)
_any_decoder = msgspec.json.Decoder()
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])

OVERHEAD_FIELDS = ("tools", "functions", "tool_choice", "response_format")


@dataclass(slots=True)
class ChatBody:
    """A request as it came. ``messages`` are the bytes of each message, spelled as the client spelled them.

    ``model`` is ``None`` where the field is missing or no string; ``max_output`` is what the request asks for at most,
    in tokens.
    """

    raw: bytes
    model: str | None
    stream: bool
    messages: list[msgspec.Raw]
    max_output: int | None
    overhead: tuple[bytes, ...]

    def overhead_fields(self) -> dict[str, Any]:
        """Tools, functions, tool choice and response format, decoded: what counts besides messages."""
        return {name: _value(raw) for name, raw in zip(OVERHEAD_FIELDS, self.overhead, strict=True) if raw}

    def rewritten(self, *, messages: Sequence[bytes] | None = None, model: str | None = None) -> bytes:
        """The body with other messages or another model. Every other value keeps its bytes and its place."""
        if messages is None and model is None:
            return self.raw
        fields = _fields_decoder.decode(self.raw)
        if messages is not None:
            fields["messages"] = msgspec.Raw(b"[" + b",".join(messages) + b"]")
        if model is not None:
            fields["model"] = msgspec.Raw(msgspec.json.encode(model))
        return msgspec.json.encode(fields)


def parse(raw: bytes) -> ChatBody | None:
    """The body, or ``None`` where it is not a JSON object with a list of messages, as strict parsers see it.

    Such a body is for the upstream to judge: other parsers may take it.
    """
    try:
        wire = _decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):  # ValidationError is a DecodeError
        return None
    if wire.messages is None:
        return None
    model = _value(wire.model)
    return ChatBody(
        raw=raw,
        model=model if isinstance(model, str) else None,
        stream=_value(wire.stream) is True,
        messages=wire.messages,
        max_output=_positive(wire.max_completion_tokens) or _positive(wire.max_tokens),
        overhead=(
            bytes(wire.tools),
            bytes(wire.functions),
            bytes(wire.tool_choice),
            bytes(wire.response_format),
        ),
    )


def _value(raw: msgspec.Raw | bytes) -> Any:
    return _any_decoder.decode(raw) if bytes(raw) else None


def _positive(raw: msgspec.Raw) -> int | None:
    value = _value(raw)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 1:
        return None
    return int(value) if value < 1e12 else None
