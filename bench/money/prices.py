"""Compute the price of requests, in units of the input price of a token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from bench.money.upstream import Call


@dataclass(frozen=True)
class Prices:
    """The prices of a token relative to one of fresh input: from the cache, into the cache, and of output.

    A prompt over ``step`` tokens costs ``factor`` times as much, all of it.
    """

    read: float = 0.1
    write: float = 1.25
    output: float = 5.0
    step: int | None = None
    factor: float = 2.0

    def cost(self, call: Call) -> float:
        """Return the price of a request. A transcript isn't written to the cache, because nothing reads it again."""
        write = 1.0 if call.kind == "transcript" else self.write
        rate = self.factor if self.step is not None and call.prompt > self.step else 1.0
        return rate * (call.read * self.read + (call.prompt - call.read) * write + call.output * self.output)

    def bill(self, calls: Iterable[Call]) -> float:
        """Return the price of all requests."""
        return sum(map(self.cost, calls))


def break_even(ours: Iterable[Call], theirs: Iterable[Call], prices: Prices) -> float | None:
    """Return the price of cached tokens from which on the first bill is the lower one.

    ``None`` if it's lower at any price. A price over 1, or infinity, if it's never lower in practice.
    """
    ours, theirs = list(ours), list(theirs)
    free, full = (replace(prices, read=read) for read in (0.0, 1.0))
    begin = free.bill(ours) - free.bill(theirs)
    end = full.bill(ours) - full.bill(theirs)
    if begin <= 0:
        return None
    return begin / (begin - end) if end < begin else float("inf")


def paid_after(ours: Sequence[Call], theirs: Sequence[Call], prices: Prices) -> int | None:
    """Return the turns after the first checkpoint until the first bill is the lower one; ``None`` if it never is.

    Both bills have the same turns. Summaries come before the turn that they are sent with, or that they are made for.
    """
    turns = iter(theirs)
    debt, checkpoint, number = 0.0, None, 0
    for call in ours:
        debt += prices.cost(call)
        if call.kind != "turn":
            continue
        other = next(turns)
        debt -= prices.cost(other)
        number += 1
        if checkpoint is None and call.prompt < other.prompt:
            checkpoint = number
        if checkpoint is not None and debt <= 0:
            return number - checkpoint
    return None
