"""Check that messages have the structure that OpenAI's API requires: each call is followed by its result."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.compaction.turn import Facts


def faults(messages: Sequence[Facts]) -> int:
    """Count the results without a call in the assistant message before them, and the calls without a result.

    The client may not have answered the calls of the last group yet. They count too, so callers compare the number
    with the number for the input.
    """
    found = left = 0
    open_calls: dict[str | None, int] = {}
    for facts in messages:
        if facts.kind == "result":
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
