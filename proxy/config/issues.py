"""Errors in a configuration, with their lines."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import NamedTuple

MOST = 100


class Issue(NamedTuple):
    """One error. ``line`` counts from 1. ``message`` is ``setting: problem. Fix: what to write``, without secrets."""

    line: int
    message: str


class Issues(Exception):
    """The distinct errors of one pass over the file, at most ``MOST``."""

    def __init__(self, found: Iterable[Issue]) -> None:
        distinct = list(dict.fromkeys(found))
        super().__init__(f"{len(distinct)} errors in the configuration")
        self.issues = distinct[:MOST]
        if len(distinct) > MOST:
            more = f"{len(distinct) - MOST:,} more errors"
            self.issues.append(issue(distinct[MOST].line, more, "check that this is the right file"))


def issue(line: int, problem: str, fix: str, where: str = "") -> Issue:
    """Return an error at a line. ``where`` is the setting's path, ``fix`` the text to write in the file."""
    return Issue(line, error_text(problem, fix, where))


def error_text(problem: str, fix: str, where: str = "") -> str:
    """Return an error message without its line."""
    return f"{where}: {problem}. Fix: {fix}" if where else f"{problem}. Fix: {fix}"


def near(word: str, known: Iterable[str]) -> str:
    """Return a fix for an unknown name: the name that was probably meant, or all known names."""
    names = sorted(known)
    by_lower = {name.lower(): name for name in names}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.65)
    if close:
        return f"did you mean '{by_lower[close[0]]}'?"
    return f"use one of: {', '.join(names)}" if names else "remove it"
