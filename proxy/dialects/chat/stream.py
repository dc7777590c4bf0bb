"""Find the ends of server-sent events, and decide the kind of the first ones."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from proxy.overflow.error_detection import names_error, says_error
from proxy.overflow.silent import ABORT_REASONS, LENGTH_REASONS, WINDOW_REASONS

LONGEST_EVENT = 1_000_000
"""Hold back an unfinished event up to this many bytes. Forward a longer one as it arrives."""

NO_ROOM = WINDOW_REASONS | LENGTH_REASONS | ABORT_REASONS
"""Finish reasons that may mean, before any content, that the prompt filled the window."""

_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
_MARK = b"\xef\xbb\xbf"

_SHOWN = 512
"""Bytes of an event that decide whether it is an error."""
_ERROR_NAME = re.compile(rb"event: ?[\w.-]{0,64}(?:error|exception)", re.I)
_ERROR_DATA = re.compile(
    rb"(?:^|[\r\n])data: ?\{\s{0,16}(?:\"error\"\s{0,16}:\s{0,16}[^\sn]|\"(?:type|object)\"\s{0,16}:\s{0,16}\"error\")"
)


Said = Literal["content", "error", "end"]


class EventBuffer:
    """Forwards whole events, so that the client never gets part of an event from a stream that breaks.

    Each byte is searched and copied a constant number of times, however small the chunks are.
    """

    def __init__(self) -> None:
        self._held = bytearray()
        self.midway = False
        """Whether the last forwarded bytes begin an event that is too long to hold back."""

    def feed(self, chunk: bytes) -> bytes:
        """Add a chunk, and return the bytes to forward now."""
        held = self._held
        if not held:
            if chunk.endswith(b"\n\n"):
                self.midway = False
                return chunk
            end = _end_of_events(chunk)
            if end == len(chunk) or len(chunk) - end >= LONGEST_EVENT:
                self.midway = end < len(chunk)
                return chunk
            held += memoryview(chunk)[end:]
            self.midway = self.midway and not end
            return chunk[:end]
        end = _end_after(held, chunk)
        if len(held) - end >= LONGEST_EVENT:
            self.midway = True
            end = len(held)
        elif end:
            self.midway = False
        return _taken(held, end)

    def rest(self) -> bytes:
        """Return the unfinished event when the stream has ended properly."""
        return bytes(self._held)


class Start:
    """Judges the first events of a stream as they arrive. Reads each byte a constant number of times."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, chunk: bytes) -> Said | None:
        """Add bytes, and return the kind of the first event that has one, or ``None``. See ``beginning``."""
        end = _end_after(self._held, chunk)
        return beginning(_taken(self._held, end)) if end else None

    def in_error(self) -> bool:
        """Return whether the unfinished event is an error."""
        return begins_as_error(bytes(self._held[:_SHOWN]))


def _end_of_events(chunk: bytes | bytearray, start: int = 0) -> int:
    return max(chunk.rfind(end, start) + len(end) if chunk.find(end, start) >= 0 else 0 for end in _ENDS)


def _end_after(held: bytearray, chunk: bytes) -> int:
    """Add a chunk to bytes in which no event ends. Return the end of the last event, or 0."""
    start = max(0, len(held) - 3)
    held += chunk
    return _end_of_events(held, start)


def _taken(held: bytearray, end: int) -> bytes:
    taken = bytes(memoryview(held)[:end])
    del held[:end]
    return taken


def beginning(events: bytes) -> Said | None:
    """Return the kind of the first whole event that has one; ``None`` if there is none yet.

    Comments, a chunk that only has the role, and a finish reason for a full window don't decide the kind.
    """
    whole = whole_events(events).removeprefix(_MARK)
    for event in whole.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n\n"):
        lines = event.split(b"\n")
        if any(_names_error(line) for line in lines):
            return "error"
        data = b"\n".join(line[5:].lstrip(b" ") for line in lines if line.startswith(b"data:"))
        if data and (found := _judged(data)):
            return found
    return None


def _names_error(line: bytes) -> bool:
    """Return whether a line makes its event an error. Old llama.cpp servers send ``error:`` as a separate field."""
    name, _, value = line.partition(b":")
    return name == b"error" or (name == b"event" and names_error(value.decode("utf-8", "replace").strip()))


def whole_events(events: bytes) -> bytes:
    """Return the events without the unfinished last one."""
    return events[: _end_of_events(events)]


def begins_as_error(event: bytes) -> bool:
    """Return whether an unfinished event is an error, by its name or its data's first field."""
    start = event[:_SHOWN].lstrip(b"\r\n")
    return bool(_ERROR_NAME.match(start) or _ERROR_DATA.search(start))


def _judged(data: bytes) -> Said | None:
    if data.strip() == b"[DONE]":
        return "end"
    value = _decoded(data)
    if says_error(data.decode("utf-8", "replace") if value is None else value):
        return "error"
    choices = value.get("choices") if isinstance(value, dict) else None
    if not isinstance(choices, list) or any(_choice_has_content(choice) for choice in choices):
        return "content"
    return None


def _choice_has_content(choice: Any) -> bool:
    if not isinstance(choice, dict):
        return True
    delta = choice.get("delta")
    if choice.get("finish_reason") not in (None, "", "error", *NO_ROOM):
        return True
    return not isinstance(delta, dict) or any(value for name, value in delta.items() if name != "role")


def _decoded(data: bytes) -> object:
    """Decode JSON; ``None`` if it isn't valid."""
    try:
        value: object = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return value
