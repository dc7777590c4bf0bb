"""Shortening a text to its beginning and end, on whole lines where possible."""

from __future__ import annotations

from proxy.compaction.message import TextCounter

HEAD_PART = 0.6
"""Of what stays, this part is taken from the beginning: openings say what a text is, ends say how it came out."""


def middle_cut(text: str, max_tokens: int, count: TextCounter, marker: str, total: int | None = None) -> str:
    """The text with its middle left out, at most ``max_tokens`` long with the marker in it.

    ``marker`` may hold ``{tokens}``, ``{characters}`` and ``{lines}``: what was left out. A text that fits comes back
    as it is; where not even the marker fits, the marker alone comes back. ``total``, where it is known, are the
    tokens of the text: one of many megabytes is then not counted for the sake of its ends.
    """
    if total is None:
        total = count(text)
    if total <= max_tokens:
        return text
    allowed = max_tokens - count(_fill(marker, total, len(text), text.count("\n")))
    characters = int(len(text) * allowed / total)
    for _ in range(8):
        if characters < 8:
            break
        cut = keep_ends(text, characters, total, marker)
        size = count(cut)
        if size <= max_tokens:
            return cut
        characters = int(characters * min(0.9, max_tokens / size))
    return _fill(marker, total, len(text), text.count("\n"))


def keep_ends(text: str, characters: int, total: int, marker: str) -> str:
    """About ``characters`` of the text, from both ends, the marker between them."""
    head = _line_start(text, int(characters * HEAD_PART))
    tail = _line_end(text, len(text) - (characters - int(characters * HEAD_PART)))
    left_out = text[head:tail]
    tokens = max(1, round(total * len(left_out) / len(text)))
    middle = _fill(marker, tokens, len(left_out), left_out.count("\n"))
    return f"{text[:head]}{middle}{text[tail:]}"


def _line_start(text: str, position: int) -> int:
    """The end of the last whole line before the position, if one is near; never inside a surrogate pair."""
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
