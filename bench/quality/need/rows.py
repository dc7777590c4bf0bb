"""Compute the rows of the table: each method on each source in each window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.quality.conversations import Conversation, Message
from bench.quality.engine import Engine
from bench.quality.langchain import MIDDLEWARE, TUNED, LangChain
from bench.quality.need.score import Score, Scorer
from bench.quality.need.text import Case
from bench.quality.rows import OURS

NEWEST = "newest messages only"
METHODS: dict[str, tuple[str, ...]] = {"ours": (OURS,), "langchain": (MIDDLEWARE, TUNED), "newest": (NEWEST,)}

SUMMARIZER = "extract"
"""The replacement for LangChain's summary model. The proxy's engine has no model: it extracts by its own rules."""


@dataclass(frozen=True)
class Chosen:
    """The cases of a source, and the windows to measure."""

    cases: Sequence[Case]
    windows: Sequence[int]


@dataclass(frozen=True)
class Row:
    """The scores of a method on a source's cases. ``windows`` has the one of each case: ``window``, scaled."""

    source: str
    window: int
    windows: Sequence[int]
    method: str
    scores: Sequence[Score]

    @property
    def too_long(self) -> int:
        """The number of prompts whose text alone exceeds the window."""
        return sum(score.tokens > window for score, window in zip(self.scores, self.windows, strict=True))


async def measure(
    chosen: Mapping[str, Chosen], methods: Sequence[str], store: Path, other: LangChain | None, scorer: Scorer
) -> list[Row]:
    """Return the rows. ``store`` is a folder for the engine's store."""
    engine = Engine(store)
    rows = []
    try:
        for source, (cases, windows) in ((name, (one.cases, one.windows)) for name, one in chosen.items()):
            for window in windows:
                used = [int(window * case.scale) for case in cases]
                ours = [
                    scorer.score(case, *await engine.last_outcome(Conversation(case.id, case.messages), size))
                    for case, size in zip(cases, used, strict=True)
                ]
                for method in methods:
                    scores = ours if method == OURS else _others(method, cases, used, ours, other, scorer)
                    rows.append(Row(source, window, used, method, scores))
    finally:
        await engine.aclose()
    return rows


def _others(
    method: str,
    cases: Sequence[Case],
    windows: Sequence[int],
    ours: Sequence[Score],
    other: LangChain | None,
    scorer: Scorer,
) -> list[Score]:
    if method == NEWEST:
        return [scorer.score_newest(case, one.tokens) for case, one in zip(cases, ours, strict=True)]
    if other is None:
        raise ValueError(f"{method} needs LangChain's process")
    return [scorer.score(case, _last(other, case, size, method)) for case, size in zip(cases, windows, strict=True)]


def _last(other: LangChain, case: Case, window: int, method: str) -> list[Message]:
    """Return LangChain's last prompt. It gets every request, because its state depends on the earlier ones."""
    outcome = other.replay(Conversation(case.id, case.messages), window, method, SUMMARIZER)
    return [outcome.messages[place] for place in outcome.prompts[-1]]
