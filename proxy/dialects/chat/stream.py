"""Decide the kind of the first chunks of a stream of chat completions."""

from __future__ import annotations

from typing import Any

from proxy.dialects import stream
from proxy.dialects.stream import NO_ROOM, Said


class Start(stream.Start):
    """Judges the first events of a stream as they arrive."""

    def __init__(self) -> None:
        super().__init__(_judged)


def beginning(events: bytes) -> Said | None:
    """Return the kind of the first whole event that has one; ``None`` if there is none yet.

    Comments, a chunk that only has the role, and a finish reason for a full window don't decide the kind.
    """
    return stream.beginning(events, _judged)


def _judged(value: Any) -> Said | None:
    choices = value.get("choices") if isinstance(value, dict) else None
    if not isinstance(choices, list) or any(_choice_has_content(choice) for choice in choices):
        return "content"
    return None


def _choice_has_content(choice: Any) -> bool:
    if not isinstance(choice, dict):
        return True
    delta = choice.get("delta")
    if choice.get("finish_reason") not in (None, "", "error", *NO_ROOM):
        return True
    return not isinstance(delta, dict) or any(value for name, value in delta.items() if name != "role")
