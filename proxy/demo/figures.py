"""What a run of the demonstration came to, in figures."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any

from proxy.demo.agent import Session
from proxy.demo.counting import Counter
from proxy.demo.script import FACTS, facts_in
from proxy.demo.upstream import Received, StandIn


@dataclass(frozen=True, slots=True)
class Figures:
    """One run. Sizes are in tokens as the upstream counts them, ``cacheable`` is a share from 0.0 to 1.0.

    ``prompt_tokens`` and ``largest_prompt`` are of the requests that were answered; ``summary_tokens`` is what the
    summaries read, on top of it. ``facts`` counts those that stand in the last answered request.
    """

    turns: int
    error: str | None
    prompt_tokens: int
    summary_tokens: int
    largest_prompt: int
    refused: int
    compacted: int
    summaries: int
    digests: int
    faults: int
    facts: int
    cacheable: float
    seconds: float


def figures(session: Session, upstream: StandIn) -> Figures:
    """Puts together what the application saw and what reached the upstream."""
    answered = [received for received in upstream.conversations if received.status == 200]
    summaries = [received for received in upstream.summaries if received.status == 200]
    done = Tally(headers.get("x-compaction", "") for headers in session.headers)
    made = Tally(headers.get("x-compaction-summary", "") for headers in session.headers)
    return Figures(
        turns=session.turns,
        error=session.error,
        prompt_tokens=sum(received.tokens for received in answered),
        summary_tokens=sum(received.tokens for received in summaries),
        largest_prompt=max((received.tokens for received in answered), default=0),
        refused=sum(received.status != 200 for received in upstream.requests),
        compacted=done["compacted"],
        summaries=len(summaries),
        digests=made["digest"],
        faults=len(upstream.faults),
        facts=facts_in(answered[-1].body["messages"]) if answered else 0,
        cacheable=cacheable(answered, upstream.counter),
        seconds=session.seconds,
    )


def cacheable(requests: list[Received], counter: Counter) -> float:
    """The share of the prompts that a provider's cache can hold: what each has in common with the one before it.

    Whole messages only, from the first on, and the tools where they are the same: a little less than the truth.
    The first request, which has none before it, is left out.
    """
    common = sum(_common(before.body, after.body, counter) for before, after in pairwise(requests))
    total = sum(received.tokens for received in requests[1:])
    return common / total if total else 0.0


def _common(before: Mapping[str, Any], after: Mapping[str, Any], counter: Counter) -> int:
    """Tokens at the start of a prompt that are the same in both bodies; tools stand before the messages."""
    if before.get("tools") != after.get("tools"):
        return 0
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(before["messages"], after["messages"], strict=False))
    size = counter.request({**after, "messages": [message for _, message in pairs]})
    return size.total


ROWS: dict[str, Callable[[Figures], str]] = {
    "turns done": lambda run: f"{run.turns:,}",
    "error": lambda run: run.error.partition(":")[0] if run.error else "none",
    "tokens sent": lambda run: f"{run.prompt_tokens:,}",
    "tokens sent for summaries": lambda run: f"{run.summary_tokens:,}",
    "largest prompt": lambda run: f"{run.largest_prompt:,}",
    "requests refused upstream": lambda run: f"{run.refused:,}",
    "turns compacted": lambda run: f"{run.compacted:,}",
    "summaries made": lambda run: f"{run.summaries:,}" + (f" ({run.digests:,} digests)" if run.digests else ""),
    "malformed conversations": lambda run: f"{run.faults:,}",
    "early facts still visible": lambda run: f"{run.facts} of {len(FACTS)} in turn {run.turns:,}",
    "prompt a cache can hold": lambda run: f"{run.cacheable:.1%}",
    "wall time": lambda run: f"{run.seconds:.1f} s",
}
"""What is shown of a run, by its name."""


def rows(without: Figures, protected: Figures) -> list[tuple[str, str, str]]:
    """The lines of the table: what is shown, without the proxy and with it."""
    return [(name, show(without), show(protected)) for name, show in ROWS.items()]
