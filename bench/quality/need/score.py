"""Score a prompt by the names that the next calls use, and compare it with the newest messages of the same size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import correlation, fmean, median

from bench.quality.conversations import Message
from bench.quality.engine import TOKENIZER
from bench.quality.judge import Share
from bench.quality.need.text import Case, divided, text
from proxy.compaction.summary_message import Counts
from proxy.tokens.text import encoding

KINDS = ("paths", "idents")


@dataclass(frozen=True)
class Found:
    """Numbers of names: all, in the prompt, in the control, missing in the control, and of these in the prompt."""

    names: int
    prompt: int
    control: int
    rest: int
    of_rest: int


@dataclass(frozen=True)
class Score:
    """The score of a case. ``lost`` has the names of each kind that are in neither text.

    ``counted`` are the names that the proxy's record counts, by the record's kinds.
    """

    id: str
    tokens: int
    found: dict[str, Found]
    lost: dict[str, list[str]] = field(default_factory=dict)
    counted: Mapping[str, Counts] = field(default_factory=dict)

    def counted_share(self, kind: str) -> float | None:
        """Return the share of the counted names that the prompt has; ``None`` if none were counted."""
        share = Share()
        for name, counts in self.counted.items():
            if (name == "files") == (kind == "paths"):
                share.add(counts[0], sum(counts))
        return share.value


def encoded(history: Sequence[Message], *, readable: bool = False) -> list[list[int]]:
    """Return the tokens of a history's instructions, and those of its other text."""
    parts = [text(part, readable=readable) for part in divided(history)]
    return encoding(TOKENIZER).encode_ordinary_batch(parts)


def newest(history: Sequence[Sequence[int]], size: int) -> str:
    """Return the instructions and the newest text of an encoded history, ``size`` tokens together."""
    instructions, said = history
    left = max(0, size - len(instructions))
    return "\n".join(map(encoding(TOKENIZER).decode, (instructions, said[max(0, len(said) - left) :])))


class Scorer:
    """Score prompts. ``readable`` ignores names that occur only in escaped JSON, with the n of a line break.

    Caches the tokens of the histories, because several methods are scored on each of them.
    """

    def __init__(self, *, readable: bool = False) -> None:
        self._readable = readable
        self._histories: dict[str, list[list[int]]] = {}

    def score(self, case: Case, prompt: Sequence[Message], counted: Mapping[str, Counts] | None = None) -> Score:
        """Score a prompt. Its control has as many tokens of text. ``counted`` is from the proxy's record."""
        ours = text(prompt, readable=self._readable)
        size = len(encoding(TOKENIZER).encode_ordinary(ours))
        return replace(self._scored(case, ours, self._newest(case, size), size), counted=counted or {})

    def score_newest(self, case: Case, size: int) -> Score:
        """Score a control of this size."""
        control = self._newest(case, size)
        return self._scored(case, control, control, size)

    def _newest(self, case: Case, size: int) -> str:
        if case.id not in self._histories:
            self._histories[case.id] = encoded(case.messages, readable=self._readable)
        return newest(self._histories[case.id], size)

    def _scored(self, case: Case, ours: str, control: str, size: int) -> Score:
        whole = text(case.messages, readable=True) if self._readable else None
        found, lost = {}, {}
        for kind in KINDS:
            names = {name for name in case.names(kind) if whole is None or name in whole}
            here = {name for name in names if name in ours}
            newest = {name for name in names if name in control}
            rest = names - newest
            found[kind] = Found(len(names), len(here), len(newest), len(rest), len(rest & here))
            lost[kind] = sorted(rest - here)
        return Score(case.id, size, found, lost)


def summed(scores: Sequence[Score], kind: str) -> dict[str, float | None]:
    """Return the shares in the prompt, in the control, and of the rest: sums over all cases."""
    prompt, control, rest = Share(), Share(), Share()
    for found in (score.found[kind] for score in scores):
        prompt.add(found.prompt, found.names)
        control.add(found.control, found.names)
        rest.add(found.of_rest, found.rest)
    return {"prompt": prompt.value, "control": control.value, "rest": rest.value}


def averaged(scores: Sequence[Score], kind: str) -> dict[str, float | None]:
    """Return the same shares as means over the cases that have any names of that kind."""
    named = [found for found in (score.found[kind] for score in scores) if found.names]
    rest = [found.of_rest / found.rest for found in named if found.rest]
    return {
        "prompt": fmean(found.prompt / found.names for found in named) if named else None,
        "control": fmean(found.control / found.names for found in named) if named else None,
        "rest": fmean(rest) if rest else None,
    }


def agreement(scores: Sequence[Score], kind: str) -> float | None:
    """Return Spearman's rank correlation of the record's share with the share that the next calls need, over cases.

    ``None`` if one of the two is the same in all cases, because then there are no ranks.
    """
    pairs = [
        (counted, found.prompt / found.names)
        for score in scores
        if (found := score.found[kind]).names and (counted := score.counted_share(kind)) is not None
    ]
    if any(len({pair[side] for pair in pairs}) < 2 for side in (0, 1)):
        return None
    return correlation(*(_ranks([pair[side] for pair in pairs]) for side in (0, 1)))


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value. Equal values have the mean of their ranks."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def median_size(scores: Sequence[Score]) -> int:
    """Return the median tokens of the prompts."""
    return round(median(score.tokens for score in scores))
