"""Read answers of Anthropic's Messages API, streamed or not."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from proxy.dialects.first_bytes import ContentDetector
from proxy.dialects.stream import NO_ROOM, Said, Start
from proxy.dialects.tail import Tail, deltas, json_objects, outer_usage
from proxy.dialects.tail import is_silence as is_silence
from proxy.overflow.silent import Finished, cached_tokens, output_tokens, prompt_tokens

HEAD_BYTES = 4_096
"""Bytes at the beginning of a stream that are kept. They contain ``message_start`` with the prompt's size."""

_USUAL = frozenset({None, "end_turn", "stop_sequence", "tool_use", "max_tokens", "pause_turn", "refusal", "compaction"})
_REASON = re.compile(r'"stop_reason"\s*:\s*"([^"\\]{1,64})"')
_CONTENT = re.compile(rb'"content"\s{0,9}:\s{0,9}\[\s{0,9}\{')
_MARKS = re.compile(
    rb"""(?P<begin> (?!) )
    | (?P<written> "content" \s{0,99} : \s{0,99} \[ \s{0,99} \{ )
    | (?P<error> "error" \s{0,99} : \s{0,99} [^\sn] | "type" \s{0,99} : \s{0,99} "error" )""",
    re.VERBOSE,
)
"""JSON strings can't match, because they escape quotation marks."""

_OPENING = frozenset({"message_start", "ping"})
_COUNTS = ("input_tokens", "output_tokens")


def fast_path(first: bytes) -> bool:
    """Return whether the first bytes have the usual form of an answer with content, and no error before it."""
    found = _CONTENT.search(first[:HEAD_BYTES]) if first[:1] == b"{" else None
    return found is not None and first.find(b'"error"', 0, found.end()) < 0


def content_detector() -> ContentDetector:
    """Return a detector for one response."""
    return ContentDetector(_MARKS, inside=True)


def event_reader() -> Start:
    """Return a reader for one stream."""
    return Start(_judged)


def tail() -> AnswerTail:
    """Return an empty tail for one answer."""
    return AnswerTail()


def gives_up(body: bytes) -> bool:
    """Return whether a stream ends after its first event, without content and a stop reason."""
    events = list(json_objects(body))
    ended = bool(events) and events[-1].get("type") == "message_stop"
    return ended and all(event.get("type") in _OPENING for event in events[:-1])


def is_usual(reason: str | None) -> bool:
    """Return whether a stop reason says nothing about the size of the prompt."""
    return reason in _USUAL


def _judged(event: Any) -> Said | None:
    """Return the kind of an event; ``None`` if it comes before content, or if the answer may have had no room."""
    kind = event.get("type") if isinstance(event, dict) else None
    if kind == "ping":
        return None
    if kind == "message_start":
        message = event.get("message")
        return "content" if isinstance(message, dict) and message.get("content") else None
    if kind == "message_stop":
        return "end"
    if kind == "message_delta":
        delta = event.get("delta")
        reason = delta.get("stop_reason") if isinstance(delta, dict) else None
        return None if reason is None or reason in NO_ROOM else "content"
    return "content"


class AnswerTail(Tail):
    """The first and last bytes of an answer, which contain its usage and stop reason."""

    DELTAS = deltas("text|thinking|partial_json")

    def __init__(self) -> None:
        super().__init__()
        self._head = b""

    def add(self, chunk: bytes) -> None:
        """Add a chunk."""
        if len(self._head) < HEAD_BYTES:
            self._head += chunk[: HEAD_BYTES - len(self._head)]
        super().add(chunk)

    def _read(self, body: bytes) -> Finished:
        return read_usage(body if body[:1] == b"{" else self._head + b"\n" + body)

    def _end(self) -> Finished:
        body = self.body
        if self.whole:
            return read_usage(body)
        text = body.decode("utf-8", "replace")
        reasons = _REASON.findall(text)
        usage = _newer(_usage_of(self._head), outer_usage(text, _counts))
        return _finished(reasons[-1] if reasons else None, usage, empty=False)


def read_usage(body: bytes) -> Finished:
    """Read the usage and stop reason of a whole answer, streamed or not. Skips events that aren't JSON."""
    reason: str | None = None
    written = False
    for value in json_objects(body):
        kind, delta = value.get("type"), value.get("delta")
        found = value.get("stop_reason") or (delta.get("stop_reason") if isinstance(delta, dict) else None)
        reason = found if isinstance(found, str) else reason
        written = written or bool(value.get("content")) or kind in ("content_block_start", "content_block_delta")
    return _finished(reason, _usage_of(body), empty=not written)


def _usage_of(body: bytes) -> dict[str, Any]:
    """Return the newest number for each field of the usage in an answer or its events."""
    usage: dict[str, Any] = {}
    for value in json_objects(body):
        message = value.get("message")
        for part in (value, message if isinstance(message, dict) else {}):
            usage = _newer(usage, part.get("usage"))
    return usage


def _newer(before: Mapping[str, Any], usage: object) -> dict[str, Any]:
    """Return the usage with newer figures. 0 replaces no input, because some servers send it as a placeholder."""
    newer = _numbers(usage).items()
    return {**before, **{name: value for name, value in newer if value or "input" not in name or not before.get(name)}}


def _numbers(usage: object) -> dict[str, Any]:
    return {name: value for name, value in usage.items() if value is not None} if isinstance(usage, Mapping) else {}


def _counts(usage: Mapping[str, Any]) -> bool:
    return any(isinstance(usage.get(name), int) for name in _COUNTS)


def _finished(reason: str | None, usage: Mapping[str, Any], *, empty: bool) -> Finished:
    return Finished(reason, prompt_tokens(usage), output_tokens(usage), empty, *cached_tokens(usage), usage)
