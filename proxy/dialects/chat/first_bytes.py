"""What the first bytes of an answer that says it is no stream show: an answer, or what may still be a refusal."""

from __future__ import annotations

import re
from typing import Literal

_BLANK = b"\xef\xbb\xbf \t\r\n"
"""Before the first value there may be a byte order mark, and blank lines that keep the connection alive."""

_EVENTS = (b"data:", b"event:", b"error:", b":", b"id:", b"retry:")

_OVERLAP = 512
"""Bytes that are looked at again with what follows: more than a mark may have."""

_CHOICE = b'"choices":[{'
_TEXT = b'"content":"'

_MARKS = re.compile(
    rb"""(?P<choice> "choices" \s{0,99} : \s{0,99} \[ \s{0,99} \{ )
    | (?P<written>
        "(?: content | text | refusal | reasoning | reasoning_content )" \s{0,99} : \s{0,99} "[^"]
      | "(?: content | tool_calls | reasoning_details )" \s{0,99} : \s{0,99} \[ \s{0,99} \{
      | "(?: function_call | audio )" \s{0,99} : \s{0,99} \{
      )
    | (?P<error> "error" \s{0,99} : \s{0,99} [^\sn] )""",
    re.VERBOSE,
)
"""In JSON, text is none of these: in a string, quotation marks are escaped."""


def fast_path(first: bytes) -> bool:
    """Whether the first bytes are an answer's as most servers write it: with a text, and without an error before it.

    The same as ``Sight`` would find out, for less.
    """
    choice = first.find(_CHOICE)
    text = first.find(_TEXT, choice)
    written = first[text + len(_TEXT) : text + len(_TEXT) + 1]
    return choice > 0 and text > 0 and written not in (b"", b'"') and first.find(b'"error"', 0, text) < 0


class ContentDetector:
    """Looks at an answer while it comes; no byte is looked at more than a few times."""

    def __init__(self) -> None:
        self._from = 0
        self._json = False
        self._choice = False
        self._failed = False

    def of(self, first: bytearray) -> Literal["answer", "events"] | None:
        """What all bytes so far show; ``None`` where they may be a refusal.

        ``answer``: a choice in which something is written, with no error before it; or no JSON. ``events``: a stream.
        """
        if not self._json:
            start = bytes(first[:_OVERLAP]).lstrip(_BLANK)[:6]
            if not start or any(name != start and name.startswith(start) for name in _EVENTS):
                return None
            if start.startswith(_EVENTS):
                return "events"
            if start[:1] not in b'{["':
                return "answer"
            self._json = True
        return "answer" if self._written(first) else None

    def _written(self, first: bytearray) -> bool:
        if self._failed:
            return False
        for mark in _MARKS.finditer(first, self._from):
            self._from = mark.end()
            if mark["error"]:
                self._failed = True
                return False
            if mark["choice"]:
                self._choice = True
            elif self._choice:
                return True
        self._from = max(self._from, len(first) - _OVERLAP)
        return False
