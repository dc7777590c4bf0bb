"""Deterministic replacements for a summary model, for both engines.

Imports only the standard library, because both environments use it.
"""

from __future__ import annotations

import re
from collections.abc import Callable

Count = Callable[[str], int]
"""Count the tokens of a text."""
Summarizer = Callable[[str, int, Count], str]
"""Summarize a text in at most this number of tokens."""

# Words with letters and digits, file paths, and URLs.
_IDENTIFIER = re.compile(
    r"https?://[^\s\"'<>]{4,200}|(?:[\w.~-]+/)+[\w-]+\.\w+|\b(?=\w*\d)(?=\w*[A-Za-z_])[\w-]{5,60}\b"
)

AROUND = 40
"""Characters that an extract includes before and after an identifier, within its line."""


def echo(text: str, max_tokens: int, count: Count) -> str:
    """Return the beginning of the text, like a model that repeats its input."""
    kept = text[: max_tokens * 8]
    while (size := count(kept)) > max_tokens:
        kept = kept[: int(len(kept) * max_tokens / size * 0.99)]
    return kept


def extract(text: str, max_tokens: int, count: Count) -> str:
    """Return the identifiers with their surroundings, or the beginning of the text if it has none.

    Newer identifiers have priority. The result has them in the text's order.
    """
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
    """Return the surroundings of a line's identifiers. Overlapping ones are merged."""
    spans: list[tuple[int, int]] = []
    for match in _IDENTIFIER.finditer(line):
        start, end = max(0, match.start() - AROUND), min(len(line), match.end() + AROUND)
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((start, end))
    return [line[start:end].strip() for start, end in spans]


SUMMARIZERS: dict[str, Summarizer] = {"echo": echo, "extract": extract}
