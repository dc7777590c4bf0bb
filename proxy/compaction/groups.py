"""Groups: messages that are kept or removed together.

A group is a user message, a system message inside the conversation, or an assistant message with all results of its
tool calls. A tool message never starts a group, so a cut between groups never separates a result from its call.
"""

from __future__ import annotations

from collections.abc import Sequence

from proxy.compaction.turn import Turn


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
