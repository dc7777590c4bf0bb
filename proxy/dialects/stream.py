"""Decide the kind of the first events of a stream."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from proxy.constants import UNDECODABLE
from proxy.http.sse import EventSplitter, data_of, split_events
from proxy.overflow.errors import names_error, says_error
from proxy.overflow.silent import ABORT_REASONS, LENGTH_REASONS, WINDOW_REASONS

NO_ROOM = WINDOW_REASONS | LENGTH_REASONS | ABORT_REASONS
"""Finish reasons that may mean, before any content, that the prompt filled the window."""

_SHOWN = 512
"""Bytes of an event that decide whether it is an error."""
_ERROR_NAME = re.compile(rb"event: ?(?:[\w.-]{0,64}(?:error|exception)|response\.failed)", re.I)
_ERROR_DATA = re.compile(
    rb"(?:^|[\r\n])data: ?\{\s{0,16}(?:\"error\"\s{0,16}:\s{0,16}[^\sn]|\"(?:type|object)\"\s{0,16}:\s{0,16}"
    rb"\"(?:error|response\.failed)\")"
)


Said = Literal["content", "error", "end"]

Judge = Callable[[Any], Said | None]
"""Return the kind of an event by its data: a JSON value, or ``None`` if it isn't JSON."""


class Start:
    """Judges the first events of a stream as they arrive. Reads each byte a constant number of times."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._splitter = EventSplitter()

    def feed(self, chunk: bytes) -> Said | None:
        """Add bytes, and return the kind of the first event that has one, or ``None``. See ``beginning``."""
        events = self._splitter.feed(chunk)
        return beginning(events, self._judge) if events else None

    def in_error(self) -> bool:
        """Return whether the unfinished event is an error."""
        return begins_as_error(bytes(self._splitter.unfinished[:_SHOWN]))


def beginning(events: bytes, judge: Judge) -> Said | None:
    """Return the kind of the first whole event that has one; ``None`` if there is none yet.

    Comments don't decide the kind. ``judge`` is called with data that is no error.
    """
    for lines in split_events(events):
        if any(names_error_line(line) for line in lines):
            return "error"
        data = data_of(lines)
        if data and (found := _judged(data, judge)):
            return found
    return None


def names_error_line(line: bytes) -> bool:
    """Return whether a line makes its event an error. Old llama.cpp servers send ``error:`` as a separate field."""
    name, _, value = line.partition(b":")
    return name == b"error" or (name == b"event" and names_error(value.decode("utf-8", "replace").strip()))


def begins_as_error(event: bytes) -> bool:
    """Return whether an unfinished event is an error, by its name or its data's first field."""
    start = event[:_SHOWN].lstrip(b"\r\n")
    return bool(_ERROR_NAME.match(start) or _ERROR_DATA.search(start))


def _judged(data: bytes, judge: Judge) -> Said | None:
    if data.strip() == b"[DONE]":
        return "end"
    value = _decoded(data)
    if says_error(data.decode("utf-8", "replace") if value is None else value):
        return "error"
    return judge(value)


def _decoded(data: bytes) -> object:
    """Decode JSON; ``None`` if it isn't valid."""
    try:
        value: object = msgspec.json.decode(data)
    except UNDECODABLE:
        return None
    return value
