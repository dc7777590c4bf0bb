"""Settings that are regular expressions.

An expression may be slow on some texts, which come from clients. So each use has a bound: redaction has a time limit,
and pins use an engine that takes linear time. Linear-time engines don't support some expressions, or read them
differently than Python.
"""

from __future__ import annotations

import re
import warnings
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Annotated, NamedTuple

from pydantic import PlainValidator, WithJsonSchema

from proxy.compaction.rules import NotSearchable, search_for
from proxy.config.fields import wrong


class Flaw(NamedTuple):
    """A problem with an expression, and how to fix it."""

    problem: str
    fix: str


_LOOKS = Flaw("look-ahead and look-behind aren't supported", "match the surrounding text instead")
_REFERS = Flaw("references to groups aren't supported", "repeat the group's expression instead")
_GOES_ON = Flaw(
    "possessive and atomic parts aren't supported",
    "write a plain repetition or group. The search takes linear time without them",
)

_UNLIKE = {"ASSERT": _LOOKS, "GROUPREF": _REFERS, "POSSESSIVE_REPEAT": _GOES_ON, "ATOMIC_GROUP": _GOES_ON}
"""Flaws by the beginning of the name that Python's parser gives to a part."""

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
    parts = repr(parser.parse(pattern))  # the parser's names, and numbers in place of the expression's characters
    for name, flaw in _UNLIKE.items():
        if f"({name}" in parts:
            return flaw
    if _EDGE.search(pattern):
        return Flaw("has \\<, \\> or \\b{", "write < and > without a backslash, and \\b(?:\\{) for a brace after \\b")
    try:
        search_for(pattern)
    except NotSearchable as error:
        return Flaw(f"isn't valid in the syntax of Rust's regex ({error})", "use syntax that Python and Rust share")
    return None


_MOST_PATTERN = 1_000
_EVERYTHING = "matches the empty text, so it matches every text"
_NARROWER = "write a narrower expression, for example .+ instead of .*"


def _expression(value: object) -> str:
    """Return a regular expression as text, so that its section stays comparable and printable."""
    if not isinstance(value, str) or not value or len(value) > _MOST_PATTERN:
        raise wrong(f"must be a regular expression of 1 to {_MOST_PATTERN} characters", fix='SETTING: ["text to find"]')
    try:
        why = unclear(value)
    except (re.error, OverflowError, RecursionError) as error:
        raise wrong(
            f"isn't a regular expression ({error})", fix="put \\ before a character that stands for itself"
        ) from error
    if why is not None:
        raise wrong(why.problem, fix=why.fix)
    return value


def _pattern(value: object) -> str:
    pattern = _expression(value)
    if re.search(pattern, "") is not None:
        raise wrong(_EVERYTHING, fix=_NARROWER)
    return pattern


def _searched(value: object) -> str:
    pattern = _expression(value)
    if (why := unsearchable(pattern)) is not None:
        raise wrong(why.problem, fix=why.fix)
    if search_for(pattern)(""):
        raise wrong(_EVERYTHING, fix=_NARROWER)
    return pattern


_PATTERN_SCHEMA = {"type": "string", "minLength": 1, "maxLength": _MOST_PATTERN}

Pattern = Annotated[str, PlainValidator(_pattern), WithJsonSchema(_PATTERN_SCHEMA)]
"""A regular expression in Python's syntax that can match anywhere in a text."""

SearchedPattern = Annotated[str, PlainValidator(_searched), WithJsonSchema(_PATTERN_SCHEMA)]
"""A regular expression without backtracking, so that searches take linear time."""
