"""Convert recorded sessions of Codex to chat messages, and cut them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from bench.quality.conversations import Message
from bench.quality.need.case import Case, occurring, tokens
from bench.quality.text import values
from proxy.dialects.chat.units import arguments_of

CUT = 100_000
"""Tokens of a history. Shorter sessions are cut at half of their calls, and their windows shrink in proportion."""
LEAST = 20_000
"""Tokens of the shortest history."""
NEXT_CALLS = 40

# A path has a folder, and its last part has an extension.
_PATH = re.compile(r"(?:[\w.@-]*/)+[\w.@-]+\.[A-Za-z]\w{0,7}\b")
_IDENTIFIERS = (
    re.compile(r"[a-z]+[A-Z]\w{4,}"),
    re.compile(r"[A-Z][a-z]+[A-Z]\w{3,}"),
    re.compile(r"[a-z0-9]+_[a-z0-9_]{4,}"),
    re.compile(r"[0-9a-f]{7,40}"),
)
_CALLS = ("function_call", "custom_tool_call")
_OUTPUTS = tuple(f"{kind}_output" for kind in _CALLS)
_NO_RESULT = "No result was recorded."


def session(lines: Iterable[str]) -> tuple[str, list[Message]]:
    """Return the id and the messages of a recording, or an empty id if another tool wrote it.

    Reasoning and images are omitted, as are calls that the provider ran itself.
    """
    id_ = ""
    items: list[dict[str, Any]] = []
    for line in filter(str.strip, lines):
        entry = json.loads(line)
        payload = entry.get("payload")
        if entry.get("type") == "session_meta":
            id_ = id_ or str(payload.get("id") or payload.get("session_id"))
        elif entry.get("type") == "response_item":
            items.append(payload)
    return (id_, _messages(items)) if id_ else ("", [])


def _messages(items: Sequence[dict[str, Any]]) -> list[Message]:
    """Return the messages. Calls that follow each other are in one message, and their results follow it."""
    results = {item["call_id"]: _text(item["output"]) for item in items if item["type"] in _OUTPUTS}
    found: list[Message] = []
    for item in items:
        if item["type"] == "message" and (said := _text(item["content"])):
            found.append({"role": item["role"], "content": said})
        elif item["type"] in _CALLS:
            arguments = item["arguments"] if "arguments" in item else json.dumps({"input": item["input"]})
            function = {"name": item["name"], "arguments": arguments}
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "content": None})
            found[-1].setdefault("tool_calls", []).append(
                {"id": item["call_id"], "type": "function", "function": function}
            )
        elif item["type"] in _OUTPUTS:
            found.append({"role": "tool", "tool_call_id": item["call_id"]})
    return list(_with_results(found, results))


def _with_results(messages: Iterable[Message], results: dict[str, str]) -> Iterable[Message]:
    """Put the results right after their calls. Recordings may have a user's message between them, or no result."""
    for message in messages:
        if message["role"] != "tool":
            yield message
        for call in message.get("tool_calls", ()):
            yield {"role": "tool", "tool_call_id": call["id"], "content": results.get(call["id"], _NO_RESULT)}


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if isinstance(part.get("text"), str))


def case(id_: str, messages: Sequence[Message]) -> Case | None:
    """Cut a session. Return ``None`` if its history would be too short, or if the next calls use no name of it."""
    cut = _cut(messages)
    history = list(messages[:cut])
    scale = min(1.0, tokens(history) / CUT)
    if scale < LEAST / CUT:
        return None
    calls = [arguments for message in messages[cut:] for _, arguments in arguments_of(message)][:NEXT_CALLS]
    used = "\n".join(value for arguments in calls for _, value in values(arguments))
    paths = occurring((path.rsplit("/", 1)[-1] for path in _PATH.findall(used)), history)
    idents = occurring((name for expression in _IDENTIFIERS for name in expression.findall(used)), history)
    return Case(id_, history, paths, idents, scale) if paths or idents else None


def _cut(messages: Sequence[Message]) -> int:
    """Return the number of messages in the history. All its calls have results."""
    calls = [len(arguments_of(message)) for message in messages]
    size, half = 0, 0
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            if size >= CUT and sum(calls[index:]) >= NEXT_CALLS:
                return index
            half = half or (index if sum(calls[:index]) >= sum(calls) / 2 else 0)
        size += tokens([message])
    return half
