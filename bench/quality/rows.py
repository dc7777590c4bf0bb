"""Select the conversations, and compute the rows of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.quality import dirt, sessions
from bench.quality.conversations import SHAPES, Conversation
from bench.quality.engine import TOKENIZER, Engine, shares
from bench.quality.judge import Figures, Judge
from bench.quality.langchain import MIDDLEWARE, TRIMMING, TUNED, LangChain
from bench.quality.stages import Alone, alone
from proxy.dialects.chat.counting import ChatCounter
from proxy.limits.profiles import Profile

OURS = "compaction-proxy"
SUMMARIZERS = ("echo", "extract")
DIRTY = ", dirty"

WORDS_PER_WINDOW_TOKEN = 2.5
"""Words of a generated conversation per token of the window. It's compacted several times."""


@dataclass(frozen=True)
class Case:
    """Conversations of a kind in a window."""

    name: str
    window: int
    conversations: Sequence[Conversation]
    summarizers: tuple[str, ...] = SUMMARIZERS


@dataclass(frozen=True)
class Row:
    """The figures of an engine for a case. ``summarizer`` is empty if the engine has none."""

    case: str
    window: int
    conversations: int
    summarizer: str
    engine: str
    figures: Figures


def cases(folder: Path | None, *, seeds: int, windows: Sequence[int]) -> list[Case]:
    """Return all cases. ``folder`` may have recorded sessions. ``None`` selects generated conversations only."""
    found = []
    for shape, make in SHAPES.items():
        for window in windows:
            made = [make(seed, int(window * WORDS_PER_WINDOW_TOKEN)) for seed in range(seeds)]
            found.append(Case(shape, window, made))
    for shape, make in SHAPES.items():
        made = [make(seed, int(windows[0] * WORDS_PER_WINDOW_TOKEN)) for seed in range(seeds)]
        dirty = [dirt.dirtied(conversation, kind) for kind in dirt.KINDS for conversation in made]
        found.append(Case(shape + DIRTY, windows[0], dirty, ("echo",)))
    if folder is None:
        return found
    coding = sessions.coding(folder)
    found += [Case("coding session", window, coding) for window in (32_768, 65_536, 131_072) if coding]
    airline = sessions.airline(folder)
    return [*found, *([Case("airline sessions", 4_096, airline)] if airline else [])]


async def measure_stages(folder: Path, recorded: Path) -> list[Alone]:
    """Measure the cheap stages alone on recorded sessions. ``folder`` is for the engine's store."""
    engine = Engine(folder)
    try:
        return [await alone(engine, conversation) for conversation in sessions.coding(recorded)]
    finally:
        await engine.aclose()


async def measure(chosen: Sequence[Case], folder: Path, other: LangChain, step: Callable[[], None]) -> list[Row]:
    """Return the rows of all cases. ``folder`` is for the engine's store."""
    engine = Engine(folder)
    judge = Judge(ChatCounter(Profile("bench", tokenizer=TOKENIZER)))
    rows = []
    try:
        for case in chosen:
            for name, summarizer in engines(case):
                figures = Figures()
                for conversation in case.conversations:
                    if name == OURS:
                        outcome = await engine.replay(conversation, case.window, summarizer)
                    else:
                        outcome = other.replay(conversation, case.window, name, summarizer)
                    judge.add(figures, conversation, outcome, case.window, shares(case.window).users)
                rows.append(Row(case.name, case.window, len(case.conversations), summarizer, name, figures))
                step()
    finally:
        await engine.aclose()
    return rows


def engines(case: Case) -> Iterator[tuple[str, str]]:
    """Yield every engine with every summarizer. Trimming has none."""
    for summarizer in case.summarizers:
        yield OURS, summarizer
        yield MIDDLEWARE, summarizer
        yield TUNED, summarizer
    yield TRIMMING, ""
