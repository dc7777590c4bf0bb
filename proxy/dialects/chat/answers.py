"""Read chat completions: their first bytes and events, their usage, and their finish reason."""

from __future__ import annotations

import re
from typing import Any

from msgspec.structs import replace

from proxy.dialects.answers import NO_ROOM, Answers, Object, Verdict, all_but, json_objects
from proxy.overflow.silent import Finished

_NAMES = ("role", "name")
_TIER = re.compile(r'"service_tier"\s*:\s*"([a-z_]{1,32})"')


class ChatAnswers(Answers):
    """See ``dialects.answers.Answers``."""

    USUAL = frozenset({None, "stop", "tool_calls", "length", "function_call"})
    REASON = re.compile(r'"finish_reason"\s*:\s*"([^"\\]{1,64})"')
    TEXTS = all_but("data")  # of audio, which has a transcript

    def judge(self, event: Any) -> Verdict | None:
        """A chunk that only has the role, and a finish reason for a full window, say nothing."""
        choices = event.get("choices") if isinstance(event, dict) else None
        if not isinstance(choices, list) or any(_choice_has_content(choice) for choice in choices):
            return "content"
        return None

    def reason(self, event: Object) -> str | None:
        """Return the finish reason of the last choice, or the stop reason that some gateways send."""
        delta = event.get("delta")
        reason = event.get("stop_reason") or (delta.get("stop_reason") if isinstance(delta, dict) else None)
        for choice in _choices(event):
            reason = choice.get("finish_reason") or reason
        return reason if isinstance(reason, str) else None

    def has_content(self, event: Object) -> bool:
        if event.get("content"):
            return True
        for choice in _choices(event):
            message = choice.get("message") or choice.get("delta")
            said = [message[name] for name in message if name not in _NAMES] if isinstance(message, dict) else []
            if choice.get("text") or any(said):
                return True
        return False

    def tier(self, event: Object) -> object:
        return event.get("service_tier")

    def stated_usage(self, part: Object) -> object:
        """Return the usage. Groq states it in a field of its own, and Moonshot in a choice."""
        places = part, part.get("x_groq"), *_choices(part)
        return next((one["usage"] for one in places if isinstance(one, dict) and one.get("usage")), None)

    def searches(self, event: Object) -> int:
        """Return 1 if a message cites web pages. That's the only sign of a search in chat completions."""
        messages = [choice.get("message") or choice.get("delta") for choice in _choices(event)]
        found = [one["annotations"] for one in messages if isinstance(one, dict) and "annotations" in one]
        return int(any(map(_cites, found)))

    def read_usage(self, body: bytes) -> Finished:
        end = super().read_usage(body)
        # 0 tokens are a placeholder, not a count.
        return end if end.prompt else replace(end, prompt=None)

    def read_end(self, text: str) -> Finished:
        tiers = _TIER.findall(text)
        searches = int('"url_citation"' in text)
        return replace(super().read_end(text), tier=tiers[-1] if tiers else None, searches=searches)

    def gives_up(self, body: bytes) -> bool:
        """Return whether a stream has one event with only the role: no finish reason or usage, then ``[DONE]``."""
        data = [line[5:].strip() for line in body.splitlines() if line.startswith(b"data:") and line[5:].strip()]
        if len(data) != 2 or data[1] != b"[DONE]":
            return False
        event = next(json_objects(body), {})
        choices = _choices(event)
        named = any(isinstance(delta := choice.get("delta"), dict) and "role" in delta for choice in choices)
        return named and not event.get("usage") and not any(choice.get("finish_reason") for choice in choices)


def _choices(event: Object) -> list[Object]:
    choices = event.get("choices")
    return [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []


def _cites(annotations: object) -> bool:
    notes = annotations if isinstance(annotations, list) else ()
    return any(isinstance(note, dict) and note.get("type") == "url_citation" for note in notes)


def _choice_has_content(choice: Any) -> bool:
    if not isinstance(choice, dict):
        return True
    delta = choice.get("delta")
    if choice.get("finish_reason") not in (None, "", "error", *NO_ROOM):
        return True
    return not isinstance(delta, dict) or any(value for name, value in delta.items() if name != "role")


def without_usage(events: bytes) -> bytes:
    """Return whole events of a stream without the usage that only the proxy asked for.

    A provider sends it in an event of its own without choices, and ``null`` in all others. Some servers report it in an
    event with choices, which stays.
    """
    if b'"usage"' not in events:
        return events
    out = bytearray()
    for event in _EVENT.findall(events):
        value = next(json_objects(event), None) if _REPORT.search(event) else None
        if value is None or value.get("choices") or not value.get("usage"):
            out += _NULL.sub(b"", event)
    return bytes(out)


_EVENT = re.compile(rb".*?(?:\r\n\r\n|\n\n|\r\r|\Z)", re.S)
_REPORT = re.compile(rb'"usage"\s*:\s*\{')
# Strings escape quotation marks, so this is a field.
_NULL = re.compile(rb',\s?"usage"\s?:\s?null')
