"""Whether messages are structurally what OpenAI's API takes: every result behind its call, every call answered."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.compaction.message import RESULT_ROLES, Facts


def faults(messages: Sequence[Facts]) -> int:
    """How many results have no call in the assistant message before them, and how many calls no result.

    Calls of the last group may still be unanswered only where the input left them so; they count all the same, so a
    conversation is compared with what it was before.
    """
    found = left = 0
    open_calls: dict[str | None, int] = {}
    for facts in messages:
        if facts.role in RESULT_ROLES:
            waiting = open_calls.get(facts.answers, 0)
            if waiting:
                open_calls[facts.answers] = waiting - 1
                left -= 1
            else:
                found += 1
            continue
        found += left
        left = len(facts.calls)
        open_calls = {}
        for call in facts.calls:
            open_calls[call.id] = open_calls.get(call.id, 0) + 1
    return found + left


def sound(messages: Sequence[Facts]) -> bool:
    """Whether there is surely nothing to put right: quick, and on the side of caution."""
    for facts in messages:
        if facts.calls:
            ids = {call.id for call in facts.calls}
            if facts.role != "assistant" or len(ids) < len(facts.calls) or "" in ids:
                return False
        elif facts.role == "function" or facts.empty:
            return False
    return faults(messages) == 0
