"""The end of an answer, streamed or not."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

TAIL_BYTES = 4_096
"""Bytes to keep of each chunk."""
TAIL_CHUNKS = 16
"""Number of last chunks to keep."""


_USAGE = re.compile(r'"usage"\s*:\s*(?=\{)')
# Text that may follow the JSON object of an answer or an event.
_END = re.compile(r"\s*\Z|[\r\n]+(?:data|event|id|retry)?:")
_TRIED = 4
_decoder = json.JSONDecoder()


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


def outer_usage(text: str, counts: Callable[[Mapping[str, Any]], object]) -> Mapping[str, Any]:
    """Return the last usage object that ``counts`` accepts; empty if there is none.

    Strings escape quotation marks, so ``"usage":`` is a field. It is the answer's own only if its object is the
    outermost one, so only the next line of a stream may follow that object.
    """
    for match in list(_USAGE.finditer(text))[: -_TRIED - 1 : -1]:
        rest = '{"usage":' + text[match.end() :]
        try:
            value, end = _decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            continue
        usage: Mapping[str, Any] = value["usage"]
        if _END.match(rest, end) and counts(usage):
            return usage
    return {}


def is_silence(body: bytes) -> bool:
    """Return whether a stream has no events except its end."""
    return all(_says_nothing(line.strip()) for line in body.splitlines())


def _says_nothing(line: bytes) -> bool:
    name, _, value = line.partition(b":")
    return name in (b"", b"event", b"id", b"retry") or (name == b"data" and value.strip() in (b"", b"[DONE]"))


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
