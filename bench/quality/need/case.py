"""A history with the names that later calls use, and the score of a prompt by these names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from bench.quality.conversations import Message
from bench.quality.need.files import ordinary, owners, with_files
from bench.quality.text import divided, newest, size, text
from bench.table import Share, percent


@dataclass(frozen=True)
class Case:
    """A history, and the names in later calls that also occur in it.

    ``scale`` multiplies windows. It's less than 1 if the history is shorter than the usual cut of its source.
    """

    id: str
    messages: list[Message]
    paths: list[str]
    idents: list[str]
    scale: float = 1.0

    def names(self, kind: str) -> set[str]:
        """Return the different names of a kind. The name of a file is the last part of its path."""
        return {path.rsplit("/", 1)[-1] for path in self.paths} if kind == "paths" else set(self.idents)


def tokens(messages: Iterable[Message]) -> int:
    """Return the tokens of the text of messages."""
    return size(text(messages))


def occurring(names: Iterable[str], history: Iterable[Message]) -> list[str]:
    """Return the different names that occur in a history, but not in its instructions."""
    instructions, said = (text(part, readable=True) for part in divided(history))
    return sorted({name for name in names if name in said and name not in instructions})


KINDS = ("paths", "idents")


@dataclass(frozen=True)
class Found:
    """Numbers of names: all, in the prompt, missing in the control, of these in the prompt, and with a file."""

    names: int
    prompt: int
    rest: int
    of_rest: int
    with_file: int = 0


@dataclass(frozen=True)
class Score:
    """The score of a case: the tokens of the prompt, and the names of each kind.

    ``ordinary`` has the numbers of ordinary words and of all words in the index.
    """

    tokens: int
    found: dict[str, Found]
    ordinary: tuple[int, int] = (0, 0)


def scored(case: Case, messages: Sequence[Message]) -> Score:
    """Score a prompt. Its control has as many tokens."""
    prompt = text(messages)
    tokens = size(prompt)
    control = newest(case.messages, tokens)
    owned = with_files(owners(case.messages, case.names("idents")), messages)
    found = {}
    for kind in KINDS:
        names = case.names(kind)
        here = {name for name in names if name in prompt}
        rest = {name for name in names if name not in control}
        found[kind] = Found(len(names), len(here), len(rest), len(rest & here), len(rest & owned))
    return Score(tokens, found, ordinary(case.messages, prompt))


def summed(scores: Sequence[Score], kind: str) -> tuple[float | None, float | None]:
    """Return the shares in the prompt, and of the names that the control lacks: sums over all cases."""
    prompt, rest = Share(), Share()
    for found in (score.found[kind] for score in scores):
        prompt.add(found.prompt, found.names)
        rest.add(found.of_rest, found.rest)
    return prompt.value, rest.value


def details(scores: Sequence[Score]) -> tuple[float | None, float | None]:
    """Return the share of the rest's identifiers with a file of theirs, and that of ordinary words in the index."""
    owned, words = Share(), Share()
    for score in scores:
        if score.found["paths"].names:
            owned.add(score.found["idents"].with_file, score.found["idents"].rest)
        words.add(*score.ordinary)
    return owned.value, words.value


def cells(scores: Sequence[Score], windows: Sequence[int]) -> list[str]:
    """Return the cells with the median tokens, the prompts whose text alone exceeds their windows, and the shares."""
    too_long = sum(score.tokens > window for score, window in zip(scores, windows, strict=True))
    shares = [percent(share, 0) for kind in KINDS for share in summed(scores, kind)]
    return [f"{round(median(score.tokens for score in scores)):,}", str(too_long), *shares]
