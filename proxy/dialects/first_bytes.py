"""Decide by its first bytes whether a response without a stream's content type is an answer or may be an error."""

from __future__ import annotations

import re
from typing import Literal

BLANK = b"\xef\xbb\xbf \t\r\n"
"""Bytes that may come before the first value: a byte order mark, and blank lines that keep the connection alive."""

EVENTS = (b"data:", b"event:", b"error:", b":", b"id:", b"retry:")

OVERLAP = 512
"""Bytes that are searched again with the next chunk: more than a mark can have."""


class ContentDetector:
    """Checks an answer as it arrives. Reads each byte a few times at most.

    ``marks`` has three groups: ``error``, ``written`` for content, and ``begin`` for the field that content is in.
    ``inside`` means that content needs no such field.
    """

    def __init__(self, marks: re.Pattern[bytes], *, inside: bool) -> None:
        self._marks = marks
        self._from = 0
        self._json = False
        self._inside = inside
        self._failed = False

    def of(self, first: bytearray) -> Literal["answer", "events"] | None:
        """Return the kind of response by all bytes so far; ``None`` if it may be an error.

        ``answer`` is JSON with content and without an error before it, or a body that isn't JSON. ``events`` is a
        stream.
        """
        if not self._json:
            start = bytes(first[:OVERLAP]).lstrip(BLANK)[:6]
            if not start or any(name != start and name.startswith(start) for name in EVENTS):
                return None
            if start.startswith(EVENTS):
                return "events"
            if start[:1] not in b'{["':
                return "answer"
            self._json = True
        return "answer" if self._written(first) else None

    def _written(self, first: bytearray) -> bool:
        if self._failed:
            return False
        for mark in self._marks.finditer(first, self._from):
            self._from = mark.end()
            if mark["error"]:
                self._failed = True
                return False
            if mark["begin"]:
                self._inside = True
            elif self._inside:
                return True
        self._from = max(self._from, len(first) - OVERLAP)
        return False
