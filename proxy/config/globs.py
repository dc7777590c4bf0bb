"""Compare patterns in the syntax of file names: whether they overlap, and whether one covers the other."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from functools import lru_cache

_PIECE = re.compile(r"\*|\?|\[!?\]?[^\]]*\]|.", re.DOTALL)
_WILD = re.compile(r"[*?\[]")
# Sample characters for character classes, in addition to the characters of both patterns.
_SAMPLES = "".join(map(chr, range(32, 127)))


@lru_cache(10_000)
def meet(one: str, other: str) -> bool:
    """Return whether some text matches both patterns, by the rules of ``fnmatchcase``."""
    start, begin = _WILD.split(one, maxsplit=1)[0], _WILD.split(other, maxsplit=1)[0]
    shorter = min(len(start), len(begin))
    if start[:shorter] != begin[:shorter]:
        return False
    if len(start) == len(one):
        return fnmatchcase(one, other)
    if len(begin) == len(other):
        return fnmatchcase(other, one)
    return _meet(_PIECE.findall(one), _PIECE.findall(other), _SAMPLES + one + other)


def _meet(first: list[str], second: list[str], samples: str) -> bool:
    """Return whether two lists of pieces can match the same text. Compare them from their ends."""
    ends = (len(first), len(second))
    below = [False] * (len(second) + 1)
    for i in range(len(first), -1, -1):
        row = [False] * (len(second) + 1)
        for j in range(len(second), -1, -1):
            if (i, j) == ends:
                row[j] = True
            elif "*" in (*first[i : i + 1], *second[j : j + 1]):
                # The star ends here, or matches the next piece of the other pattern.
                row[j] = (i < ends[0] and below[j]) or (j < ends[1] and row[j + 1])
            elif i < ends[0] and j < ends[1]:
                row[j] = below[j + 1] and _share(first[i], second[j], samples)
        below = row
    return below[0]


def _share(one: str, other: str, samples: str) -> bool:
    """Return whether some character matches both pieces. Neither of them is a star."""
    if one == "?" or other == "?":
        return True
    return any(fnmatchcase(c, one) and fnmatchcase(c, other) for c in samples)


@lru_cache(10_000)
def covers(general: str, special: str) -> bool:
    """Return whether ``general`` matches every text that ``special`` matches.

    A true result is certain. It's false for some pairs whose character classes would have to be compared.
    """
    if not _WILD.search(special):
        return fnmatchcase(special, general)
    first, second = _PIECE.findall(general), _PIECE.findall(special)
    row = [True] + [False] * len(second)
    for piece in first:
        above, row = row, [piece == "*" and row[0]]
        for j, other in enumerate(second):
            if piece == "*":
                row.append(above[j + 1] or row[j])
            else:
                is_one = other != "*" and (
                    piece in ("?", other) or (len(other) == 1 and other != "?" and fnmatchcase(other, piece))
                )
                row.append(above[j] and is_one)
    return row[-1]
