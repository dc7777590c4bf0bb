"""The profile of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from proxy.limits.profiles.prices import Price


@dataclass(frozen=True, slots=True)
class Profile:
    """The limits of a model, in its provider's tokens. ``None`` if unknown.

    ``context_window`` bounds input and output together, ``max_input_tokens`` the input alone. ``max_bytes`` bounds the
    body of a request, ``max_messages`` its number of messages. ``tokenizer`` is a tiktoken encoding. ``token_ratio`` is
    the provider's tokens per token of that encoding (1.0 if the encoding is the model's own). ``images`` is the rule
    for counting images. ``tools`` is the form of tool definitions in the prompt (``typescript``, ``json``, or
    ``claude``). If ``escapes`` is set, results of parallel calls enter the prompt as ASCII JSON. If
    ``strict_alternation`` is set, the server requires alternating user and assistant messages, user first.
    ``native_compaction`` is whether the provider compacts conversations of the model on request; ``None`` if unknown.
    ``price`` is the price at the provider, if the table lists it there. ``sources`` maps each field to the source
    of its value. ``note`` tells the operator about an inexact match or an unknown model.
    """

    model: str
    context_window: int | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    max_bytes: int | None = None
    max_messages: int | None = None
    tokenizer: str = "o200k_base"
    token_ratio: float = 1.0
    images: str = "unknown"
    tools: str = "typescript"
    escapes: bool = False
    strict_alternation: bool = False
    price: Price | None = None
    native_compaction: bool | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    note: str | None = None

    @property
    def known(self) -> bool:
        """Return whether a bound on the input is known."""
        return self.context_window is not None or self.max_input_tokens is not None
