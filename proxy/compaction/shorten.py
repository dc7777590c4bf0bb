"""Shorten a text to its beginning and end, on whole lines if possible."""

from __future__ import annotations

import re

from proxy.compaction.format import TextCounter

HEAD_PART = 0.6
"""Share of the kept text that comes from the beginning. The beginning states the subject, the end the result."""

NOTABLE_PART = 0.3
"""Share of the kept text that may be lines from the middle that report a failure."""

FEWEST = 4
"""Characters. With fewer, there's no room for both a beginning and an end."""

_NOTABLE = re.compile(
    r"\b(?:error|exception|traceback|failed|failure|fatal|panic|denied|refused|unable to|cannot|segfault|not found)\b|"
    r"(?:Error|Exception)\b",
    re.IGNORECASE,
)
_NOTABLE_LINES = 8
_NOTABLE_CHARACTERS = 240

_BASE64 = re.compile(r"(?:data:[\w/+.-]{3,60};base64,)?[A-Za-z0-9+/]{400,}={0,2}")


def without_base64(text: str, note: str) -> str:
    """Replace long runs of base64, including data URLs, with a note. ``{characters}`` in the note is the length."""
    return _BASE64.sub(lambda match: note.replace("{characters}", f"{len(match.group()):,}"), text)


def middle_cut(
    text: str,
    max_tokens: int,
    count: TextCounter,
    marker: str,
    total: int | None = None,
    *,
    notable: bool = False,
    least: int = 0,
) -> str:
    """Leave out the middle of a text, so that it has at most ``max_tokens`` tokens including the marker.

    ``marker`` may contain ``{tokens}``, ``{characters}``, and ``{lines}``, which describe the omitted part. A text that
    fits is returned unchanged. ``least`` is the number of tokens to keep even if the result then exceeds
    ``max_tokens``. With 0, only the marker is returned if nothing else fits. Pass the tokens of the text as ``total``
    if you have them, so that a text of many megabytes isn't counted again. With ``notable``, lines of the middle that
    report a failure are kept after the marker.
    """
    if total is None:
        total = count(text)
    if total <= max_tokens or not text:
        return text
    taken = count(_fill(marker, total, len(text), text.count("\n")))
    max_tokens = max(max_tokens, taken + least)
    if total <= max_tokens:
        return text
    allowed = max_tokens - taken
    whole = int(len(text) * allowed / total)
    characters = whole
    for _ in range(8):
        if characters < FEWEST:
            break
        cut = keep_ends(text, characters, total, marker, int(whole * NOTABLE_PART) if notable else 0)
        size = count(cut)
        if size <= max_tokens:
            return cut
        characters = int(characters * min(0.9, max_tokens / size))
    if least:
        return keep_ends(text, max(least, FEWEST), total, marker)
    return _fill(marker, total, len(text), text.count("\n"))


def keep_ends(text: str, characters: int, total: int, marker: str, notable: int = 0) -> str:
    """Return about ``characters`` characters from both ends of a text, with the marker between them.

    Up to ``notable`` of these characters are used for lines of the middle that report a failure.
    """
    kept = notable_lines(text, notable)
    characters -= sum(len(line) + 1 for line in kept)
    head = _line_start(text, int(characters * HEAD_PART))
    tail = _line_end(text, len(text) - (characters - int(characters * HEAD_PART)))
    left_out = text[head:tail]
    tokens = max(1, round(total * len(left_out) / len(text)))
    middle = _fill(marker, tokens, len(left_out), left_out.count("\n"))
    middle += "".join(f"{line}\n" for line in kept if line in left_out)
    return f"{text[:head]}{middle}{text[tail:]}"


def notable_lines(text: str, characters: int) -> list[str]:
    """Return the first lines that report a failure, without repetitions; at most ``characters`` characters."""
    lines: dict[str, None] = {}
    position = 0
    while len(lines) < _NOTABLE_LINES and characters > 0 and (match := _NOTABLE.search(text, position)):
        start = text.rfind("\n", max(0, match.start() - _NOTABLE_CHARACTERS), match.start()) + 1
        start = max(start, match.start() - _NOTABLE_CHARACTERS // 2)
        end = text.find("\n", match.end(), start + _NOTABLE_CHARACTERS)
        end = min(len(text), start + _NOTABLE_CHARACTERS) if end < 0 else end
        line = text[start:end].strip()
        position = max(end, match.end())
        if line not in lines:
            if len(line) + 1 > characters:
                break
            characters -= len(line) + 1
            lines[line] = None
    return list(lines)


def _line_start(text: str, position: int) -> int:
    """Return the end of the last whole line before a position if it's near. Never split a surrogate pair."""
    newline = text.rfind("\n", position - position // 4, position)
    position = newline + 1 if newline > 0 else position
    return position - 1 if position and "\ud800" <= text[position - 1] <= "\udbff" else position


def _line_end(text: str, position: int) -> int:
    length = len(text) - position
    newline = text.find("\n", position, position + length // 4)
    position = newline + 1 if newline > 0 else position
    return position + 1 if position < len(text) and "\udc00" <= text[position] <= "\udfff" else position


def _fill(marker: str, tokens: int, characters: int, lines: int) -> str:
    return (
        marker.replace("{tokens}", str(tokens)).replace("{characters}", str(characters)).replace("{lines}", str(lines))
    )
