"""Shorten a text to its beginning and end, on whole lines if possible."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heapreplace

from proxy.compaction import keeps
from proxy.compaction.format import TextCounter
from proxy.compaction.pieces import SEARCHED

Notable = Callable[[str, int], Sequence[str]]
"""Return the lines of a text to keep from its middle, at most so many characters."""

_NAMES = "Names in it: "

FEWEST = 4  # Characters. With fewer, there's no room for both a beginning and an end.

_NOTABLE_WORDS = (
    "error", "exception", "traceback", "failed", "failure", "fatal", "panic", "denied", "refused", "unable to",
    "cannot", "segfault", "not found",
)  # fmt: skip
_NOTABLE = re.compile(rf"\b(?:{'|'.join(_NOTABLE_WORDS)})\b|(?:error|exception)\b", re.IGNORECASE)

LEAST_BASE64 = 400  # characters of a run that counts as base64

_BASE64 = string.ascii_letters + string.digits + "+/"
_RUN = re.compile(r"[A-Za-z0-9+/]+")
_PADDING = re.compile("={0,2}")
_DATA_URL = re.compile(r"data:[\w/+.-]{3,60};base64,\Z")
_LONGEST_START = 80  # characters before the base64 of a data URL, and a few more


def without_base64(text: str, note: str) -> str:
    """Replace long runs of base64, including data URLs, with a note. ``{characters}`` in the note is the length."""
    kept: list[str] = []
    done = 0
    for start, end in _runs_of_base64(text):
        padding = _PADDING.match(text, end)
        end = end if padding is None else padding.end()
        url = _DATA_URL.search(text, max(done, start - _LONGEST_START), start)
        start = start if url is None else url.start()
        kept += (text[done:start], note.replace("{characters}", f"{end - start:,}"))
        done = end
    return "".join([*kept, text[done:]]) if kept else text


def _runs_of_base64(text: str) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each run of at least ``LEAST_BASE64`` characters.

    Such a run fills a window of half as many characters. Most other windows have another character near their start.
    """
    window = LEAST_BASE64 // 2
    place = 0
    while place + window <= len(text):
        if _RUN.fullmatch(text, place, place + window) is None:
            place += window
            continue
        before = text[max(0, place - window) : place]
        start, end = place - len(before) + len(before.rstrip(_BASE64)), place
        while (run := _RUN.match(text, end, end + SEARCHED)) is not None:
            end = run.end()
        if end - start >= LEAST_BASE64:
            yield start, end
        place = end


def middle_cut(
    text: str,
    max_tokens: int,
    count: TextCounter,
    marker: str,
    total: int | None = None,
    *,
    notable: Notable | None = None,
    least: int = 0,
    names: Sequence[str] = (),
    names_part: float = keeps.NAMES_PART,
) -> str:
    """Leave out the middle of a text, so that it has at most ``max_tokens`` tokens including the marker.

    ``marker`` may contain ``{tokens}``, ``{characters}``, and ``{lines}``, which describe the omitted part. A text that
    fits is returned unchanged. ``least`` is the number of tokens to keep even if the result then exceeds
    ``max_tokens``. With 0, only the marker is returned if nothing else fits. Pass the tokens of the text as ``total``
    if you have them, so that a text of many megabytes isn't counted again. The lines of the middle that ``notable``
    finds are kept after the marker. ``names`` are names in the text, the most important first. Those that
    only the middle has are listed after the marker. They take up to ``names_part`` of the kept text.
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
    kept = notable(text, int(whole * keeps.NOTABLE_PART)) if notable is not None else ()
    for _ in range(8):
        if characters < FEWEST:
            break
        cut = keep_ends(text, characters, total, marker, kept, names, names_part)
        size = count(cut)
        if size <= max_tokens:
            return cut
        characters = int(characters * min(0.9, max_tokens / size))
    if least:
        return keep_ends(text, max(least, FEWEST), total, marker)
    return _fill(marker, total, len(text), text.count("\n"))


def keep_ends(
    text: str,
    characters: int,
    total: int,
    marker: str,
    kept: Sequence[str] = (),
    names: Sequence[str] = (),
    names_part: float = keeps.NAMES_PART,
) -> str:
    """Return about ``characters`` characters from both ends of a text, with the marker between them.

    Lines of the middle that are ``kept`` count. Names take ``keeps.NAMES_PART`` of the characters, and if they need
    more, up to ``names_part``.
    """
    needed = max(int(characters * keeps.NAMES_PART), len(_NAMES) + sum(len(name) + 1 for name in names) + 1)
    room = min(int(characters * names_part), needed) if names else 0
    characters -= sum(len(line) + 1 for line in kept) + room
    head = _line_start(text, int(characters * keeps.HEAD_PART))
    tail = _line_end(text, len(text) - (characters - int(characters * keeps.HEAD_PART)))
    left_out = text[head:tail]
    tokens = max(1, round(total * len(left_out) / len(text)))
    middle = _fill(marker, tokens, len(left_out), left_out.count("\n"))
    middle += "".join(f"{line}\n" for line in kept if line in left_out)
    if room:
        middle += listed_names(names, room, left_out, f"{text[:head]}{middle}{text[tail:]}")
    return f"{text[:head]}{middle}{text[tail:]}"


def listed_names(names: Sequence[str], characters: int, left_out: str, shown: str) -> str:
    """Return a line with the first names that a text has and ``shown`` doesn't; empty if there are none."""
    chosen: list[str] = []
    left = characters - len(_NAMES) - 1
    for name in names:
        if len(name) < left and name not in shown and name in left_out:
            chosen.append(name)
            left -= len(name) + 1
            shown = f"{shown} {name}"
            if left < 5:
                break
    return f"{_NAMES}{' '.join(chosen)}\n" if chosen else ""


def notable_lines(text: str, characters: int) -> list[str]:
    """Return the first lines that report a failure, without repetitions; at most ``characters`` characters."""
    lines: dict[str, None] = {}
    position = 0
    for match in _failures(text):
        if len(lines) >= keeps.NOTABLE_LINES or characters <= 0:
            break
        if match.start() < position:
            continue
        start = text.rfind("\n", max(0, match.start() - keeps.NOTABLE_CHARACTERS), match.start()) + 1
        start = max(start, match.start() - keeps.NOTABLE_CHARACTERS // 2)
        end = text.find("\n", match.end(), start + keeps.NOTABLE_CHARACTERS)
        end = min(len(text), start + keeps.NOTABLE_CHARACTERS) if end < 0 else end
        line = text[start:end].strip()
        position = max(end, match.end())
        if line not in lines:
            if len(line) + 1 > characters:
                break
            characters -= len(line) + 1
            lines[line] = None
    return list(lines)


def _failures(text: str) -> Iterator[re.Match[str]]:
    """Yield the words that report a failure, in order. Looking for each of them is faster than one search for all."""
    lowered = "".join([text[start : start + SEARCHED].lower() for start in range(0, len(text), SEARCHED)])
    if len(lowered) != len(text):  # places would differ
        lowered = text
    ahead = [(place, word) for word in _NOTABLE_WORDS if (place := lowered.find(word)) >= 0]
    heapify(ahead)
    while ahead:
        place, word = ahead[0]
        if (match := _NOTABLE.match(text, place)) is not None:
            yield match
        if (place := lowered.find(word, place + 1)) >= 0:
            heapreplace(ahead, (place, word))
        else:
            heappop(ahead)


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
