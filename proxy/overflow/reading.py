"""What one error message says, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["input", "input_plus_output", "silent"]
Scope = Literal["input", "total"]
Remedy = Literal["compact", "lower_output", "either"]

SMALLEST_LIMIT = 256
"""Tokens. A smaller number is not a model's limit; the smallest window in use, a llama.cpp default, is 512."""
LARGEST_LIMIT = 100_000_000
"""Tokens. A larger number is bytes, an account or a time."""
SMALL_OUTPUT = 0.01
"""Share of the limit under which asking for less output gains nothing worth an attempt."""
ROOMY = 0.5
"""Share of the limit under which the prompt is not what is too large: there is as much room again for an answer."""


@dataclass(frozen=True, slots=True)
class Overflow:
    """A prompt that is too long, by an upstream's refusal or by its answer.

    ``kind`` is ``input`` if the prompt alone is too long, ``input_plus_output`` if it is with the requested output, and
    ``silent`` if nothing was refused: the upstream cut the prompt, or its answer, at the window's end (``silent.py``).
    ``limit`` is the number of tokens that the upstream named: of the input alone or of input and output together, as
    ``scope`` says. ``counted`` is the prompt's size in tokens as the upstream counted it, ``None`` where it named none
    or a lower bound only. ``output`` is the requested output in tokens, where named. ``remedy`` is what would help.
    """

    kind: Kind
    limit: int | None
    scope: Scope | None
    counted: int | None
    output: int | None
    remedy: Remedy


@dataclass(frozen=True, slots=True)
class Reading:
    """The same before judgement; ``counted`` may be a lower bound here, and then ``at_least`` is true."""

    kind: Kind = "input"
    limit: int | None = None
    scope: Scope | None = "total"
    counted: int | None = None
    output: int | None = None
    remedy: Remedy | None = None
    at_least: bool = False

    @property
    def known(self) -> int:
        """How much it says: the number of figures it knows, the limit counting most."""
        return 4 * (self.limit is not None) + 2 * (self.counted is not None) + (self.output is not None)

    def judge(self) -> Overflow:
        """Check the figures against each other, and say which kind it is and what helps."""
        limit = self.limit if self.limit and SMALLEST_LIMIT <= self.limit <= LARGEST_LIMIT else None
        kind, remedy = self._kind_and_remedy(limit)
        counted = None if self.at_least else self.counted
        if limit and counted and kind == "input" and counted + (self.output or 0) < limit:
            counted = None  # A prompt under the limit can't be what was refused: the number is something else.
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
