"""Groups: messages that are kept or removed together, and the structure that an API requires of them.

A group is a user message, a system message inside the conversation, or an assistant message with all results of its
tool calls. A tool message never starts a group, so a cut between groups never separates a result from its call.
"""

from __future__ import annotations

from collections.abc import Sequence

from proxy.compaction.turn import Facts, Turn


def head_length(turns: Sequence[Turn]) -> int:
    """Return the number of ``system`` and ``developer`` messages at the start. The proxy never changes them."""
    for index, turn in enumerate(turns):
        if turn.facts.kind != "system":
            return index
    return len(turns)


def group_starts(body: Sequence[Turn]) -> list[int]:
    """Return the index of the first message of each group, in order. The first index is 0."""
    starts = [i for i, turn in enumerate(body) if turn.facts.kind != "result"]
    if body and (not starts or starts[0] != 0):
        starts.insert(0, 0)
    return starts


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
