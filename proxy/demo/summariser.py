"""The stand-in's summary model, which extracts the lines of a transcript that contain facts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from proxy.demo.counting import text_tokens
from proxy.demo.replies import Reply

# The line before the conversation in the proxy's summary requests.
TRANSCRIPT = "<transcript>"

# The first line of the message that asks the conversation's own model for notes.
NOTES = "<write_notes>"

MAX_TOKENS = 400
LINE_CHARACTERS = 240

# Patterns of facts, most important first.
FACTS = (
    re.compile(r"\b[A-Z]{2,}-\d+\b"),  # tickets
    re.compile(r"https?://\S+"),
    re.compile(r"\b(?:port|version|id|key|branch|commit)\b[\s:=]+\S*\d", re.IGNORECASE),
    re.compile(r"(?:^|[\s\"'`(=])\.{0,2}/?(?:[\w.-]+/)+[\w-]+\.\w+"),  # files
)


def is_summary_request(body: Mapping[str, Any]) -> bool:
    """Return whether a request is the proxy's summary request.

    Such a request isn't streamed. Its last message, from the user, has the line ``<transcript>`` and no tools, or
    the line ``<write_notes>``.
    """
    if body.get("stream"):
        return False
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not isinstance(messages[-1], dict):
        return False
    last = messages[-1]
    lines = _text(last).splitlines()
    return last.get("role") == "user" and (NOTES in lines or (TRANSCRIPT in lines and not body.get("tools")))


def summarise(body: Mapping[str, Any]) -> Reply:
    """Return an extract of up to ``MAX_TOKENS`` tokens from the transcript of a summary request.

    It consists of lines with facts, in transcript order, with the most important kinds chosen first. If no line has a
    fact, it consists of the first lines.
    """
    *before, last = body["messages"]
    continued = NOTES in _text(last).splitlines()
    transcript = "\n".join(map(_text, before)) if continued else _text(last).split(TRANSCRIPT, 1)[1]
    # Messages in a transcript may be JSON with escaped line breaks.
    lines = list(dict.fromkeys(line.strip() for line in re.split(r"\n|\\n", transcript) if line.strip()))
    excerpts = _excerpts(lines) or {place: line[:LINE_CHARACTERS] for place, line in enumerate(lines)}
    room = MAX_TOKENS
    kept: dict[int, str] = {}
    for place, excerpt in excerpts.items():
        size = text_tokens(excerpt) + 1
        if size <= room:
            kept[place] = excerpt
            room -= size
    text = "\n".join(kept[place] for place in sorted(kept))
    return Reply(content=f"<notes>\n{text}\n</notes>" if continued else text)


def _excerpts(lines: list[str]) -> dict[int, str]:
    """Return excerpts of the lines with facts by line number, most important kinds first."""
    found: dict[int, str] = {}
    for pattern in FACTS:
        for place, line in enumerate(lines):
            match = pattern.search(line)
            if match:
                start = max(0, match.start() - LINE_CHARACTERS // 2)
                found.setdefault(place, line[start : start + LINE_CHARACTERS])
    return found


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(part["text"] for part in parts if isinstance(part, dict) and part.get("type") == "text")
