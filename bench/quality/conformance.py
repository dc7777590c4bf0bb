"""The sessions of compaction-conformance-kit (https://pypi.org/project/compaction-conformance-kit/, MIT).

A user states rules, constraints, facts, goals, and preferences in a session. The kit compacts it in rounds, each time
the last result, and looks for the words of each statement. A budget limits the characters of every result.

The proxy is measured as its client sees it, without a summary model. The client sends each request of a session to a
running proxy. The window has the budget's share of the session's tokens. In later rounds it sends its last prompt.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, islice, product
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import click
import structlog

from bench.quality.conversations import Conversation, Message, tool_loop
from bench.quality.text import OURS, size
from bench.table import percent, table
from proxy.dialects.chat.units import text_of
from tests.kit.front_door import front

MISSING = (
    "compaction-conformance-kit isn't installed. Fix: .venv/bin/python -m pip install compaction-conformance-kit==0.8.0"
)
BUDGETS, SEEDS, ROUNDS = (0.1, 0.2, 0.3), (1, 2, 3, 4), 5
"""The kit's defaults."""
LONG = 3
"""Results of tools behind each answer of a long session. The kit's own session has 2,000 tokens."""
COLUMNS = ("characters", "budget", "compactor", "output", "round 1", f"round {ROUNDS}", "safety rules", "constraints",
           "facts", "goals", "preferences", "replaced values", "over budget")  # fmt: skip


class Client:
    """A compactor of the kit: a client with a running proxy."""

    name = OURS

    def compact(self, turns: Sequence[Any], round_num: int, budget_chars: int) -> SimpleNamespace:
        """Send the requests of a session, or the last prompt again. Return the text of the last prompt."""
        if round_num == 1:
            self._messages = [{"role": turn.role, "content": turn.text} for turn in turns]
            text = _text(self._messages)
            self._window = size(text) * budget_chars // len(text)
        ends = Conversation("", self._messages).requests() if round_num == 1 else [len(self._messages)]
        with (
            tempfile.TemporaryDirectory(prefix="bench-") as folder,
            front({"kit": {"summary": {"model": "none"}}}, Path(folder), self._window) as door,
        ):
            sent = [door.ask(self._messages[:end], "kit") for end in ends]
        self._messages = sent[-1].messages
        return SimpleNamespace(text=_text(self._messages))


def _text(messages: Sequence[Message]) -> str:
    return "\n".join(f"[{message['role']}] {text_of(message)}" for message in messages)


def lengthened(turns: Sequence[Any], seed: int) -> list[Any]:
    """Return the turns with long texts behind each answer."""
    texts = cycle([text_of(message) for message in tool_loop(seed, 80_000).messages if message["role"] == "tool"])
    return [
        replace(turn, text="\n".join([turn.text, *islice(texts, LONG)])) if turn.role == "assistant" else turn
        for turn in turns
    ]


def measure() -> str:
    """Return the table of the proxy and the kit's own compactors. Raises ``ClickException`` without the kit."""
    try:
        from compaction_kit import build_random_session, kit_version, run_conformance
        from compaction_kit.cli import COMPACTORS
    except ImportError as error:
        raise click.ClickException(MISSING) from error
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    sessions = [(seed, *build_random_session(seed)) for seed in SEEDS]
    compactors: dict[str, Callable[[], Any]] = {OURS: Client, **COMPACTORS}
    rows = []
    for lengthen, budget, name in product((False, True), BUDGETS, compactors):
        shares = []
        for seed, session, canaries in sessions:
            turns = lengthened(session.transcript(), seed) if lengthen else session.transcript()
            source = SimpleNamespace(transcript=partial(list, turns))
            run = run_conformance(source, compactors[name](), ROUNDS, canaries, budget_fraction=budget)
            shares.append(shares_of(run, canaries))
        means = [fmean(one) for one in zip(*shares, strict=True)]
        rows.append([f"{means[0]:,.0f}", percent(budget, 0), name, *(percent(mean, 0) for mean in means[1:])])
    return f"compaction-conformance-kit {kit_version()}\n\n{table(COLUMNS, rows, left={'compactor'})}"


def shares_of(run: Any, canaries: Sequence[Any]) -> list[float]:
    """Return the characters of a session, and the shares of a run: the columns from the output's on."""
    first, last = run.rounds[0], run.rounds[-1]
    text = last.context.text.lower()
    replaced = [value.lower() in text for one in canaries for value in one.superseded_tokens]
    over = [not one.within_budget for one in run.rounds]
    survived = [fmean(one.survived.values()) for one in (first, last)]
    sizes = [first.input_chars, len(text) / first.input_chars]
    return [*sizes, *survived, *last.survival_by_type.values(), fmean(replaced), fmean(over)]
