"""Frame server-sent events: find their ends, and write them. The dialects read their content.

See https://html.spec.whatwg.org/multipage/server-sent-events.html.
"""

from __future__ import annotations

from collections.abc import Iterator

LONGEST_EVENT = 1_000_000
"""Hold back an unfinished event up to this many bytes. Forward a longer one as it arrives."""

_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class EventSplitter:
    """Split a stream at the ends of events. Each byte is searched a constant number of times."""

    def __init__(self) -> None:
        self.unfinished = bytearray()

    def feed(self, chunk: bytes) -> bytes:
        """Add a chunk, and return the events that are complete now."""
        start = max(0, len(self.unfinished) - 3)
        self.unfinished += chunk
        return self.take(_end_of_events(self.unfinished, start))

    def take(self, size: int) -> bytes:
        """Remove and return the first bytes."""
        taken = bytes(memoryview(self.unfinished)[:size])
        del self.unfinished[:size]
        return taken


class EventBuffer:
    """Forwards whole events, so that the client never gets part of an event from a stream that breaks.

    Each byte is searched and copied a constant number of times, however small the chunks are.
    """

    def __init__(self) -> None:
        self._splitter = EventSplitter()
        self.midway = False
        """True if the last forwarded bytes begin an event that is too long to hold back."""

    def feed(self, chunk: bytes) -> bytes:
        """Add a chunk, and return the bytes to forward now."""
        held = self._splitter.unfinished
        if not held:
            # Most chunks are whole events. Forward them without a copy.
            end = len(chunk) if chunk.endswith(b"\n\n") else _end_of_events(chunk)
            if end == len(chunk) or len(chunk) - end >= LONGEST_EVENT:
                self.midway = end < len(chunk)
                return chunk
        whole = self._splitter.feed(chunk)
        if len(held) >= LONGEST_EVENT:
            self.midway = True
            return whole + self._splitter.take(len(held))
        self.midway = self.midway and not whole
        return whole

    def rest(self) -> bytes:
        """Return the unfinished event when the stream has ended properly."""
        return bytes(self._splitter.unfinished)


def encode(data: bytes, name: str = "") -> bytes:
    """Return an event. ``data`` is a single line."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + data + b"\n\n"


def comment(text: str) -> bytes:
    """Return a comment, which clients ignore. ``text`` is a single line."""
    return f": {text}\n\n".encode()


def split_events(events: bytes) -> Iterator[list[bytes]]:
    """Yield the lines of each whole event."""
    whole = events[: _end_of_events(events)].removeprefix(_BYTE_ORDER_MARK)
    for event in whole.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n\n"):
        yield event.split(b"\n")


def data_of(lines: list[bytes]) -> bytes:
    """Return the data of an event, which may have several lines."""
    return b"\n".join(line[5:].lstrip(b" ") for line in lines if line.startswith(b"data:"))


def _end_of_events(chunk: bytes | bytearray, start: int = 0) -> int:
    return max(chunk.rfind(end, start) + len(end) if chunk.find(end, start) >= 0 else 0 for end in _ENDS)
