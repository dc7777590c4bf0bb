"""The figures of one error message, and the overflow that follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["input", "input_plus_output", "silent"]
Scope = Literal["input", "total"]
Remedy = Literal["compact", "lower_output", "either"]

SMALLEST_LIMIT = 256
"""Tokens. A smaller number isn't a model's limit. The smallest window in use, a llama.cpp default, is 512."""
LARGEST_LIMIT = 100_000_000
"""Tokens. A larger number is a byte count, an account number, or a time."""
SMALL_OUTPUT = 0.01
"""Share of the limit. If the requested output is smaller, lowering it isn't worth an attempt."""
ROOMY = 0.5
"""Share of the limit. If the prompt is smaller, the requested output is too large, not the prompt."""


@dataclass(frozen=True, slots=True)
class Overflow:
    """A prompt that is too long, as an error or a successful response shows.

    ``kind`` is ``input`` if the prompt alone is too long, ``input_plus_output`` if it is too long with the requested
    output, and ``silent`` if the upstream returned no error but cut the prompt or its response (``silent.py``).
    ``limit`` is the limit in tokens that the upstream named. ``scope`` says whether it covers the input alone or input
    and output together. ``counted`` is the prompt's size in tokens by the upstream's count, ``None`` if the upstream
    named none or only a lower bound. ``output`` is the requested output in tokens, if named. ``remedy`` is the change
    that would help.
    """

    kind: Kind
    limit: int | None
    scope: Scope | None
    counted: int | None
    output: int | None
    remedy: Remedy


@dataclass(frozen=True, slots=True)
class OverflowReading:
    """The figures of one message, unchecked. If ``counted`` is a lower bound, ``at_least`` is true."""

    kind: Kind = "input"
    limit: int | None = None
    scope: Scope | None = "total"
    counted: int | None = None
    output: int | None = None
    remedy: Remedy | None = None
    at_least: bool = False

    @property
    def known(self) -> int:
        """Return a score for the number of known figures. The limit counts most."""
        return 4 * (self.limit is not None) + 2 * (self.counted is not None) + (self.output is not None)

    def resolve(self) -> Overflow:
        """Check the figures against each other, and decide the kind and the remedy."""
        limit = self.limit if self.limit and SMALLEST_LIMIT <= self.limit <= LARGEST_LIMIT else None
        kind, remedy = self._kind_and_remedy(limit)
        counted = None if self.at_least else self.counted
        if limit and counted and kind == "input" and counted + (self.output or 0) < limit:
            counted = None  # An upstream doesn't refuse a prompt under the limit, so the number is something else.
        return Overflow(kind, limit, self.scope if limit else None, counted, self.output, remedy)

    def _kind_and_remedy(self, limit: int | None) -> tuple[Kind, Remedy]:
        if self.kind == "input":
            return "input", self.remedy or "compact"
        if limit and self.counted is not None and self.counted >= limit:
            return "input", "compact"
        if limit and self.output is not None and self.output >= limit:
            return "input_plus_output", "lower_output"
        if limit and self.counted is not None:
            if self.output is not None and self.output <= SMALL_OUTPUT * limit:
                return "input_plus_output", "compact"
            if not self.at_least and self.counted < ROOMY * limit:
                return "input_plus_output", "lower_output"
        return "input_plus_output", self.remedy or "either"
