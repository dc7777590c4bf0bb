"""Read answers of the Responses API: their first events, and their usage at the end."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from proxy.dialects.first_bytes import ContentDetector
from proxy.dialects.stream import Said, Start
from proxy.dialects.tail import Tail, deltas, json_objects
from proxy.dialects.tail import is_silence as is_silence
from proxy.overflow.silent import Finished, cached_tokens, output_tokens, prompt_tokens

_ANNOUNCING = frozenset({"response.created", "response.queued", "response.in_progress", "ping", "keepalive"})
"""Events before the first content."""

_USUAL = frozenset({None, "completed", "max_output_tokens"})

_MARKS = re.compile(
    rb"""" (?: (?P<begin> (?!) )
    | (?P<error> error" \s{0,99} : \s{0,99} [^\sn] | status" \s{0,99} : \s{0,99} "(?:failed|incomplete)" )
    | (?P<written> output" \s{0,99} : \s{0,99} \[ \s{0,99} \{ ) )""",
    re.VERBOSE,
)
"""A search is faster with the quotation mark first."""


_USAGE = re.compile(r'"usage"\s*:\s*(?=\{)')
_REASON = re.compile(r'"incomplete_details"\s*:\s*\{\s*"reason"\s*:\s*"([^"\\]{1,64})"')
_TIER = re.compile(rb'"service_tier"\s{0,9}:\s{0,9}"([a-z_]{1,32})"')
_SEARCH_EVENT = re.compile(rb'"type"\s{0,9}:\s{0,9}"response\.web_search_call\.completed"')
_SEARCH_ITEM = re.compile(rb'"type"\s{0,9}:\s{0,9}"web_search_call"')
_TRIED = 4
_json = json.JSONDecoder()


def fast_path(first: bytes) -> bool:
    """Return whether the first bytes have the usual form of an answer with content, and no error before it."""
    mark = _MARKS.search(first) if first[:1] == b"{" else None
    return mark is not None and mark["written"] is not None


def content_detector() -> ContentDetector:
    """Return a detector for one response: an item, and no error before it."""
    return ContentDetector(_MARKS, inside=True)


def event_reader() -> Start:
    """Return a reader for one stream."""
    return Start(_judged)


def tail() -> AnswerTail:
    """Return an empty tail for one answer."""
    return AnswerTail()


def is_usual(reason: str | None) -> bool:
    """Return whether a finish reason says nothing about the size of the prompt."""
    return reason in _USUAL


def _judged(event: Any) -> Said | None:
    """Return the kind of an event; ``None`` if it announces a response."""
    type_ = event.get("type") if isinstance(event, dict) else None
    if type_ in ("error", "response.failed"):
        return "error"
    if type_ in ("response.incomplete", "response.completed"):
        return "end" if _is_empty(event.get("response")) else "content"
    return None if isinstance(type_, str) and type_ in _ANNOUNCING else "content"


def _is_empty(response: object) -> bool:
    return not (isinstance(response, Mapping) and response.get("output"))


class AnswerTail(Tail):
    """See ``dialects.tail``.

    The terminal event has the whole response. If its beginning is missing, its usage is still near its end.
    """

    DELTAS = deltas("delta")

    def __init__(self) -> None:
        super().__init__()
        self._tier: str | None = None
        self._opening = True
        self._searched = _SEARCH_EVENT
        self._searches = 0

    def add(self, chunk: bytes) -> None:
        """Add a chunk. Keep what the price depends on and what may be far from the end."""
        if not self._added and chunk[:1] == b"{":
            self._searched = _SEARCH_ITEM
        self._find_tier(chunk)
        if b"web_search_call" in chunk:
            self._searches += len(self._searched.findall(chunk))
        super().add(chunk)

    def _find_tier(self, chunk: bytes) -> None:
        """Read the service tier. A caller's metadata follows it, so only the first one of an event counts."""
        self._opening = self._opening or chunk.startswith(b"data:")
        start = 0
        while (at := chunk.find(b'"service_tier"', start)) >= 0:
            self._opening = self._opening or chunk.find(b"\ndata:", start, at) >= 0
            if self._opening and (found := _TIER.match(chunk, at)):
                self._tier, self._opening = found[1].decode(), False
            start = at + 1
        self._opening = self._opening or chunk.find(b"\ndata:", start) >= 0

    def _read(self, body: bytes) -> Finished:
        found = read_usage(body)
        return replace(found, tier=self._tier or found.tier, searches=max(self._searches, found.searches))

    def _end(self) -> Finished:
        body = self.body
        if self.whole:
            return read_usage(body)
        text = body.decode("utf-8", "replace")
        usage, reasons = _usage(text), _REASON.findall(text)
        reason = reasons[-1] if reasons else None
        counts = prompt_tokens(usage), output_tokens(usage)
        return Finished(reason, *counts, False, *cached_tokens(usage), usage, self._tier, self._searches)


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
    tier: object = None
    written = False
    searches = 0
    for value in _responses(body):
        if isinstance(said := value.get("usage"), dict):
            usage = said
        tier = value.get("service_tier") or tier
        searches = max(searches, _searches(value.get("output")))
        reason = _reason(value) or reason
        written = (
            written or bool(value.get("output")) or str(value.get("type", "")).endswith((".delta", ".done", ".added"))
        )
    counts = prompt_tokens(usage), output_tokens(usage)
    return Finished(reason, *counts, not written, *cached_tokens(usage), usage, tier, searches)


def _searches(output: object) -> int:
    """Return the number of web searches in a response's output."""
    items = output if isinstance(output, list) else ()
    return sum(isinstance(item, dict) and item.get("type") == "web_search_call" for item in items)


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
