"""Sizes of a conversation's parts as running totals, so that any span is one subtraction."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from proxy.compaction.conditions import Clause, share_of
from proxy.compaction.groups import group_starts
from proxy.compaction.message import HEAD_ROLES, RESULT_ROLES, Turn
from proxy.compaction.rules import SMALLEST_RESULT, USER_FRAME_TOKENS


class Sizes:
    """Running totals over the groups of a body, in tokens.

    Totals have one entry more than there are groups: entry ``g`` covers all groups before ``g``. ``users`` are the
    user's messages as a summary message quotes them, ``newest_user`` is the last of those. ``clips`` says of each tool
    result that is too large for any prompt to how many tokens it is held.
    """

    def __init__(self, body: Sequence[Turn], gains: dict[str, dict[int, int]], group_cap: int | None) -> None:
        """``gains`` says, by stage and message index, how many tokens the stage takes off the message."""
        self.starts = group_starts(body)
        self.ends = [*self.starts[1:], len(body)] if body else []
        self.clips: dict[int, int] = {}
        self.total = [0]
        self.users = [0]
        self.newest_user = [0]
        self.systems = [0]
        self.system_messages = [0]
        self.saved = {name: [0] for name in gains}
        for start, end in zip(self.starts, self.ends, strict=True):
            self._add_group(body, start, end, gains, group_cap)

    def __len__(self) -> int:
        return len(self.starts)

    def boundary(self, keep: Clause, end: int, budget: int | None) -> int:
        """The latest group such that it and all up to group ``end`` (exclusive) are at least ``keep``."""
        if keep.messages is not None:
            wanted_start = self.ends[end - 1] - keep.messages
            return max(0, bisect_right(self.starts, wanted_start, 0, end) - 1)
        wanted = keep.tokens or 0
        if keep.fraction is not None and budget is not None:
            wanted = max(wanted, share_of(keep.fraction, budget))
        return max(0, bisect_right(self.total, self.total[end] - wanted, 0, end) - 1)

    def span(self, start: int, end: int, frontiers: dict[str, int]) -> int:
        """Tokens of the groups from ``start`` to ``end`` with the stages applied up to their frontiers."""
        size = self.total[end] - self.total[start]
        for name, frontier in frontiers.items():
            if frontier > start:
                size -= self.gain(name, start, min(frontier, end))
        return size

    def gain(self, name: str, start: int, end: int) -> int:
        """Tokens that a stage takes off the groups from ``start`` to ``end``."""
        return self.saved[name][end] - self.saved[name][start] if end > start else 0

    def _add_group(
        self,
        body: Sequence[Turn],
        start: int,
        end: int,
        gains: dict[str, dict[int, int]],
        group_cap: int | None,
    ) -> None:
        group = [turn.facts for turn in body[start:end]]
        tokens = sum([facts.tokens for facts in group])
        clipped: dict[int, int] = {}
        if group_cap is not None and tokens > group_cap:
            clipped = clip_results(body, range(start, end), group_cap)
            self.clips.update(clipped)
            tokens = sum(clipped.get(index, body[index].facts.tokens) for index in range(start, end))
        users = systems = messages = 0
        newest = self.newest_user[-1]
        for facts in group:
            if facts.role == "user":
                newest = facts.tokens + USER_FRAME_TOKENS
                users += newest
            elif facts.role in HEAD_ROLES:
                systems += facts.tokens
                messages += 1
        self.total.append(self.total[-1] + tokens)
        self.users.append(self.users[-1] + users)
        self.newest_user.append(newest)
        self.systems.append(self.systems[-1] + systems)
        self.system_messages.append(self.system_messages[-1] + messages)
        for name, by_message in gains.items():
            saved = self.saved[name]
            gain = 0
            if by_message:
                for index in range(start, end):
                    gained = by_message.get(index, 0)
                    # What is held to a size already has less to give.
                    gain += max(0, gained - (body[index].facts.tokens - clipped.get(index, body[index].facts.tokens)))
            saved.append(saved[-1] + gain)


def clip_results(body: Sequence[Turn], span: Sequence[int], cap: int | None) -> dict[int, int]:
    """To how many tokens each tool result of a span must be held for the span to take ``cap`` at most.

    The largest are held first, all to the same size. Results are never held below a small floor, so the span may
    still be larger than the cap.
    """
    if cap is None:
        return {}
    excess = sum(body[i].facts.tokens for i in span) - cap
    if excess <= 0:
        return {}
    results = sorted((i for i in span if body[i].facts.role in RESULT_ROLES), key=lambda i: -body[i].facts.tokens)
    taken = 0
    level = 0
    for count, index in enumerate(results, start=1):
        below = body[results[count]].facts.tokens if count < len(results) else 0
        taken += body[index].facts.tokens
        level = max((taken - excess) // count, SMALLEST_RESULT)
        if level >= below:
            break
    return {i: level for i in results if body[i].facts.tokens > level}
