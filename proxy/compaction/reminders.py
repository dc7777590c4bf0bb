"""Find the reminders that agents add to messages and to results: texts in elements that say what is in effect."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from itertools import pairwise

from proxy.compaction import keeps

NOTE = "note "  # the start of the keys of reminders

COUNTER = NOTE + "counter "
"""The start of the keys of reminders that only count something or repeat a call. They stay in the first message."""

_NAME = (
    r"system[-_]reminder|INSTRUCTIONS"
    r"|[\w-]{1,40}[-_](?i:context|details|info(?:rmation)?|instructions|mode|rules|skills)"
)
_OPENED = re.compile(rf"(?:# [^\n<]{{1,200}}\n\s{{0,9}})?<({_NAME})(?:\s[^<>]{{0,200}})?>")
_CLOSED = re.compile(rf"</({_NAME})>\s*\Z")
_REMINDER = re.compile(r"\s{0,9}+<system[-_]reminder>")
_NUMBER = re.compile(r"(?<![\w/.-])\d[\d.,:/%-]*(?![\w/])")
_CALLED = re.compile(r"(?:Called|Result of calling) the .{1,80} tool\b")
_DATE = re.compile(r"\d{4}([-/])\d\d\1\d\d")
_ELEMENT = re.compile(r"<([\w-]{1,40})>[^<>]*</\1>")
_MOST_IN_TEXT = 100
_COUNTER_CHARACTERS = 200


def split_notes(text: object, *, elements: bool = False) -> tuple[list[str], str]:
    """Return the reminders at both ends of a text, in order, and the rest. Agents add them to messages and to results.

    With ``elements``, other elements in which agents say what is in effect count, too.
    """
    first: list[str] = []
    rest = text.strip() if isinstance(text, str) else ""
    # Most texts have none, and each message is read.
    if not rest.startswith(("<", "# ")) and not rest.endswith(">"):
        return [], rest
    while len(first) < _MOST_IN_TEXT and (opened := _OPENED.match(rest)) and (elements or _REMINDER.match(rest)):
        closing, begin = f"</{opened[1]}>", opened.end()
        following = rest.find(f"<{opened[1]}", begin)
        end = max(rest.rfind(closing, begin, None if following < 0 else following), rest.find(closing, begin))
        if end < 0:
            break
        end += len(closing)
        first.append(rest[:end])
        rest = rest[end:].lstrip()
    starts = _last_notes(rest, elements=elements)
    last = [rest[start:end].rstrip() for start, end in pairwise([*starts, len(rest)])]
    return [*first, *last], rest[: starts[0]].rstrip() if starts else rest


def _last_notes(text: str, *, elements: bool = False) -> list[int]:
    """Return where the reminders at the end of a text begin, in order."""
    starts: list[int] = []
    end = len(text)
    while len(starts) < _MOST_IN_TEXT and (closed := _CLOSED.search(text, max(0, end - 80), end)):
        start = text.rfind(f"\n<{closed[1]}", 0, end) + 1
        if not text.startswith(f"<{closed[1]}", start) or not (elements or _REMINDER.match(text, start)):
            break
        starts.append(start)
        end = start
    return starts[::-1]


def sparing(change: Callable[[str], str]) -> Callable[[str], str]:
    """Return a change of a result's text that leaves the reminders at its end, unless they are long."""

    def changed(text: str) -> str:
        start = next(iter(_last_notes(text)), 0)
        spares = start and len(text) - start <= keeps.SPARED_CHARACTERS
        return change(text[:start]) + text[start:] if spares else change(text)

    return changed


def counter(text: str) -> str:
    """Return a short text that is one element without its numbers; empty for other texts."""
    return _NUMBER.sub("0", text) if len(text) <= _COUNTER_CHARACTERS and _ELEMENT.fullmatch(text.strip()) else ""


def may_ask(note: str) -> bool:
    """Return whether a reminder may be a user's request in an element, such as ``<task_instructions>``."""
    opened = _OPENED.match(note)
    return opened is not None and opened[1].endswith("instructions")


def note_key(note: str) -> str:
    """Return the key of a reminder. One line that is an element or mostly numbers counts something."""
    opened = _OPENED.match(note)
    if opened is not None and not _REMINDER.match(note):
        return NOTE + opened[0]
    inside = note[opened.end() if opened else 0 : note.rfind("</")].strip()
    lines = "\n" in inside
    digits = sum(map(str.isdigit, _DATE.sub("", inside)))
    counts = _CALLED.match(inside) or (not lines and (_ELEMENT.fullmatch(inside) or 10 * digits > len(inside)))
    said = " ".join((inside if lines else _NUMBER.sub("0", inside)).split())
    return (COUNTER if counts else NOTE) + hashlib.sha256(said.encode("utf-8", "surrogatepass")).hexdigest()[:16]
