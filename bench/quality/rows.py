"""Select the conversations, and compute the figures of each engine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from bench.quality import dirt
from bench.quality.conversations import SHAPES, Conversation
from bench.quality.engine import TOKENIZER, Engine, shares
from bench.quality.judge import Figures, Judge
from bench.quality.langchain import MIDDLEWARE, TUNED, LangChain
from bench.quality.summarizer import SUMMARIZERS
from bench.quality.text import OURS
from proxy.dialects.chat.counting import ChatCounter
from proxy.dialects.chat.units import text_of
from proxy.limits.profiles import Profile

WORDS_PER_WINDOW_TOKEN = 2.5
"""Words of a generated conversation per token of the window. It's compacted several times."""

# Reservations, flights, users, and payment methods of an airline are words with a digit.
_IDENTIFIER = re.compile(r"\b(?=\w*\d)(?=\w*[A-Za-z_])\w{6,60}\b")


@dataclass(frozen=True)
class Case:
    """Conversations of a kind in a window."""

    name: str
    window: int
    conversations: Sequence[Conversation]
    summarizers: tuple[str, ...] = tuple(SUMMARIZERS)


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
        found.append(Case(f"{shape}, dirty", windows[0], dirty, ("echo",)))
    return found if folder is None else [*found, *_recorded(folder)]


def _recorded(folder: Path) -> Iterator[Case]:
    """Yield a long coding session, and forty conversations of airline customers, if the folder has them."""
    coding, airline = folder / "coding-a.json", folder / "airline-40.json"
    if coding.exists():
        session = Conversation("coding session", json.loads(coding.read_text())["messages"])
        for window in (32_768, 65_536, 131_072):
            yield Case("coding session", window, [session])
    if airline.exists():
        sessions = enumerate(json.loads(airline.read_text()))
        yield Case("airline sessions", 4_096, [_airline(number, session) for number, session in sessions])


def _airline(number: int, session: Mapping[str, Any]) -> Conversation:
    """Return a conversation. Its facts are identifiers, each with the first message that contains it."""
    facts: dict[str, int] = {}
    for index, message in enumerate(session["messages"]):
        if index:  # The first message is the airline's policy, which all conversations share.
            for identifier in _IDENTIFIER.findall(text_of(message)):
                facts.setdefault(identifier, index)
    return Conversation(f"airline {number}", session["messages"], facts)


async def measure(case: Case, engine: Engine, other: LangChain | None) -> dict[str, dict[str, Figures]]:
    """Return the figures of a case by engine and summarizer."""
    judge = Judge(ChatCounter(Profile("bench", tokenizer=TOKENIZER)))
    found: dict[str, dict[str, Figures]] = {}
    for summarizer, name in product(case.summarizers, (OURS, MIDDLEWARE, TUNED)):
        figures = Figures()
        for conversation in case.conversations:
            if name == OURS:
                outcome = await engine.replay(conversation, case.window, summarizer)
            elif other is None:
                continue
            else:
                outcome = other.replay(conversation, case.window, name, summarizer)
            judge.add(figures, conversation, outcome, case.window, shares(case.window).users)
        found.setdefault(name, {})[summarizer] = figures
    return found
