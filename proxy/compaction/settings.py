"""Settings of the engine: when to compact, and how much recent conversation to keep.

Triggers have the terms of LangChain's ``SummarizationMiddleware``: tokens, messages, or a fraction of the budget. The
engine doesn't check settings. ``proxy.config.policy`` has the same fields, with checks and descriptions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from proxy.compaction import keeps


@dataclass(frozen=True, slots=True)
class Clause:
    """A condition on a conversation. All fields that are set must hold.

    ``tokens`` and ``messages`` are counts; ``fraction`` is a share of the budget, in (0, 1]. ``price_step`` stands for
    the tokens below which a model is cheaper. ``with_step`` puts them in its place.
    """

    tokens: int | None = None
    messages: int | None = None
    fraction: float | None = None
    price_step: bool | None = None

    def met(self, tokens: int, messages: int, budget: int | None) -> bool:
        """Return whether a conversation of this size meets the clause. Limits are inclusive.

        A fraction isn't met if the budget (in tokens) is unknown.
        """
        if self.tokens is None and self.messages is None and self.fraction is None:
            return False
        if self.tokens is not None and tokens < self.tokens:
            return False
        if self.messages is not None and messages < self.messages:
            return False
        if self.fraction is not None:
            return budget is not None and tokens >= share_of(self.fraction, budget)
        return True

    def least_tokens(self, budget: int | None) -> float:
        """Return the tokens below which the clause is never met; infinite if it can't be met at any size."""
        if self.fraction is not None and budget is None:
            return math.inf
        share = 0 if self.fraction is None or budget is None else share_of(self.fraction, budget)
        return max(self.tokens or 0, share)

    def level(self, budget: int | None) -> int | None:
        """Return the number of tokens that meets the clause; ``None`` if tokens alone can't meet it."""
        if self.messages is not None or (self.fraction is not None and budget is None):
            return None
        if self.fraction is None or budget is None:
            return self.tokens
        return max(self.tokens or 0, share_of(self.fraction, budget))


Trigger = tuple[Clause, ...]  # A trigger fires if any of its clauses is met. An empty trigger never fires.
TRIGGER: Trigger = (Clause(fraction=0.85),)  # the default trigger of a policy and of its stages
KEEP = Clause(fraction=0.10)  # the default of `keep`, for a policy and for its stages


def with_step(trigger: Trigger, tokens: int | None) -> Trigger:
    """Return a trigger with this number of tokens for the price step; without its clauses if there is no step."""
    found = (replace(c, tokens=max(tokens, c.tokens or 0)) if c.price_step and tokens else c for c in trigger)
    return tuple(clause for clause in found if tokens or not clause.price_step)


def raised(trigger: Trigger, tokens: int) -> Trigger:
    """Return a trigger whose clauses with a fraction also need this many tokens."""
    return tuple(c if c.fraction is None else replace(c, tokens=max(tokens, c.tokens or 0)) for c in trigger)


def share_of(fraction: float, budget: int) -> int:
    """Return a fraction of a budget in whole tokens, at least 1."""
    return max(1, math.floor(fraction * budget))


def any_met(trigger: Trigger, tokens: int, messages: int, budget: int | None) -> bool:
    """Return whether one of the clauses is met."""
    return any(clause.met(tokens, messages, budget) for clause in trigger)


def lowest_level(trigger: Trigger, budget: int | None) -> int | None:
    """Return the number of tokens at which the trigger fires for any message count; ``None`` if there is none."""
    levels = (clause.level(budget) for clause in trigger)
    return min((level for level in levels if level is not None), default=None)


@dataclass(frozen=True, slots=True)
class UserMessageRules:
    """The user's earlier messages, which stay verbatim next to a summary."""

    max_tokens: int = 20_000
    keep_first: bool = True


@dataclass(frozen=True, slots=True)
class IndexRules:
    """The list of paths, URLs, and names from the summarized messages."""

    max_tokens: int = 4000


@dataclass(frozen=True, slots=True)
class Bounds:
    """The most messages and the most body bytes that a request may have; ``None`` if the limit is unknown."""

    messages: int | None = None
    bytes: int | None = None

    def reached(self, messages: int, size: int, share: float = keeps.PRESSING) -> bool:
        """Return whether a request with ``messages`` messages and ``size`` bytes has reached a share of a limit."""
        return (self.messages is not None and messages >= part(share, self.messages)) or (
            self.bytes is not None and size >= part(share, self.bytes)
        )


UNBOUNDED = Bounds()


def part(share: float, most: int) -> int:
    """Return a share of a limit, at least 1."""
    return max(1, int(share * most))
