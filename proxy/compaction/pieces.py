"""Cut work on texts of others into pieces. No other thread runs during a search, and a job can pause between two."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from threading import local

SEARCHED = 65_536  # characters per search


class _ThisThread(local):
    pause: Callable[[], None] | None = None


_here = _ThisThread()


def begin_thread(pause: Callable[[], None]) -> None:
    """Prepare a thread that works on many texts. ``pause`` is called before each text and each piece of a long one."""
    _here.pause = pause


def pause() -> None:
    """Let a smaller job run first, if this thread has one."""
    if _here.pause is not None:
        _here.pause()


def pieces(text: str, border: re.Pattern[str], length: int = SEARCHED) -> Iterator[str]:
    """Yield a text in pieces that end behind a border. A piece is longer only if it has no border."""
    start, place = 0, length
    while len(text) > place:
        found = border.search(text, place, place + SEARCHED)
        place += SEARCHED
        if found is not None:
            yield text[start : found.end()]
            start, place = found.end(), found.end() + length
        pause()
    yield text[start:]


REACH = 4_096
"""Characters that a search for a replacement looks ahead. Every expression is bounded by that, except in one run of
characters at its end."""


def sub(pattern: re.Pattern[str], replace: Callable[[re.Match[str]], str], text: str) -> str:
    """Replace the matches of an expression. Other threads can run after each piece of a long text."""
    if len(text) <= SEARCHED:
        return pattern.sub(replace, text)
    made: list[str] = []
    done = place = 0
    while place < len(text):
        end = min(len(text), place + SEARCHED + REACH)
        border = end if end == len(text) else place + SEARCHED
        for match in pattern.finditer(text, place, end):
            if match.start() >= border:
                break
            # A run may go on behind the piece.
            whole = pattern.match(text, match.start()) if match.end() == end else None
            made += (text[done : match.start()], replace(whole or match))
            done = (whole or match).end()
        place = max(border, done)
        pause()
    return "".join([*made, text[done:]])
