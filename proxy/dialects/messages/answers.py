"""Read answers of Anthropic's Messages API, streamed or not."""

from __future__ import annotations

import re
from typing import Any

from proxy.dialects.answers import (
    NO_ROOM,
    Answers,
    AnswerTail,
    Object,
    Verdict,
    all_but,
    finished,
    json_objects,
    outer_usage,
)
from proxy.overflow.silent import Finished

HEAD_BYTES = 4_096
"""Bytes at the beginning of a stream that are kept. They contain ``message_start`` with the prompt's size."""

_OPENING = frozenset({"message_start", "ping"})
_COUNTS = ("input_tokens", "output_tokens")


class MessagesAnswers(Answers):
    """See ``dialects.answers.Answers``."""

    USUAL = frozenset(
        {None, "end_turn", "stop_sequence", "tool_use", "max_tokens", "pause_turn", "refusal", "compaction"}
    )
    REASON = re.compile(r'"stop_reason"\s*:\s*"([^"\\]{1,64})"')
    TEXTS = all_but()

    def tail(self) -> AnswerTail:
        return _MessagesTail(self)

    def judge(self, event: Any) -> Verdict | None:
        """An event before content says nothing, and neither does an end without room for content."""
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

    def reason(self, event: Object) -> str | None:
        delta = event.get("delta")
        reason = event.get("stop_reason") or (delta.get("stop_reason") if isinstance(delta, dict) else None)
        return reason if isinstance(reason, str) else None

    def has_content(self, event: Object) -> bool:
        return bool(event.get("content")) or event.get("type") in ("content_block_start", "content_block_delta")

    def stated_usage(self, part: Object) -> object:
        """Return the usage, except the proxy's own count with which a bridge begins a stream."""
        begins = part.get("stop_reason") is None and str(part.get("id")).startswith("msg_proxy")
        return None if begins else part.get("usage")

    def joined_usage(self, usage: dict[str, Any], newer: Object) -> dict[str, Any]:
        """0 replaces no input, because some servers send it as a placeholder."""
        for name, number in newer.items():
            if number is not None and (number or "input" not in name or not usage.get(name)):
                usage[name] = number
        return usage

    def gives_up(self, body: bytes) -> bool:
        """Return whether a stream ends after its first event, without content and a stop reason."""
        events = list(json_objects(body))
        ended = bool(events) and events[-1].get("type") == "message_stop"
        return ended and all(event.get("type") in _OPENING for event in events[:-1])

    def last_usage(self, text: str) -> Object:
        return outer_usage(text, lambda usage: any(isinstance(usage.get(name), int) for name in _COUNTS))


class _MessagesTail(AnswerTail):
    """Keeps the beginning of a stream, too, because only its first event has the size of the prompt."""

    def __init__(self, answers: MessagesAnswers) -> None:
        super().__init__(answers)
        self.provisional = True
        self._head = b""

    def add(self, chunk: bytes) -> None:
        if len(self._head) < HEAD_BYTES:
            self._head += chunk[: HEAD_BYTES - len(self._head)]
        super().add(chunk)

    def read_last(self, text: str) -> Finished:
        end = super().read_last(text)
        usage = self._answers.joined_usage(self._answers.usage_in(self._head), end.usage)
        return finished(end.finish_reason, usage, empty=False)

    def read_reports(self, body: bytes) -> Finished:
        return super().read_reports(body if body[:1] == b"{" else self._head + b"\n" + body)
