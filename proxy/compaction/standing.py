"""The messages before a cut that stay beside the summary: pinned exchanges, and system messages within a budget."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.compaction.message import Turn


class Standing:
    """Which groups stay beside a summary, for every possible cut.

    ``tokens`` and ``messages`` have one entry per cut: entry ``g`` is for a cut before group ``g``. Groups with a
    pinned message always stay. Of the system messages, the newest one stays; then older ones stay, newest first, while
    all of them together take ``most`` tokens at most (``None``: no limit). Identical ones count once, as the last of
    them. The newest one counts with ``newest`` tokens at most, because it is shortened to that size. ``system`` lists
    the groups of all system messages that aren't pinned.

    Each entry depends on the groups before its cut alone.
    """

    def __init__(self, most: int | None, newest: int | None) -> None:
        self.tokens = [0]
        self.messages = [0]
        self.system: list[int] = []
        self._most = most
        self._newest = newest
        # System messages that stay, the oldest first: by content, the group and its tokens.
        self._kept: dict[tuple[bytes, ...], tuple[int, int, int]] = {}
        self._taken = 0
        # By cut, the groups that begin to stay there (true) or stop.
        self._changes: dict[int, list[tuple[int, bool]]] = {}

    def skip(self) -> None:
        """Add the next group, which is neither pinned nor a system message."""
        self.tokens.append(self.tokens[-1])
        self.messages.append(self.messages[-1])

    def add(self, group: int, turns: Sequence[Turn], tokens: int, *, pinned: bool) -> None:
        """Add the next group, of so many tokens: a pinned one, or a system message."""
        self.skip()
        if pinned:
            self._enter(group, tokens, len(turns))
        else:
            self.system.append(group)
            self._add_system(group, turns, tokens)

    def groups(self, cut: int) -> list[int]:
        """Return the groups that stay beside a summary of all groups before a cut, in order."""
        staying: set[int] = set()
        for place, changes in self._changes.items():
            if place > cut:
                break
            for group, enters in changes:
                (staying.add if enters else staying.discard)(group)
        return sorted(staying)

    def totals(self, sizes: Sequence[int]) -> list[int]:
        """Return, for every cut, what the groups that stay take together, given the size of each group."""
        totals = [0]
        for cut in range(1, len(self.tokens)):
            changes = self._changes.get(cut, ())
            totals.append(totals[-1] + sum(sizes[group] if enters else -sizes[group] for group, enters in changes))
        return totals

    def _add_system(self, group: int, turns: Sequence[Turn], tokens: int) -> None:
        first = turns[0].facts
        if self._newest is not None:
            tokens -= max(0, first.text_tokens - self._newest)
        content = tuple(turn.facts.digest for turn in turns)
        if content in self._kept:
            self._leave(content)
        self._kept[content] = (group, tokens, len(turns))
        self._taken += tokens
        self._enter(group, tokens, len(turns))
        while self._most is not None and self._taken > self._most and len(self._kept) > 1:
            self._leave(next(iter(self._kept)))

    def _leave(self, content: tuple[bytes, ...]) -> None:
        group, tokens, messages = self._kept.pop(content)
        self._taken -= tokens
        self._change(group, -tokens, -messages, enters=False)

    def _enter(self, group: int, tokens: int, messages: int) -> None:
        self._change(group, tokens, messages, enters=True)

    def _change(self, group: int, tokens: int, messages: int, *, enters: bool) -> None:
        self.tokens[-1] += tokens
        self.messages[-1] += messages
        self._changes.setdefault(len(self.tokens) - 1, []).append((group, enters))
