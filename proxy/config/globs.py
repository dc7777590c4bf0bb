"""Whether two patterns, as in file names, can match the same text."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from functools import cache

_PIECE = re.compile(r"\*|\?|\[!?\]?[^\]]*\]|.", re.DOTALL)
# A class of characters that is met by none of these and by none in the other pattern is odd enough.
_SAMPLES = "".join(map(chr, range(32, 127)))


def meet(one: str, other: str) -> bool:
    """Whether some text matches both, as ``fnmatchcase`` has it."""
    first, second = _PIECE.findall(one), _PIECE.findall(other)
    samples = _SAMPLES + one + other

    @cache
    def rest(i: int, j: int) -> bool:
        if i == len(first):
            return all(piece == "*" for piece in second[j:])
        if j == len(second):
            return all(piece == "*" for piece in first[i:])
        if first[i] == "*" or second[j] == "*":
            # The star ends here, or takes one more character of the other.
            return (first[i] == "*" and (rest(i + 1, j) or rest(i, j + 1))) or (
                second[j] == "*" and (rest(i, j + 1) or rest(i + 1, j))
            )
        return _share(first[i], second[j], samples) and rest(i + 1, j + 1)

    return rest(0, 0)


def _share(one: str, other: str, samples: str) -> bool:
    if one == "?" or other == "?":
        return True
    return any(fnmatchcase(c, one) and fnmatchcase(c, other) for c in samples)
