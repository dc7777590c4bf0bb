"""Errors in a configuration, with their lines and without secrets."""

from __future__ import annotations

import difflib
import itertools
import re
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
    return f"{where}: {problem}. Fix: {fix}" if where else f"{problem}. Fix: {fix}"


def near(word: str, known: Iterable[str]) -> str:
    """Return a fix for an unknown name: the name that was probably meant, or all known names."""
    names = sorted(known)
    by_lower = {name.lower(): name for name in names}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.65)
    if close:
        return f"did you mean '{by_lower[close[0]]}'?"
    return f"use one of: {', '.join(names)}" if names else "remove it"


MASK = "[masked]"

_PREFIXED = re.compile(
    # A vendor's prefix and a delimiter stay visible, because they show the kind of key.
    r"(?<![A-Za-z0-9])(sha256:|(?:sk|pk|rk|gsk|xai|hf|ghp|gho|ghs|ghu|github_pat|glpat|xox[abeprs]|whsec)[-_]"
    r"|AKIA|ASIA|AIza|eyJ|[Bb]earer )(?=[A-Za-z0-9])[A-Za-z0-9+/=._-]{3,}"
)
_UUID = re.compile(r"(?i)(?<![0-9a-f-])[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(?![0-9a-f-])")
_WORD = re.compile(r"[A-Za-z0-9+=]{16,}")
# With "-" and "_" names of models are as long, with "/" paths are, so these must look more random.
_LONG = re.compile(r"[A-Za-z0-9+=_-]{32,}|(?<![\w./+])[A-Za-z0-9+/]{40}(?![\w./+])")

_TURNS = 5
"""Changes between lower case, upper case and digits. Names of models and settings have fewer in one word."""


def masked(text: str) -> str:
    """Return the text with everything that looks like a key, a token or a hash replaced by ``[masked]``.

    A vendor's prefix like ``sk-`` stays. Names of models and settings aren't masked.
    """
    text = _PREFIXED.sub(lambda found: f"{found[1]}{MASK}", text)
    text = _UUID.sub(MASK, text)
    text = _WORD.sub(lambda found: MASK if _turns(found[0], 8) else found[0], text)
    return _LONG.sub(lambda found: MASK if _turns(found[0], 2) else found[0], text)


def _turns(word: str, most: int) -> bool:
    """Return whether a word changes between kinds of character once in ``most`` characters or more often."""
    kinds = ["0" if c.isdigit() else "a" if c.islower() else "A" for c in word if c.isalnum()]
    turns = sum(one != other for one, other in itertools.pairwise(kinds))
    return "0" in kinds and turns >= _TURNS and turns * most >= len(kinds)
