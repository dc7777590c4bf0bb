"""Conversations as careless applications send them: each kind of fault put in at a few places."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

from bench.quality.conversations import Conversation, Message

PLACES = 4
"""How often each fault is put into a conversation."""


def _orphan_result(messages: list[Message], at: int) -> None:
    """A result whose call is gone."""
    messages.insert(at, {"role": "tool", "tool_call_id": f"gone_{at}", "content": "a late answer"})


def _dangling_call(messages: list[Message], at: int) -> None:
    """A call without its result."""
    del messages[_next(messages, at, "tool")]


def _shuffled_results(messages: list[Message], at: int) -> None:
    """A result that comes a few messages too late."""
    late = messages.pop(_next(messages, at, "tool"))
    messages.insert(min(len(messages) - 1, at + 3), late)


def _reused_ids(messages: list[Message], at: int) -> None:
    """Calls numbered anew in every message, as some servers do. That alone is valid."""
    for index, message in enumerate(messages):
        calls = message.get("tool_calls", ())
        for number, call in enumerate(calls):
            call["id"] = f"call_{number}"
            if index + 1 + number < len(messages) and messages[index + 1 + number]["role"] == "tool":
                messages[index + 1 + number]["tool_call_id"] = f"call_{number}"


def _empty_answer(messages: list[Message], at: int) -> None:
    """An answer of the assistant with nothing in it."""
    messages.insert(_next(messages, at, "assistant"), {"role": "assistant", "content": None})


def _next(messages: list[Message], at: int, role: str) -> int:
    """The first message of a role from a place on, or else the last one of all."""
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
    """The conversation with a fault of a kind at a few places. Its facts are not judged."""
    rng = random.Random(f"{conversation.name} {kind}")
    messages = copy.deepcopy(conversation.messages)
    for at in sorted((rng.randrange(2, len(messages) - 1) for _ in range(PLACES)), reverse=True):
        KINDS[kind](messages, at)
    return Conversation(f"{conversation.name}, {kind}", messages)
