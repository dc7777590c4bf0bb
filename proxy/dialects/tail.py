"""The end of an answer, streamed or not."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec

TAIL_BYTES = 4_096
"""Bytes to keep of each chunk."""
TAIL_CHUNKS = 16
"""Number of last chunks to keep."""


class Tail:
    """The last bytes of an answer, which contain its usage and finish reason."""

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque(maxlen=TAIL_CHUNKS)
        self._added = 0
        self._cut = False

    def add(self, chunk: bytes) -> None:
        """Add a chunk, and drop the oldest one if there are too many."""
        if len(chunk) > TAIL_BYTES:
            self._chunks.clear()
            chunk = chunk[-TAIL_BYTES:]
            self._cut = True
        self._chunks.append(chunk)
        self._added += 1

    @property
    def body(self) -> bytes:
        """Return the bytes that were kept."""
        return b"".join(self._chunks)

    @property
    def whole(self) -> bool:
        """Return whether these are all bytes of the answer."""
        return not self._cut and self._added <= TAIL_CHUNKS


def json_objects(body: bytes) -> Iterator[dict[str, Any]]:
    """Yield the JSON object of an answer, or those of a stream's events."""
    text = body.strip()
    whole = text.startswith(b"{")
    for line in [text] if whole else text.splitlines():
        data = line if whole else line.removeprefix(b"data:").strip()
        if not whole and not line.startswith(b"data:"):
            continue
        try:
            value = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        if isinstance(value, dict):
            yield value
