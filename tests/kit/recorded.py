"""A recorded coding session in the formats of the three APIs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SESSION = Path(__file__).parents[3] / "shared" / "data" / "sessions" / "coding-a.json"
"""The recording, if it's at hand. The project doesn't contain it."""

Message = dict[str, Any]


def recorded_messages() -> list[Message]:
    """Return the session as chat messages."""
    messages: list[Message] = json.loads(SESSION.read_text(encoding="utf-8"))["messages"]
    return messages


def as_items(messages: list[Message]) -> Iterator[list[dict[str, Any]]]:
    """Yield the Responses items of each chat message."""
    for message in messages:
        if message["role"] == "tool":
            yield [
                {"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"] or ""}
            ]
            continue
        items: list[dict[str, Any]] = []
        if message.get("content"):
            items.append({"type": "message", "role": message["role"], "content": message["content"]})
        calls = message.get("tool_calls", ())
        items += [{"type": "function_call", "call_id": call["id"], **call["function"]} for call in calls]
        yield items


def as_blocks(messages: list[Message]) -> list[Message]:
    """Return messages with blocks. Results, and a text of the user after them, are one message."""
    result: list[Message] = []
    for message in messages:
        role = "assistant" if message["role"] == "assistant" else "user"
        if message["role"] == "tool":
            text = message["content"] or "(empty)"
            blocks: list[Any] = [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": text}]
        else:
            blocks = [{"type": "text", "text": message["content"]}] if message.get("content") else []
        for call in message.get("tool_calls", ()):
            named = {"id": call["id"], "name": call["function"]["name"]}
            blocks.append({"type": "tool_use", **named, "input": json.loads(call["function"]["arguments"])})
        if result and result[-1]["role"] == role:
            result[-1] = {"role": role, "content": [*result[-1]["content"], *blocks]}
        else:
            result.append({"role": role, "content": blocks})
    return result
