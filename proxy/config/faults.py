"""What is wrong with a configuration, and where."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import NamedTuple


class Fault(NamedTuple):
    """One thing that is wrong. ``line`` counts from 1; ``message`` says what to do and never holds a secret."""

    line: int
    message: str


MOST = 100


class Faults(Exception):
    """What was found in one pass over the file: each thing once, and no more than anybody would read."""

    def __init__(self, found: list[Fault]) -> None:
        distinct = list(dict.fromkeys(found))
        super().__init__(f"{len(distinct)} faults in the configuration")
        self.faults = distinct[:MOST]
        if len(distinct) > MOST:
            more = f"and {len(distinct) - MOST:,} more: is this the right file?"
            self.faults.append(Fault(distinct[MOST].line, more))


def near(word: str, known: Iterable[str]) -> str:
    """A hint at the name that was probably meant, or the names there are."""
    names = sorted(known)
    by_lower = {name.lower(): name for name in names}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    if close:
        return f"did you mean '{by_lower[close[0]]}'?"
    return f"there are: {', '.join(names)}" if names else "there are none"
