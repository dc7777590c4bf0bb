"""Find unsafe and unsupported regular expressions by their syntax.

Python's ``re`` backtracks. If a repetition contains another repetition, or alternatives that start alike, each
character can double the number of attempts: thirty characters take minutes. Clients send the searched texts, so any
client could stop the proxy with such an expression.

Linear-time engines don't support some other expressions, or read them differently.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

from proxy.compaction.linear_regex import NotSearchable, search_for


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
"""A repetition with at most this many rounds doubles too rarely to be slow."""

_REPEATS = (codes.MAX_REPEAT, codes.MIN_REPEAT)
# The engine doesn't backtrack into these.
_FINAL = (codes.POSSESSIVE_REPEAT, codes.ATOMIC_GROUP)


def endless(pattern: str) -> Flaw | None:
    """Return the flaw of an expression with exponential time, or ``None``.

    Raises ``re.error`` for an invalid expression.
    """
    return _flaw(parser.parse(pattern), is_repeated=False)


_UNLIKE = {
    codes.ASSERT: _LOOKS,
    codes.ASSERT_NOT: _LOOKS,
    codes.GROUPREF: _REFERS,
    codes.GROUPREF_EXISTS: _REFERS,
    codes.POSSESSIVE_REPEAT: _GOES_ON,
    codes.ATOMIC_GROUP: _GOES_ON,
}

# Literal characters in Python, but word boundaries in Rust's regex.
_EDGE = re.compile(r"(?<!\\)(?:\\\\)*\\(?:[<>]|b\{)")
# A literal brace in Python, but a number of errors in the package regex.
_INEXACT = re.compile(r"(?<!\\)(?:\\\\)*\{[0-9<=,\s]*[eids][^}]*\}")


def unclear(pattern: str) -> Flaw | None:
    """Return the flaw of an expression that other engines read differently than Python, or ``None``.

    Raises ``re.error`` for an invalid expression.
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
    """Return the flaw of an expression that the linear-time engine doesn't support, or ``None``.

    Raises ``re.error`` for an invalid expression.
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
    """Return the codes of an expression's parts, outer parts first."""
    for code, value in items:
        yield code
        for part in _inner(code, value):
            yield from _codes(part)


def _inner(code: Any, value: Any) -> list[Any]:
    """Return the expressions inside a part of an expression."""
    if code is codes.BRANCH:
        return list(value[1])
    parts = value if isinstance(value, tuple) else (value,)
    return [part for part in parts if isinstance(part, parser.SubPattern)]


def _flaw(items: Iterable[tuple[Any, Any]], *, is_repeated: bool) -> Flaw | None:
    for code, value in items:
        repeats = is_repeated and code not in _FINAL
        if code in _REPEATS:
            least, most, _ = value
            if is_repeated and least != most:
                return NESTED
            repeats = is_repeated or most > _FEW
        elif code is codes.BRANCH and is_repeated and not _differ([_beginning(branch) for branch in value[1]]):
            return ALIKE
        for part in _inner(code, value):
            if (found := _flaw(part, is_repeated=repeats)) is not None:
                return found
    return None


def _beginning(branch: Any) -> int | None:
    """Return the literal first character of an alternative, or ``None``."""
    for code, value in branch:
        if code is codes.SUBPATTERN:
            return _beginning(value[-1])
        return value if code is codes.LITERAL else None
    return None


def _differ(beginnings: list[int | None]) -> bool:
    return None not in beginnings and len(set(beginnings)) == len(beginnings)
