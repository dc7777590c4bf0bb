"""Paths, URLs and identifiers that a text mentions: what a summary loses first and an agent needs most."""

from __future__ import annotations

import re
from collections.abc import Iterable

from proxy.compaction.message import TextCounter

# Every alternative is anchored by a literal and bounded in length, so that matching is linear in the text.
_ARTEFACT = re.compile(
    r"""
    https?://[^\s"'<>()\[\]{}\\`]{4,300}                                  # URLs
  | (?<![\w/.~-])(?:~|\.{1,2})?/[\w.@+-]{1,100}(?:/[\w.@+-]{1,100}){1,30}  # absolute and dotted paths
  | (?<![\w/.-])[\w@+-][\w.@+-]{0,100}(?:/[\w.@+-]{1,100}){0,30}/[\w.@+-]{1,100}\.[A-Za-z]\w{0,9}  # relative files
  | (?<![\w-])[A-Z][A-Z0-9]{1,9}-\d{1,10}(?![\w-])                          # tickets
  | (?<![\w-])[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}(?![\w-])  # UUIDs
  | (?<!\w)(?=[0-9a-f]{0,11}\d)[0-9a-f]{12,64}(?!\w)                         # hashes
    """,
    re.VERBOSE,
)

_TRAILING = ".,;:!?"


def artefacts(texts: Iterable[str]) -> list[str]:
    """All artefacts of the texts, each once, the one mentioned last coming last."""
    seen: dict[str, None] = {}
    for text in texts:
        for match in _ARTEFACT.finditer(text):
            item = match.group().rstrip(_TRAILING)
            seen.pop(item, None)
            seen[item] = None
    return list(seen)


def within(items: list[str], max_tokens: int, count: TextCounter) -> list[str]:
    """As many of the newest items as the tokens allow, one a line, in their order."""
    kept: list[str] = []
    left = max_tokens
    for item in reversed(items):
        left -= count(item) + 2  # the line's dash and end
        if left < 0:
            break
        kept.append(item)
    return kept[::-1]
