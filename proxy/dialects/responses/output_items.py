"""Find the output items in an answer of the Responses API as it passes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from proxy.constants import UNDECODABLE
from proxy.dialects.dialect import ItemSink
from proxy.dialects.first_bytes import BLANK
from proxy.http.sse import EventSplitter, data_of, split_events

LARGEST = 4_000_000
"""Bytes of an answer without a stream, or of an event. The items of larger ones aren't found."""

TRIED = 4 * LARGEST
"""Bytes of an answer without a stream that are decoded before its end, all attempts together."""

_DONE = b"response.output_item.done"
_ENDED = (b"response.completed", b"response.incomplete")


class _Answer(msgspec.Struct, frozen=True):
    output: list[msgspec.Raw] = []


class _Event(msgspec.Struct):
    type: str = ""
    item: msgspec.Raw = msgspec.Raw(b"")
    response: _Answer = _Answer()


class _Item(msgspec.Struct):
    id: str | None = None


_answer = msgspec.json.Decoder(_Answer)
_event = msgspec.json.Decoder(_Event)
_item = msgspec.json.Decoder(_Item)


class ItemReader:
    """Passes each item to ``sink`` before the client gets the end of it. Reads each byte a few times at most.

    The end of an answer without a stream isn't known before it's over. So the reader decodes it after each chunk that
    could be the last one, within ``TRIED``.
    """

    def __init__(self, sink: ItemSink) -> None:
        self._sink = sink
        self._body: bytearray | None = bytearray()
        self._splitter: EventSplitter | None = None
        self._found = False
        self._tried = 0

    def add(self, chunk: bytes) -> None:
        """Add a chunk of the answer."""
        if self._splitter is not None:
            self._events(self._splitter, chunk)
        elif self._body is not None:
            self._body += chunk
            if len(self._body) > LARGEST:
                self._body = None
            elif (first := self._body[:64].lstrip(BLANK)[:1]) and first != b"{":
                self._splitter = EventSplitter()
                self._events(self._splitter, bytes(self._body))
                self._body = None
            elif chunk.rstrip(BLANK)[-1:] == b"}" and self._tried + len(self._body) <= TRIED:
                self._whole(self._body)

    def finish(self) -> None:
        """Read an answer without a stream that is over."""
        if self._body:
            self._whole(self._body)

    def _whole(self, body: bytearray) -> None:
        self._tried += len(body)
        try:
            answer = _answer.decode(body)
        except UNDECODABLE:
            return  # it isn't whole
        self._body = None
        self._pass(answer.output)

    def _events(self, splitter: EventSplitter, chunk: bytes) -> None:
        events = splitter.feed(chunk)
        if len(splitter.unfinished) > LARGEST:
            self._splitter = None
        if _DONE not in events and (self._found or not any(name in events for name in _ENDED)):
            return
        for lines in split_events(events):
            data = data_of(lines)
            if _DONE not in data and (self._found or not any(name in data for name in _ENDED)):
                continue
            try:
                event = _event.decode(data)
            except UNDECODABLE:
                continue
            if event.type == _DONE.decode():
                self._pass([event.item])
            elif not self._found and event.type.encode() in _ENDED:
                self._pass(event.response.output)

    def _pass(self, items: Sequence[msgspec.Raw]) -> None:
        for raw in items:
            try:
                id = _item.decode(raw).id
                # Streams and whole answers differ in their spaces.
                item = msgspec.json.format(bytes(raw), indent=-1)
            except UNDECODABLE:
                continue
            if id:
                self._found = True
                self._sink(id, item)
