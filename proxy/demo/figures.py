"""The results of a demo run."""

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
    """One run. Sizes are in the upstream's tokens. ``cacheable`` is a share from 0.0 to 1.0.

    ``prompt_tokens`` and ``largest_prompt`` cover the answered requests. ``summary_tokens`` is the additional input of
    summary requests. ``facts`` is the number of facts in the last answered request.
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
    """Combine the figures of the application and the upstream."""
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
    """Return the cacheable share of the prompts: the prefix that each has in common with the one before it.

    The prefix consists of identical tools and whole messages, so the result is slightly too low. The first request
    doesn't count.
    """
    common = sum(_common(before.body, after.body, counter) for before, after in pairwise(requests))
    total = sum(received.tokens for received in requests[1:])
    return common / total if total else 0.0


def _common(before: Mapping[str, Any], after: Mapping[str, Any], counter: Counter) -> int:
    """Return the tokens of the common prefix of two prompts. Tools come before the messages."""
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
"""Table rows: their names and how to format their values."""


def rows(without: Figures, protected: Figures) -> list[tuple[str, str, str]]:
    """Return the rows of the table: name, value without the proxy, value with the proxy."""
    return [(name, show(without), show(protected)) for name, show in ROWS.items()]
