"""What stands in for a summary model on both sides: the same text in gives the same notes out.

Imports nothing but the standard library, so that both environments can use it.
"""

from __future__ import annotations

import re
from collections.abc import Callable

Count = Callable[[str], int]
"""Tokens of a text."""
Summariser = Callable[[str, int, Count], str]
"""Notes on a text, in at most so many tokens."""

# Words with letters and digits in them, paths of files, addresses.
_IDENTIFIER = re.compile(
    r"https?://[^\s\"'<>]{4,200}|(?:[\w.~-]+/)+[\w-]+\.\w+|\b(?=\w*\d)(?=\w*[A-Za-z_])[\w-]{5,60}\b"
)

AROUND = 40
"""Characters on either side of an identifier that an extract keeps of its line."""


def echo(text: str, max_tokens: int, count: Count) -> str:
    """The beginning of the text: a model that does no more than repeat what it reads first."""
    kept = text[: max_tokens * 8]
    while (size := count(kept)) > max_tokens:
        kept = kept[: int(len(kept) * max_tokens / size * 0.99)]
    return kept


def extract(text: str, max_tokens: int, count: Count) -> str:
    """The surroundings of identifiers, the newest first chosen, in their order; without any, the text's beginning."""
    kept: list[str] = []
    left = max_tokens
    seen: set[str] = set()
    for line in reversed(text.splitlines()):
        for excerpt in reversed(_excerpts(line)):
            if excerpt in seen:
                continue
            seen.add(excerpt)
            left -= count(excerpt) + 1
            if left < 0:
                return "\n".join(reversed(kept))
            kept.append(excerpt)
    return "\n".join(reversed(kept)) if kept else echo(text, max_tokens, count)


def _excerpts(line: str) -> list[str]:
    """What is around the identifiers of a line; those that are near each other share an excerpt."""
    spans: list[tuple[int, int]] = []
    for match in _IDENTIFIER.finditer(line):
        start, end = max(0, match.start() - AROUND), min(len(line), match.end() + AROUND)
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((start, end))
    return [line[start:end].strip() for start, end in spans]


SUMMARISERS: dict[str, Summariser] = {"echo": echo, "extract": extract}
