"""Write the text of a tool result in fewer characters, without a loss.

Each form can be undone, except for colors. A form applies only if the original has no line that looks like its notes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from proxy.compaction.pieces import SEARCHED

MOST_CHARACTERS = 1_000_000  # longer texts stay as they are

MOST_TOKENS = 200_000
"""A JSON text with more tokens stays as it is, because reading them would take over a tenth of a second."""

# Colors and a hidden cursor. Other escapes move the cursor, so they stay.
_COLORS = re.compile(r"\x1b\[(?:[\d;:]*m|\?25[hl])")
# These erase nothing in a line without carriage returns.
_IDLE = re.compile(r"^(?:\x1b\[[0-2]?K)+|\x1b\[0?K")

_NOTE = "[The compaction proxy left out "  # the beginning of the notes in place of numbers

_NUMBERS = "[The compaction proxy left out the numbers of the next {count} lines. The first one is {first}]"
_NUMBERS_LINE = re.compile(
    r"\A\[The compaction proxy left out the numbers of the next (\d+) lines\. The first one is (.*)\]"
)
_NUMBERED = re.compile(r"( *)(\d{1,7})(→|\t|\| ?)")
_NUMBER_SIGNS = "→\t|"
_FEWEST_NUMBERED = 8

_GROUPS = "[The compaction proxy wrote the path of search results once, above the lines of a file.]"
_FOUND = re.compile(r"([^:\n]{4,300}):(\d{1,7}):")
_PLACE = re.compile(r":\d{1,7}:")
_LONGEST_PLACE = 9
_GROUPED = re.compile(r" (\d{1,7})([:-])")
_FEWEST_FOUND = 2

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+|\s+', re.DOTALL)
_SPACE = " \t\n\r"
_DEEPEST = 200
_LINED = 1  # the depth up to which each value of a JSON text keeps a line of its own


def lossless(text: str) -> str:
    """Return a shorter form of a text; the text itself if there is none."""
    if len(text) > MOST_CHARACTERS:
        return text
    text = without_colors(text)
    if (compact := compact_json(text)) is not None:
        return compact
    return grouped(without_numbers(text))


def without_colors(text: str) -> str:
    """Remove colors, and escapes that erase nothing."""
    return "\n".join(map(_without_colors, text.split("\n"))) if "\x1b" in text else text


def _without_colors(line: str) -> str:
    line = _COLORS.sub("", line)
    return line if "\r" in line.removesuffix("\r") else _IDLE.sub("", line)


def compact_json(text: str) -> str | None:
    """Return a JSON text without white space between tokens; ``None`` if the text isn't JSON or has no such space.

    The tokens stay as they are. The values of the outermost array or object keep a line of their own.
    """
    start = text[:200].lstrip(_SPACE)[:1]
    if start not in ("{", "[") or ("\n" not in text and ": " not in text and ", " not in text):
        return None
    if not _is_json(text):  # in such a text, a search for the end of each string could take quadratic time
        return None
    parts: list[str] = []
    depth = 0
    for count, match in enumerate(_TOKEN.finditer(text)):
        if count > MOST_TOKENS:
            return None
        token = match.group()
        if token.isspace():
            if token.strip(_SPACE):
                return None
            if "\n" in token and depth <= _LINED and parts:
                parts.append("\n")
            continue
        depth += (token in ("{", "[")) - (token in ("}", "]"))
        if depth > _DEEPEST:
            return None
        parts.append(token)
    compact = "".join(parts).rstrip("\n")
    return compact if len(compact) < len(text) else None


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return False
    return True


def without_numbers(text: str) -> str:
    """Remove the numbers before consecutive lines. A note before them has the first one."""
    if not any(map(text.__contains__, _NUMBER_SIGNS)):
        return text  # this check takes much less time than the search in each line
    lines = text.split("\n")
    if len(lines) < _FEWEST_NUMBERED or not any(map(_NUMBERED.match, lines)) or _has_note(text, lines, _NUMBERS_LINE):
        return text
    made: list[str] = []
    place = 0
    while place < len(lines):
        match = _NUMBERED.match(lines[place])
        end = place + 1
        if match is not None:
            form, first = _numbers(match)
            while end < len(lines) and lines[end].startswith(form % (first + end - place)):
                end += 1
            if end - place >= _FEWEST_NUMBERED:
                made.append(_NUMBERS.format(count=end - place, first=match.group()))
                made += [line[len(form % n) :] for n, line in enumerate(lines[place:end], first)]
                place = end
                continue
        made += lines[place:end]
        place = end
    return "\n".join(made)


def _numbers(first: re.Match[str]) -> tuple[str, int]:
    """Return the form of the numbers of lines, and the first one."""
    spaces, digits, sign = first.groups()
    if digits[0] == "0":
        return f"{spaces}%0{len(digits)}d{sign}", int(digits)
    return f"%{len(spaces) + len(digits)}d{sign}", int(digits)


def _has_note(text: str, lines: Sequence[str], note: re.Pattern[str]) -> bool:
    """Return whether a line of a text looks like a note."""
    return _NOTE in text and any(map(note.fullmatch, lines))


def grouped(text: str) -> str:
    """Write the path of search results (``path:line:text``) once for all results of a file that follow each other."""
    if not any(_PLACE.search(text, at, at + SEARCHED + _LONGEST_PLACE) for at in range(0, len(text), SEARCHED)):
        return text
    lines = text.split("\n")
    if len(lines) < _FEWEST_FOUND or _GROUPS in lines:
        return text
    if (text.startswith(" ") or "\n " in text) and any(map(_GROUPED.match, lines)):
        return text
    made = [_GROUPS]
    place = 0
    for path, start, end in _runs(lines):
        made += lines[place:start]
        made.append(f"{path}:")
        made += [f" {line[len(path) + 1 :]}" for line in lines[start:end]]
        place = end
    return "\n".join([*made, *lines[place:]]) if place else text


def _runs(lines: list[str]) -> Iterator[tuple[str, int, int]]:
    """Yield each run of results of one file: its path, its start, and its end."""
    taken = place = 0
    while place < len(lines):
        match = _FOUND.match(lines[place])
        if match is None or not _is_path(match[1]):
            place += 1
            continue
        path = match[1]
        start, end = place, place + 1
        while start > taken and _is_found(lines[start - 1], path):
            start -= 1
        while end < len(lines) and _is_found(lines[end], path):
            end += 1
        if end - start >= _FEWEST_FOUND:
            yield path, start, end
            taken = end
        place = end


def _is_path(text: str) -> bool:
    return ("/" in text or "." in text) and any(map(str.isalpha, text))


def _is_found(line: str, path: str) -> bool:
    """Return whether a line is a result in a file, or a line around one (``path-line-text``)."""
    if not line.startswith(path):
        return False
    rest = line[len(path) :]
    match = _GROUPED.match(f" {rest[1:]}")
    return match is not None and rest[0] == match[2]
