"""The messages before a cut that are kept with the summary: pinned exchanges and recent system messages."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.compaction.turn import Turn


class RetainedGroups:
    """The groups that are kept with a summary, for every possible cut.

    ``tokens`` and ``messages`` have one entry per cut: entry ``g`` is for a cut before group ``g``. Each entry depends
    only on the groups before its cut. ``system`` lists the groups of all system messages that aren't pinned.

    Groups with a pinned message are always kept, and so is the newest system message. Older system messages are kept,
    newest first, until all of them reach ``most`` tokens (``None``: no limit). Identical system messages count once,
    at the position of the last one. Each system message counts with at most ``newest`` tokens, because the proxy
    shortens it to that size.
    """

    def __init__(self, most: int | None, newest: int | None) -> None:
        self.tokens = [0]
        self.messages = [0]
        self.system: list[int] = []
        self._most = most
        self._newest = newest
        # The kept system messages, oldest first: group, tokens, and number of messages, by content.
        self._kept: dict[tuple[bytes, ...], tuple[int, int, int]] = {}
        self._taken = 0
        # The groups that are kept from a cut on (true) or no longer kept (false), by cut.
        self._changes: dict[int, list[tuple[int, bool]]] = {}

    def skip(self) -> None:
        """Add the next group, which is neither pinned nor a system message."""
        self.tokens.append(self.tokens[-1])
        self.messages.append(self.messages[-1])

    def add(self, group: int, turns: Sequence[Turn], tokens: int, *, pinned: bool) -> None:
        """Add the next group, which is pinned or a system message. ``tokens`` is its size."""
        self.skip()
        if pinned:
            self._enter(group, tokens, len(turns))
        else:
            self.system.append(group)
            self._add_system(group, turns, tokens)

    def groups(self, cut: int) -> list[int]:
        """Return the groups that are kept with a summary of all groups before a cut, in order."""
        staying: set[int] = set()
        for place, changes in self._changes.items():
            if place > cut:
                break
            for group, enters in changes:
                (staying.add if enters else staying.discard)(group)
        return sorted(staying)

    def totals(self, sizes: Sequence[int]) -> list[int]:
        """Return the total size of the kept groups for every cut. ``sizes`` are the sizes of all groups."""
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
