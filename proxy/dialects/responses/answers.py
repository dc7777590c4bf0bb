"""Read answers of the Responses API: their first bytes and events, their usage, and their output items."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from proxy.constants import UNDECODABLE
from proxy.dialects.answers import (
    BLANK,
    Answers,
    AnswerTail,
    ItemReader,
    ItemSink,
    Object,
    Verdict,
    deltas,
    json_objects,
)
from proxy.http.sse import EventSplitter, data_of, split_events
from proxy.overflow.silent import Finished, prompt_tokens

LARGEST = 4_000_000  # Bytes of an answer without a stream, or of an event. The items of larger ones aren't found.
TRIED = 4 * LARGEST  # bytes of an answer without a stream that are decoded before its end, all attempts together

_ANNOUNCING = frozenset({"response.created", "response.queued", "response.in_progress", "ping", "keepalive"})
"""Events before the first content."""

_CONTENT_EVENTS = (".delta", ".done", ".added")
_STATUSES = ("completed", "incomplete", "failed")

_USAGE = re.compile(r'"usage"\s*:\s*(?=\{)')
_TIER = re.compile(rb'"service_tier"\s{0,9}:\s{0,9}"([a-z_]{1,32})"')
_SEARCH_EVENT = re.compile(rb'"type"\s{0,9}:\s{0,9}"response\.web_search_call\.completed"')
_SEARCH_ITEM = re.compile(rb'"type"\s{0,9}:\s{0,9}"web_search_call"')
_FIELD_BYTES = 96  # bytes of the longest of these fields
_TRIED = 4
_json = json.JSONDecoder()

_DONE = b"response.output_item.done"
_ENDED = (b"response.completed", b"response.incomplete")


class ResponsesAnswers(Answers):
    """See ``dialects.answers.Answers``. The last event has the whole response."""

    USUAL = frozenset({None, "completed", "max_output_tokens"})
    REASON = re.compile(r'"incomplete_details"\s*:\s*\{\s*"reason"\s*:\s*"([^"\\]{1,64})"')
    TEXTS = deltas("delta")
    NESTED = "response"

    def tail(self) -> AnswerTail:
        return _ResponsesTail(self)

    def judge(self, event: Any) -> Verdict | None:
        """An event that announces a response says nothing."""
        type_ = event.get("type") if isinstance(event, dict) else None
        if type_ in ("error", "response.failed"):
            return "error"
        if type_ in ("response.incomplete", "response.completed"):
            response = event.get("response")
            return "content" if isinstance(response, dict) and response.get("output") else "end"
        return None if isinstance(type_, str) and type_ in _ANNOUNCING else "content"

    def reason(self, event: Object) -> str | None:
        """Return the reason of an incomplete response, and otherwise its status."""
        return _reason(_response(event)) or _reason(event)

    def has_content(self, event: Object) -> bool:
        return any(
            part.get("output") or str(part.get("type", "")).endswith(_CONTENT_EVENTS)
            for part in (event, _response(event))
        )

    def tier(self, event: Object) -> object:
        return _response(event).get("service_tier") or event.get("service_tier")

    def searches(self, event: Object) -> int:
        return max(_searches(event.get("output")), _searches(_response(event).get("output")))

    def joined_usage(self, usage: dict[str, Any], newer: Object) -> dict[str, Any]:
        """The newest report is the whole response's."""
        return dict(newer)

    def last_usage(self, text: str) -> Object:
        """A field of this name in a tool's schema has no number of tokens."""
        for match in list(_USAGE.finditer(text))[: -_TRIED - 1 : -1]:
            try:
                usage, _ = _json.raw_decode(text, match.end())
            except (ValueError, RecursionError):
                continue
            if prompt_tokens(usage) is not None:
                last: Object = usage
                return last
        return {}

    def gives_up(self, body: bytes) -> bool:
        """Return whether a stream ends after the events that announce a response, without content and a last event."""
        types = [value.get("type") for value in json_objects(body)]
        return bool(types) and all(isinstance(type_, str) and type_ in _ANNOUNCING for type_ in types)


def _response(event: Object) -> Object:
    """Return the response in an event; empty if it has none."""
    response = event.get("response")
    return response if isinstance(response, dict) else {}


def _searches(output: object) -> int:
    items = output if isinstance(output, list) else ()
    return sum(isinstance(item, dict) and item.get("type") == "web_search_call" for item in items)


def _reason(response: Object) -> str | None:
    details = response.get("incomplete_details")
    reason = details.get("reason") if isinstance(details, dict) else None
    if isinstance(reason, str):
        return reason or None
    status = response.get("status")
    return status if isinstance(status, str) and status in _STATUSES else None


class _ResponsesTail(AnswerTail):
    """Keeps what the price depends on and what may be far from the end.

    The last event has the whole response. If its beginning is missing, its usage is still near its end.
    """

    def __init__(self, answers: ResponsesAnswers) -> None:
        super().__init__(answers)
        self._tier: str | None = None
        self._opening = True
        self._search = _SEARCH_EVENT
        self._searches = 0
        self._end = b""  # the last bytes, because a field may come in two chunks

    def add(self, chunk: bytes) -> None:
        if not self._added and chunk[:1] == b"{":
            self._search = _SEARCH_ITEM
        seen, end = self._end + chunk, 0
        self._find_tier(seen)
        if b"web_search_call" in seen:
            for found in self._search.finditer(seen):
                self._searches, end = self._searches + 1, found.end()
        self._end = seen[max(end, len(seen) - _FIELD_BYTES) :]
        super().add(chunk)

    def _find_tier(self, chunk: bytes) -> None:
        """Read the service tier. A caller's metadata follows it, so only the first one of an event counts."""
        self._opening = self._opening or chunk.startswith(b"data:")
        start = 0
        while (at := chunk.find(b'"service_tier"', start)) >= 0:
            self._opening = self._opening or chunk.find(b"\ndata:", start, at) >= 0
            if self._opening and (tier := _TIER.match(chunk, at)):
                self._tier, self._opening = tier[1].decode(), False
            start = at + 1
        self._opening = self._opening or chunk.find(b"\ndata:", start) >= 0

    def read_last(self, text: str) -> Finished:
        end = super().read_last(text)
        # Only a response that ended has a usage. Its status may be far before it.
        reason = end.finish_reason or (None if end.prompt is None else _STATUSES[0])
        return replace(end, finish_reason=reason, tier=self._tier, searches=self._searches)

    def read_reports(self, body: bytes) -> Finished:
        end = super().read_reports(body)
        return replace(end, tier=self._tier or end.tier, searches=max(self._searches, end.searches))


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


class OutputItemReader(ItemReader):
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
