"""Read the answers of any API: their first bytes, the first events of a stream, and their end.

Each API's class has a table of marks and names, and the functions that judge one event.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Literal

import msgspec
from msgspec.structs import replace

from proxy.constants import UNDECODABLE
from proxy.http.sse import EventSplitter, data_of, split_events
from proxy.overflow.errors import error_part, names_error, says_error
from proxy.overflow.silent import (
    ABORT_REASONS,
    LENGTH_REASONS,
    WINDOW_REASONS,
    Finished,
    cached_tokens,
    output_tokens,
    prompt_tokens,
)

NO_ROOM = WINDOW_REASONS | LENGTH_REASONS | ABORT_REASONS
"""Finish reasons that may mean, before any content, that the prompt filled the window."""

BLANK = b"\xef\xbb\xbf \t\r\n"
"""Bytes that may come before the first value: a byte order mark, and blank lines that keep the connection alive."""

TAIL_BYTES = 4_096  # bytes to keep of each chunk
TAIL_CHUNKS = 16  # number of last chunks to keep

KEPT_BYTES = 131_072
"""Bytes of a stream that are kept until their text is extracted, and of its text. Usually the usage arrives first."""

LENIENT_BYTES = 1_000_000  # bytes of JSON that Python's slower parser tries to read
LARGEST = 16_000_000  # bytes of an answer that isn't streamed, or of one event, that are kept
EVENT = re.compile(rb"[%b]{0,512}(?:data|event|error|id|retry)?:" % BLANK)  # the beginning of a stream

Verdict = Literal["content", "error", "end"]

Object = Mapping[str, Any]

_SHOWN = 512  # bytes of an event that decide whether it is an error
_ERROR_NAME = re.compile(rb"event: ?(?:[\w.-]{0,64}(?:error|exception)|response\.failed)", re.I)
_ERROR_DATA = re.compile(
    rb"(?:^|[\r\n])data: ?\{\s{0,16}(?:\"error\"\s{0,16}:\s{0,16}[^\sn]|\"(?:type|object)\"\s{0,16}:\s{0,16}"
    rb"\"(?:error|response\.failed)\")"
)

_ERROR = re.compile(rb'"error"\s{0,99}:\s{0,99}[^\sn]')
_MODEL = re.compile(rb'"model"\s*:\s*"([^"\\]{1,200})"')
_REPORTS = re.compile(rb'"usage"\s*:\s*\{')
_USAGE = re.compile(r'"usage"\s*:\s*(?=\{)')
# Text that may follow the JSON object of an answer or an event.
_END = re.compile(r"\s*\Z|[\r\n]+(?:data|event|id|retry)?:")
_TRIED = 4
_decoder = json.JSONDecoder()


class Answers(ABC):
    """How to read an API's answers.

    - ``USUAL`` are the finish reasons that say nothing about the size of the prompt. ``REASON`` finds a finish reason
      in the end of an answer: its first group.
    - ``TEXTS`` finds the text in events: its first group is a part of a JSON string.
    - ``NESTED`` is the field of an event with the whole answer. It may have the usage, too.
    """

    USUAL: ClassVar[frozenset[str | None]]
    REASON: ClassVar[re.Pattern[str]]
    TEXTS: ClassVar[re.Pattern[bytes]]
    NESTED: ClassVar[str] = "message"

    @abstractmethod
    def judge(self, event: Any) -> Verdict | None:
        """Return the kind of an event that is no error; ``None`` if it says nothing.

        ``event`` is a JSON value, or ``None`` if the event's data isn't JSON.
        """

    @abstractmethod
    def reason(self, event: Object) -> str | None:
        """Return the finish reason in an event, or in an answer that isn't streamed."""

    @abstractmethod
    def has_content(self, event: Object) -> bool:
        """Return whether an event, or an answer that isn't streamed, has text, calls, or reasoning."""

    @abstractmethod
    def gives_up(self, body: bytes) -> bool:
        """Return whether the server abandoned a stream after its first event, before it wrote anything."""

    def tier(self, event: Object) -> object:
        """Return the service tier that an event states outside of its usage."""
        return None

    def searches(self, event: Object) -> int:
        """Return the number of web searches in an event, as far as it shows them."""
        return 0

    def stated_usage(self, part: Object) -> object:
        """Return the usage in an event or an answer, with OpenAI's or Anthropic's names of its numbers."""
        return part.get("usage")

    def strings(self, answer: Object) -> Iterator[str]:
        """Yield the texts, calls, and reasoning of an answer that isn't streamed."""
        return _texts([answer.get(name) for name in _PARTS])

    def joined_usage(self, usage: dict[str, Any], newer: Object) -> dict[str, Any]:
        """Return the usage of an answer with a newer report: each number that it states is the newest."""
        usage.update({name: number for name, number in newer.items() if number is not None})
        return usage

    def read_whole(self, body: bytes) -> Finished:
        """Read a whole answer that isn't streamed. Any text but JSON is content, and an error isn't."""
        body = body.lstrip(BLANK)
        end = self.read_usage(body)
        if body[:1] not in b'{["':
            return replace(end, empty=False)
        failed = _ERROR.search(body) is not None and error_part(next(json_objects(body), None))
        return replace(end, empty=True) if failed else end

    def event_reader(self) -> EventReader:
        """Return a reader for one stream."""
        return EventReader(self.judge)

    def tail(self) -> AnswerTail:
        """Return an empty tail for one answer."""
        return AnswerTail(self)

    def is_silence(self, body: bytes) -> bool:
        """Return whether a stream has no events except its end."""
        return all(_is_silent(line.strip()) for line in body.splitlines())

    def is_usual(self, reason: str | None) -> bool:
        """Return whether a finish reason says nothing about the size of the prompt."""
        return reason in self.USUAL

    def read_usage(self, body: bytes) -> Finished:
        """Read the usage and finish reason of a whole answer, streamed or not. Skips events that aren't JSON."""
        usage: dict[str, Any] = {}
        reason: str | None = None
        tier: object = None
        written = False
        searches = 0
        for event in json_objects(body):
            usage = self._with_usage(usage, event)
            stated = self.reason(event)
            reason = reason if stated is None else stated
            tier = self.tier(event) or tier
            written = written or self.has_content(event)
            searches = max(searches, self.searches(event))
        return finished(reason, usage, empty=not written, tier=tier, searches=searches)

    def read_end(self, text: str) -> Finished:
        """Read the usage and finish reason in the last part of an answer with content."""
        reasons = self.REASON.findall(text)
        return finished(reasons[-1] if reasons else None, self.last_usage(text), empty=False)

    def last_usage(self, text: str) -> Object:
        """Return the usage in the last part of an answer; empty if there is none."""
        return outer_usage(text, prompt_tokens)

    def usage_in(self, body: bytes) -> dict[str, Any]:
        """Return the usage that an answer or its events report."""
        usage: dict[str, Any] = {}
        for event in json_objects(body):
            usage = self._with_usage(usage, event)
        return usage

    def _with_usage(self, usage: dict[str, Any], event: Object) -> dict[str, Any]:
        for part in (event, event.get(self.NESTED)):
            if isinstance(part, dict) and isinstance(newer := self.stated_usage(part), dict):
                usage = self.joined_usage(usage, newer)
        return usage


class EventReader:
    """Judges the first events of a stream as they arrive. Reads each byte a constant number of times."""

    def __init__(self, judge: Callable[[Any], Verdict | None]) -> None:
        """``judge`` is that of ``Answers``."""
        self._judge = judge
        self._splitter = EventSplitter()

    def feed(self, chunk: bytes) -> Verdict | None:
        """Add bytes, and return the kind of the first event that has one, or ``None``.

        Comments don't decide the kind.
        """
        events = self._splitter.feed(chunk)
        for lines in split_events(events) if events else ():
            if any(_names_error(line) for line in lines):
                return "error"
            data = data_of(lines)
            if data and (verdict := self._verdict(data)):
                return verdict
        return None

    def in_error(self) -> bool:
        """Return whether the unfinished event is an error, by its name or its data's first field."""
        start = bytes(self._splitter.unfinished[:_SHOWN]).lstrip(b"\r\n")
        return bool(_ERROR_NAME.match(start) or _ERROR_DATA.search(start))

    def _verdict(self, data: bytes) -> Verdict | None:
        if data.strip() == b"[DONE]":
            return "end"
        try:
            value: object = msgspec.json.decode(data)
        except UNDECODABLE:
            value = None
        if says_error(data.decode("utf-8", "replace") if value is None else value):
            return "error"
        return self._judge(value)


def _names_error(line: bytes) -> bool:
    """Return whether a line makes its event an error. Old llama.cpp servers send ``error:`` as a separate field."""
    name, _, value = line.partition(b":")
    return name == b"error" or (name == b"event" and names_error(value.decode("utf-8", "replace").strip()))


class AnswerTail:
    """An answer as it passes: its last bytes, which usually contain its usage and finish reason, and its text."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._chunks: deque[bytes] = deque(maxlen=TAIL_CHUNKS)
        self._added = 0
        self._cut = False
        self._kept: list[bytes] = []
        self._size = 0
        self._limit = KEPT_BYTES
        self._texts: list[bytes] = []
        self.lost = 0
        """Bytes that were too many to keep."""
        self.provisional = False
        """True if a usage without a finish reason may be that of the beginning."""

    def add(self, chunk: bytes) -> None:
        """Add a chunk, and drop the oldest one if there are too many."""
        self._kept.append(chunk)
        self._size += len(chunk)
        if self._size > self._limit:
            self._fold()
        if len(chunk) > TAIL_BYTES:
            self._chunks.clear()
            chunk = chunk[-TAIL_BYTES:]
            self._cut = True
        self._chunks.append(chunk)
        self._added += 1

    @property
    def whole(self) -> bool:
        """Return whether the last bytes are all bytes of the answer."""
        return not self._cut and self._added <= TAIL_CHUNKS

    def finished(self) -> Finished:
        """Return the answer's usage and finish reason. An answer longer than the last bytes has content."""
        if self.whole:
            return self._answers.read_usage(b"".join(self._kept))
        end = self.read_last(b"".join(self._chunks).decode("utf-8", "replace"))
        if end.prompt is not None and end.output is not None:
            return end
        body = b"".join(self._kept)
        if not self._is_json:
            lines = body.splitlines() if b'"usage"' in body else ()
            body = b"\n".join([line for line in lines if _REPORTS.search(line)][-_TRIED:])
        more = self.read_reports(body) if body else end
        if more.prompt is None and more.output is None:
            return end
        return replace(more, finish_reason=end.finish_reason or more.finish_reason, empty=False)

    def read_last(self, text: str) -> Finished:
        """Read the last bytes of an answer whose beginning they lack."""
        return self._answers.read_end(text)

    def read_reports(self, body: bytes) -> Finished:
        """Read the events with a usage, or a body that isn't streamed, if the last bytes have no usage."""
        return self._answers.read_usage(body)

    @property
    def ending(self) -> list[bytes]:
        """Return the body of an answer that isn't streamed, or the last events of a stream."""
        is_json = self._is_json
        body = b"".join(self._kept if is_json else self._chunks).replace(b"\r\n", b"\n").strip()
        return [body] if is_json else body.rsplit(b"\n\n", _TRIED)

    @property
    def model(self) -> str:
        """Return the model that the answer names; empty if it names none."""
        named = _MODEL.search(b"".join(self._kept))
        return "" if named is None else named[1].decode("utf-8", "replace")

    def written(self) -> str:
        """Return the text, calls, and reasoning in the answer so far, to count them."""
        body = b"".join(self._kept)
        if self._is_json:
            return "\n".join(self._answers.strings(next(json_objects(body), {})))
        parts = b"".join([*self._texts, *self._answers.TEXTS.findall(body)])
        try:
            text: str = msgspec.json.decode(b'"' + parts + b'"', type=str)
        except UNDECODABLE:  # half of a surrogate pair, for example
            return parts.decode("utf-8", "replace")
        return text

    @property
    def _is_json(self) -> bool:
        return bool(self._kept) and not self._texts and self._kept[0].lstrip()[:1] == b"{"

    def _fold(self) -> None:
        """Extract the text of the whole lines, and keep the rest."""
        if self._is_json and self._limit < LARGEST:
            self._limit = LARGEST
            return
        data = b"".join(self._kept)
        if self._is_json:
            self.lost += len(data)
            data = b""
        end = data.rfind(b"\n") + 1
        # One object, because thousands of small ones take several times their size.
        text = b"".join([*self._texts, *self._answers.TEXTS.findall(data, 0, end)])
        if len(text) > KEPT_BYTES:
            self.lost += len(text)
            text = b""
        self._texts = [text]
        rest = data[end:]
        if len(rest) > LARGEST:
            self.lost += len(rest)
            rest = b""
        self._kept, self._size, self._limit = [rest], len(rest), max(KEPT_BYTES, 2 * len(rest))


ItemSink = Callable[[str, bytes], None]  # takes an output item: its id, and its bytes


class ItemReader(ABC):
    """Finds the output items in an answer as it passes."""

    @abstractmethod
    def add(self, chunk: bytes) -> None:
        """Add a chunk of an uncompressed answer."""

    @abstractmethod
    def finish(self) -> None:
        """Read what the end of the answer completes."""


def finished(reason: str | None, usage: Object, *, empty: bool, tier: object = None, searches: int = 0) -> Finished:
    """Return the end of an answer with this usage."""
    counts = prompt_tokens(usage), output_tokens(usage)
    return Finished(reason, *counts, empty, *cached_tokens(usage), usage, tier, searches)


def outer_usage(text: str, counts: Callable[[Object], object]) -> Object:
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
        usage: Object = value["usage"]
        if _END.match(rest, end) and counts(usage):
            return usage
    return {}


def deltas(names: str) -> re.Pattern[bytes]:
    """Return the expression for ``Answers.TEXTS``: the values of these fields. Strings escape quotation marks."""
    return re.compile(rb'"(?:%b)"\s*:\s*"([^"\\]*(?:\\.[^"\\]*)*)"' % names.encode())


SILENT = frozenset(
    {
        *("id", "object", "model", "role", "type", "name", "status", "finish_reason", "native_finish_reason"),
        *("call_id", "stop_reason", "stop_sequence", "tool_use_id", "service_tier", "system_fingerprint", "provider"),
        *("format", "obfuscation", "token", "logprobs", "annotations", "url", "title", "severity"),
        *("message", "code", "param"),
    }
)
"""Fields whose strings the model didn't write. All others count as text."""

_PARTS = ("choices", "content", "output", "message", "response", "summary")


def all_but(*names: str) -> re.Pattern[bytes]:
    """Return the expression for ``Answers.TEXTS`` that finds the values of all fields but these and ``SILENT``."""
    return deltas(f'(?!(?:{"|".join(SILENT.union(names))})")[^"\\\\]{{1,64}}')


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, list):
        for one in value:
            yield from _texts(one)
    elif isinstance(value, dict):
        for name, part in value.items():
            if isinstance(part, str) and name not in SILENT and not (name == "data" and "transcript" in value):
                yield part
            elif name == "input":  # the arguments of Anthropic's calls
                yield msgspec.json.encode(part).decode()
            elif name not in ("logprobs", "annotations"):
                yield from _texts(part)


def _is_silent(line: bytes) -> bool:
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
        value = _decoded(data)
        if isinstance(value, dict):
            yield value


def _decoded(data: bytes) -> object:
    """Return a JSON value, ``None`` if it isn't one. Half of a surrogate pair, for example, makes the parser slower."""
    try:
        value: object = msgspec.json.decode(data)
    except UNDECODABLE:
        try:
            value = json.loads(data, strict=False) if len(data) <= LENIENT_BYTES and b":" in data else None
        except (ValueError, RecursionError):
            return None
    return value
