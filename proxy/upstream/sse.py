"""Server-sent events as bytes: where one ends, and what the first ones say."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec

LONGEST_EVENT = 1_000_000
"""An unfinished event is held back up to this many bytes; a longer one is passed on as it comes."""

_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")


class EventBuffer:
    """Passes whole events on, so that a stream that breaks never leaves half of one with the client."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> bytes:
        """What may be passed on now."""
        if self._rest:
            chunk = self._rest + chunk
            self._rest = b""
        elif chunk.endswith(b"\n\n"):
            return chunk
        end = _end_of_events(chunk)
        if end < len(chunk) and len(chunk) - end < LONGEST_EVENT:
            self._rest = chunk[end:]
            return chunk[:end]
        return chunk

    def rest(self) -> bytes:
        """What is left when the stream has ended properly."""
        return self._rest


def _end_of_events(chunk: bytes) -> int:
    return max(chunk.rfind(end) + len(end) if end in chunk else 0 for end in _ENDS)


def datas(events: bytes) -> Iterator[bytes]:
    """The data of each event; several data lines of one event are joined."""
    for event in events.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n\n"):
        lines = [line[5:].lstrip(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
        if lines:
            yield b"\n".join(lines)


def has_content(events: bytes) -> bool:
    """Whether one of the events carries something of the answer itself, or ends the stream.

    A first chunk that only names the role, comments and errors are no content.
    """
    return any(_is_content(data) for data in datas(events))


def has_error(events: bytes) -> bool:
    """Whether one of the events is an error."""
    if b"error" not in events:
        return False
    if any(line.startswith((b"event: error", b"event:error", b"error:")) for line in events.splitlines()):
        return True
    return any(_decoded(data).get("error") for data in datas(events))


def _is_content(data: bytes) -> bool:
    if data.strip() == b"[DONE]":
        return True
    value = _decoded(data)
    if value.get("error"):
        return False
    choices = value.get("choices")
    if not isinstance(choices, list):
        return value.get("type") != "error"
    return any(_choice_has_content(choice) for choice in choices)


def _choice_has_content(choice: Any) -> bool:
    if not isinstance(choice, dict):
        return True
    delta = choice.get("delta")
    if choice.get("finish_reason") not in (None, "", "error"):
        return True
    return not isinstance(delta, dict) or any(value for name, value in delta.items() if name != "role")


def _decoded(data: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return value if isinstance(value, dict) else {}


async def rechunked(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """A stream put together again from what was read of it already and what is still to come."""
    if first:
        yield first
    async for chunk in rest:
        yield chunk
