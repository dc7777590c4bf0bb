"""Read answers of the Responses API: their first events, and their usage at the end."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from proxy.dialects.first_bytes import BLANK, EVENTS, OVERLAP
from proxy.dialects.stream import Said, begins_as_error, names_error_line
from proxy.dialects.tail import Tail, json_objects
from proxy.http.sse import EventSplitter, data_of, split_events
from proxy.overflow.error_detection import says_error
from proxy.overflow.silent import Finished, output_tokens, prompt_tokens

_ANNOUNCING = frozenset({"response.created", "response.queued", "response.in_progress", "ping", "keepalive"})
"""Events before the first content."""

_CONTENT_MARK = re.compile(
    rb"""(?P<error> "error" \s{0,99} : \s{0,99} [^\sn] | "status" \s{0,99} : \s{0,99} "(?:failed|incomplete)" )
    | (?P<item> "output" \s{0,99} : \s{0,99} \[ \s{0,99} \{ )""",
    re.VERBOSE,
)


_USAGE = re.compile(r'"usage"\s*:\s*(?=\{)')
_REASON = re.compile(r'"incomplete_details"\s*:\s*\{\s*"reason"\s*:\s*"([^"\\]{1,64})"')
_TRIED = 4
_json = json.JSONDecoder()


class ContentDetector:
    """Checks an answer as it arrives. Reads each byte a few times at most."""

    def __init__(self) -> None:
        self._from = 0
        self._json = False
        self._failed = False

    def of(self, first: bytearray) -> Literal["answer", "events"] | None:
        """Return the kind of response by all bytes so far; ``None`` if it may be an error.

        ``answer`` is a response with an item and without an error before it, or a body that isn't JSON. ``events`` is a
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
        mark = _CONTENT_MARK.search(first, self._from)
        if mark is None:
            self._from = max(self._from, len(first) - OVERLAP)
            return False
        self._failed = mark["error"] is not None
        return not self._failed


def fast_path(first: bytes) -> bool:
    """Return whether the first bytes have the usual form of an answer with content, and no error before it."""
    return ContentDetector().of(bytearray(first)) == "answer" and first[:1] == b"{"


class Start:
    """Judges the first events of a stream as they arrive. Reads each byte a constant number of times."""

    def __init__(self) -> None:
        self._splitter = EventSplitter()

    def feed(self, chunk: bytes) -> Said | None:
        """Add bytes, and return the kind of the first event that has one, or ``None``. See ``beginning``."""
        events = self._splitter.feed(chunk)
        return beginning(events) if events else None

    def in_error(self) -> bool:
        """Return whether the unfinished event is an error."""
        start = bytes(self._splitter.unfinished[:512])
        return begins_as_error(start) or b"response.failed" in start[:64]


def beginning(events: bytes) -> Said | None:
    """Return the kind of the first whole event that has one; ``None`` if there is none yet.

    Comments and the events that announce a response don't decide the kind.
    """
    for lines in split_events(events):
        if any(map(names_error_line, lines)):
            return "error"
        data = data_of(lines)
        if data and (found := _judged(data)):
            return found
    return None


def _judged(data: bytes) -> Said | None:
    if data.strip() == b"[DONE]":
        return "end"
    value = _decoded(data)
    if not isinstance(value, dict):
        return "error" if says_error(data.decode("utf-8", "replace")) else "content"
    type_ = value.get("type")
    if type_ in ("error", "response.failed") or says_error(value):
        return "error"
    if type_ in ("response.incomplete", "response.completed"):
        return "end" if _is_empty(value.get("response")) else "content"
    return None if isinstance(type_, str) and type_ in _ANNOUNCING else "content"


def _decoded(data: bytes) -> object:
    try:
        value: object = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return value


def _is_empty(response: object) -> bool:
    return not (isinstance(response, Mapping) and response.get("output"))


class AnswerTail(Tail):
    """The last bytes of an answer, which contain its usage and status."""

    def finished(self) -> Finished:
        """Return the answer's usage and finish reason. An answer longer than the kept bytes has content.

        The terminal event has the whole response. If its beginning is missing, its usage is still near its end.
        """
        body = self.body
        if self.whole:
            return read_usage(body)
        text = body.decode("utf-8", "replace")
        usage, reasons = _usage(text), _REASON.findall(text)
        reason = reasons[-1] if reasons else None
        return Finished(reason, prompt_tokens(usage), output_tokens(usage), False, cached(usage))


def _usage(text: str) -> Mapping[str, Any]:
    """Return the last usage object of a text. A field of this name in a tool's schema has no number of tokens."""
    for match in list(_USAGE.finditer(text))[: -_TRIED - 1 : -1]:
        try:
            usage, _ = _json.raw_decode(text, match.end())
        except (ValueError, RecursionError):
            continue
        if prompt_tokens(usage) is not None:
            found: Mapping[str, Any] = usage
            return found
    return {}


def read_usage(body: bytes) -> Finished:
    """Read the usage and finish reason of a whole answer, streamed or not. Skips events that aren't JSON.

    The finish reason is that of an incomplete response, and otherwise its status.
    """
    usage: Mapping[str, Any] = {}
    reason: str | None = None
    written = False
    for value in _responses(body):
        if isinstance(said := value.get("usage"), dict):
            usage = said
        reason = _reason(value) or reason
        written = (
            written or bool(value.get("output")) or str(value.get("type", "")).endswith((".delta", ".done", ".added"))
        )
    return Finished(reason, prompt_tokens(usage), output_tokens(usage), not written, cached(usage))


def cached(usage: Mapping[str, Any]) -> int:
    """Return the cached tokens of the prompt; 0 if the usage has none."""
    details = usage.get("input_tokens_details")
    number = details.get("cached_tokens") if isinstance(details, Mapping) else None
    return number if isinstance(number, int) and number > 0 else 0


def _responses(body: bytes) -> Iterator[Mapping[str, Any]]:
    """Yield the response of an answer, or the events of a stream and the responses in them."""
    for value in json_objects(body):
        yield value
        if isinstance(response := value.get("response"), dict):
            yield response


def _reason(response: Mapping[str, Any]) -> str | None:
    details = response.get("incomplete_details")
    reason = details.get("reason") if isinstance(details, Mapping) else None
    if isinstance(reason, str):
        return reason
    status = response.get("status")
    return status if isinstance(status, str) and status in ("completed", "incomplete", "failed") else None


def gives_up(body: bytes) -> bool:
    """Return whether a stream ends after the events that announce a response, without content and a last event."""
    types = [value.get("type") for value in json_objects(body)]
    return bool(types) and all(isinstance(type_, str) and type_ in _ANNOUNCING for type_ in types)
