"""Score a recognizer on the catalogue: recall, false alarms, and correct figures."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from bench.overflow.lines import Line
from bench.table import Share
from proxy.dialects.apis import DIALECTS
from proxy.overflow import Overflow, recognise
from proxy.overflow.patterns import CODES, ROWS
from proxy.overflow.silent import EarlierPrompt, Finished, counts_in_full, cut_prompt, silent_overflow

Recognizer = Callable[[Line], Overflow | None]

FIGURES = ("kind", "limit", "scope", "counted", "output", "remedy")


@dataclass(slots=True)
class Score:
    """The score of a recognizer.

    It ``found`` overflows, and of ``others`` wrongly those in ``alarms``. For each figure, ``right`` has the correct
    ones of the recognized lines with this figure.
    """

    name: str
    reads_figures: bool = True
    others: int = 0
    found: int = 0
    missed: list[str] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)
    trapped: list[str] = field(default_factory=list)
    wrong: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in FIGURES})
    right: dict[str, Share] = field(default_factory=lambda: {name: Share() for name in FIGURES})

    @property
    def overflows(self) -> int:
        """The number of overflows."""
        return self.found + len(self.missed)

    @property
    def recall(self) -> float:
        """The share of overflows that were recognized."""
        return self.found / self.overflows if self.overflows else 0.0


def ours(line: Line) -> Overflow | None:
    """Recognize a response like the proxy, with the size and window that it knows for the request."""
    found = recognise(line.status, line.body, line.headers)
    if found is None and (line.silent or (line.status == 200 and line.estimate is not None)):
        # Without the size of the request, the response alone decides.
        return silent(
            DIALECTS.get(line.endpoint, DIALECTS["chat"]).answers.read_usage(line.body), line.estimate or 0, line.window
        )
    return found


def silent(answer: Finished, counted: int, window: int | None) -> Overflow | None:
    """Recognize a response without an error, after a longer prompt had the same response.

    The proxy needs two signs, so it detects a cut prompt only as the conversation continues. If the upstream doesn't
    cut it, the reported size of the longer prompt differs.
    """
    if found := silent_overflow(answer, counted, window=window):
        return found
    if not counted or not answer.prompt or counts_in_full(counted, answer.prompt):
        return None
    grown = counted // 4
    before = [EarlierPrompt(answer.prompt, grown), EarlierPrompt(answer.prompt, grown // 2)]
    return cut_prompt(answer, counted + grown, grown // 4, before, window)


def leaving_out(line: Line) -> Overflow | None:
    """Recognize a response without the rows and codes that name its provider."""
    if line.silent:
        return ours(line)

    def remains(source: str) -> bool:
        return not any(is_of(name, line.provider) for name in source.split(","))

    rows = [row for row in ROWS if remains(row.source)]
    codes = [code for code, source in CODES.items() if remains(source)]
    return recognise(line.status, line.body, line.headers, rows=rows, codes=codes)


def is_of(source: str, provider: str) -> bool:
    """Return whether a source in the tables is this provider of the catalogue ("Qwen" is "Qwen DashScope")."""
    ours_, theirs = (re.sub(r"[^a-z0-9]", "", name.lower()) for name in (source, provider))
    return bool(ours_) and (ours_ in theirs or theirs in ours_)


def score(name: str, lines: Sequence[Line], recognizer: Recognizer, *, reads_figures: bool = True) -> Score:
    """Score a recognizer on all lines. ``reads_figures``: it returns more than yes or no."""
    made = Score(name, reads_figures)
    for line in lines:
        read = recognizer(line)
        made.others += not line.overflow
        if read is None:
            if line.overflow:
                made.missed.append(line.id)
            continue
        if read.limit in line.traps:
            made.trapped.append(line.id)
        if not line.overflow:
            made.alarms.append(line.id)
            continue
        made.found += 1
        for figure, expected in _expected(line, read):
            correct = getattr(read, figure) == expected
            made.right[figure].add(correct, 1)
            if not correct:
                made.wrong[figure].append(line.id)
    return made


def _expected(line: Line, read: Overflow) -> Iterable[tuple[str, object]]:
    """Yield the figures that a line has or that were read. A limit in characters counts as an overflow of the input."""
    yield "kind", "silent" if line.silent else "input" if line.kind == "chars" else line.kind
    yield "remedy", line.remedy
    if line.limit is not None or read.limit is not None:
        yield "limit", line.limit
        if line.scope is not None:
            yield "scope", line.scope
    if not line.silent and (line.counted is not None or read.counted is not None):
        yield "counted", line.counted
    if not line.silent and (line.output is not None or read.output is not None):
        yield "output", line.output
