"""Add the faults of careless applications to conversations."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

from bench.quality.conversations import Conversation, Message

PLACES = 4
"""Number of places in a conversation that get a fault."""


def _orphan_result(messages: list[Message], at: int) -> None:
    """Insert a result without a call."""
    messages.insert(at, {"role": "tool", "tool_call_id": f"gone_{at}", "content": "a late answer"})


def _dangling_call(messages: list[Message], at: int) -> None:
    """Remove a result, so that its call has none."""
    del messages[_next(messages, at, "tool")]


def _shuffled_results(messages: list[Message], at: int) -> None:
    """Move a result a few messages too far back."""
    late = messages.pop(_next(messages, at, "tool"))
    messages.insert(min(len(messages) - 1, at + 3), late)


def _reused_ids(messages: list[Message], at: int) -> None:
    """Restart the numbers of calls in every message, like some servers. This is valid."""
    for index, message in enumerate(messages):
        calls = message.get("tool_calls", ())
        for number, call in enumerate(calls):
            call["id"] = f"call_{number}"
            if index + 1 + number < len(messages) and messages[index + 1 + number]["role"] == "tool":
                messages[index + 1 + number]["tool_call_id"] = f"call_{number}"


def _empty_answer(messages: list[Message], at: int) -> None:
    """Insert an empty answer of the assistant."""
    messages.insert(_next(messages, at, "assistant"), {"role": "assistant", "content": None})


def _next(messages: list[Message], at: int, role: str) -> int:
    """Return the index of the first message with a role from ``at``, or of the last one in the conversation."""
    found = [i for i, message in enumerate(messages) if message["role"] == role]
    return next((i for i in found if i >= at), found[-1])


KINDS: dict[str, Callable[[list[Message], int], None]] = {
    "orphan results": _orphan_result,
    "dangling calls": _dangling_call,
    "shuffled results": _shuffled_results,
    "reused ids": _reused_ids,
    "empty answers": _empty_answer,
}


def dirtied(conversation: Conversation, kind: str) -> Conversation:
    """Return the conversation with a kind of fault in a few places, and without facts."""
    rng = random.Random(f"{conversation.name} {kind}")
    messages = copy.deepcopy(conversation.messages)
    for at in sorted((rng.randrange(2, len(messages) - 1) for _ in range(PLACES)), reverse=True):
        KINDS[kind](messages, at)
    return Conversation(f"{conversation.name}, {kind}", messages)
