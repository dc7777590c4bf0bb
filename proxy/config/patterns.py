"""What is wrong with a regular expression, found by its form.

Some can take for ever on some texts. Python's ``re`` goes back and tries anew. Where a repetition stands inside another
one, or alternatives that begin alike stand in one, the number of ways to try doubles with each character: thirty
characters take minutes. Texts come from clients, so such an expression lets any of them stop the proxy.

Others an engine that never goes back can't take, or reads differently.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

from proxy.compaction.searching import NotSearchable, search_for


class Flaw(NamedTuple):
    """A problem with an expression, and how to fix it."""

    problem: str
    fix: str


NESTED = Flaw(
    "has a repetition inside a repetition, which takes exponential time on some texts",
    "remove one repetition, or make the inner one possessive, as in (?:\\w++ )*",
)
ALIKE = Flaw(
    "repeats alternatives that can start with the same character, which takes exponential time on some texts",
    "start each alternative with a different character, or write (?>...) around them",
)

_LOOKS = Flaw("look-ahead and look-behind aren't supported", "match the surrounding text instead")
_REFERS = Flaw("references to groups aren't supported", "repeat the group's expression instead")
_GOES_ON = Flaw(
    "possessive and atomic parts aren't supported",
    "write a plain repetition or group. The search takes linear time without them",
)

_FEW = 4
"""A repetition of at most so many times cannot double often enough to hurt."""

_REPEATS = (codes.MAX_REPEAT, codes.MIN_REPEAT)
# Once these have matched, nothing in them is tried anew.
_FINAL = (codes.POSSESSIVE_REPEAT, codes.ATOMIC_GROUP)


def endless(pattern: str) -> Flaw | None:
    """What is wrong with an expression that can take for ever, and what to do; ``None`` for all others.

    It finds what is exponential. Raises ``re.error`` for what is no expression.
    """
    return _judged(parser.parse(pattern), repeated=False)


_UNLIKE = {
    codes.ASSERT: _LOOKS,
    codes.ASSERT_NOT: _LOOKS,
    codes.GROUPREF: _REFERS,
    codes.GROUPREF_EXISTS: _REFERS,
    codes.POSSESSIVE_REPEAT: _GOES_ON,
    codes.ATOMIC_GROUP: _GOES_ON,
}

# What stands for itself in Python, and for the edge of a word there.
_EDGE = re.compile(r"(?<!\\)(?:\\\\)*\\(?:[<>]|b\{)")
# What stands for itself in Python, and for a number of errors in the package regex.
_INEXACT = re.compile(r"(?<!\\)(?:\\\\)*\{[0-9<=,\s]*[eids][^}]*\}")


def unclear(pattern: str) -> Flaw | None:
    """What in an expression another engine reads differently than Python, and what to write; ``None`` if nothing.

    Raises ``re.error`` for what is no expression.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        try:
            re.compile(pattern)
        except FutureWarning:
            return Flaw(
                "has a bracket or a doubled sign in a set, which engines read differently", "write \\ before it"
            )
    if _INEXACT.search(pattern):
        return Flaw("has a brace that could be read as a number of errors", "write \\{ for a brace")
    return None


def unsearchable(pattern: str) -> Flaw | None:
    """Why an expression can't be searched for in linear time, and what to write; ``None`` where it can.

    Raises ``re.error`` for what is no expression.
    """
    for code in _codes(parser.parse(pattern)):
        if code in _UNLIKE:
            return _UNLIKE[code]
    if _EDGE.search(pattern):
        return Flaw("has \\<, \\> or \\b{", "write < and > without a backslash, and \\b(?:\\{) for a brace after \\b")
    try:
        search_for(pattern)
    except NotSearchable as error:
        return Flaw(f"isn't valid in the syntax of Rust's regex ({error})", "use syntax that Python and Rust share")
    return None


def _codes(items: Iterable[tuple[Any, Any]]) -> Iterable[Any]:
    """What kinds of part an expression has, those inside others after them."""
    for code, value in items:
        yield code
        for part in _inner(code, value):
            yield from _codes(part)


def _inner(code: Any, value: Any) -> Iterable[Any]:
    if code is codes.BRANCH:
        return list(value[1])
    return [value] if isinstance(value, parser.SubPattern) else _parts(value)


def _judged(items: Iterable[tuple[Any, Any]], *, repeated: bool) -> Flaw | None:
    for code, value in items:
        found = _judged_one(code, value, repeated)
        if found is not None:
            return found
    return None


def _judged_one(code: Any, value: Any, repeated: bool) -> Flaw | None:
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
