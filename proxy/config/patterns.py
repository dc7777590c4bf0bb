"""Regular expressions that can take for ever on some texts, found by their form.

Python's ``re`` goes back and tries anew. Where a repetition stands inside another one, or alternatives that begin alike
stand in one, the number of ways to try doubles with each character: thirty characters take minutes. Texts come from
clients, so such an expression lets any of them stop the proxy.
"""

from __future__ import annotations

from collections.abc import Iterable
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

NESTED = (
    "has a repetition inside a repetition, which takes for ever on some texts: "
    "write it without, or make the inner one possessive, such as (?:\\w++ )*"
)
ALIKE = (
    "has alternatives inside a repetition that may begin with the same character, which takes for ever on some texts: "
    "let each begin with another character, or write (?>...) around them"
)

_FEW = 4
"""A repetition of at most so many times cannot double often enough to hurt."""

_REPEATS = (codes.MAX_REPEAT, codes.MIN_REPEAT)
# Once these have matched, nothing in them is tried anew.
_FINAL = (codes.POSSESSIVE_REPEAT, codes.ATOMIC_GROUP)


def endless(pattern: str) -> str | None:
    """What is wrong with an expression that can take for ever, and what to do; ``None`` for all others.

    It finds what is exponential. Raises ``re.error`` for what is no expression.
    """
    return _judged(parser.parse(pattern), repeated=False)


def _judged(items: Iterable[tuple[Any, Any]], *, repeated: bool) -> str | None:
    for code, value in items:
        found = _judged_one(code, value, repeated)
        if found is not None:
            return found
    return None


def _judged_one(code: Any, value: Any, repeated: bool) -> str | None:
    if code in _REPEATS:
        least, most, body = value
        if repeated and least != most:
            return NESTED
        return _judged(body, repeated=repeated or most > _FEW)
    if code is codes.BRANCH:
        branches = value[1]
        if repeated and not _differ([_beginning(branch) for branch in branches]):
            return ALIKE
        return next((found for branch in branches if (found := _judged(branch, repeated=repeated))), None)
    if code in _FINAL:
        return _judged(value[-1] if code is codes.POSSESSIVE_REPEAT else value, repeated=False)
    return next((found for part in _parts(value) if (found := _judged(part, repeated=repeated))), None)


def _parts(value: Any) -> list[Any]:
    """The expressions inside a group, a look-around or a condition."""
    return [part for part in value if isinstance(part, parser.SubPattern)] if isinstance(value, tuple) else []


def _beginning(branch: Any) -> int | None:
    """The character that an alternative begins with; ``None`` where that is not one alone."""
    for code, value in branch:
        if code is codes.SUBPATTERN:
            return _beginning(value[-1])
        return value if code is codes.LITERAL else None
    return None


def _differ(beginnings: list[int | None]) -> bool:
    return None not in beginnings and len(set(beginnings)) == len(beginnings)
