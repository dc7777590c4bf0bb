"""What is known of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Profile:
    """The limits of a model, in tokens as its provider counts them; ``None`` where nobody knows.

    ``context_window`` bounds input and output together, ``max_input_tokens`` the input alone. ``max_bytes`` is what the
    body of a request may have in bytes, ``max_messages`` how many messages. ``tokenizer`` names a
    tiktoken encoding, and ``token_ratio`` is how many of the provider's tokens one of its tokens stands for
    (1.0 where the encoding is the model's own). ``images`` names the rule by which images are counted, ``tools`` the
    form in which tool definitions enter the prompt (``typescript``, ``json`` or ``claude``).
    ``escapes`` says that the results of parallel calls enter it as JSON in ASCII.
    ``strict_alternation`` says that its server wants user and assistant to speak in turn, the user first.
    ``sources`` says of each field where its value comes from, ``note`` what the operator should know of the
    look-up (a near match, an unknown model).
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
    sources: Mapping[str, str] = field(default_factory=dict)
    note: str | None = None

    @property
    def known(self) -> bool:
        """Whether any bound on the input is known."""
        return self.context_window is not None or self.max_input_tokens is not None
