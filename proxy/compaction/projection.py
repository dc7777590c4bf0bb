"""The size that a conversation has with a given cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from proxy.compaction.gains import Gains
from proxy.compaction.pressure import SUMMARY_BYTES, BytePressure, MessagePressure, kept_sizes
from proxy.compaction.rules import ROOM_TO_GROW, SUMMARY_FRAME_TOKENS, Envelope, SectionLimits
from proxy.compaction.sizes import Sizes
from proxy.compaction.turn import Turn


class Projection:
    """Compute sizes for any cut and any number of groups. Positions are group indexes.

    ``level`` is the size in tokens at which the summary's trigger fires; ``None`` if no size makes it fire.
    """

    def __init__(
        self, envelope: Envelope, limits: SectionLimits, sizes: Sizes, gains: Mapping[str, Gains], level: int | None
    ) -> None:
        self._envelope = envelope
        self._limits = limits
        self._sizes = sizes
        self._gains = gains
        self._level = level

    def size(self, cut: int, end: int) -> int:
        """Return the tokens of a request with ``end`` groups that is cut before the group ``cut``."""
        total = self._sizes.total
        saved = sum([gains.applied(cut) for gains in self._gains.values()])
        return self._envelope.overhead + self._replacement(cut) - saved + total[end] - total[cut]

    def messages(self, cut: int, end: int) -> int:
        """Return the number of messages of such a request, including the head."""
        kept = self._sizes.ends[end - 1] - (self._sizes.starts[cut] if cut else 0)
        return self._envelope.head_messages + self.replacement_messages(cut) + kept

    def replacement_messages(self, cut: int) -> int:
        """Return the number of messages that replace the groups before a cut, including the summary."""
        return 1 + self._sizes.retained.messages[cut] + self._sizes.keeps_user_message(cut) if cut else 0

    def leaves_room(self, after: int, cut: int) -> bool:
        """Return whether a size in tokens leaves room to grow before the summary's trigger fires.

        If the parts that are always kept are already near the trigger, half of the room they leave is enough.
        """
        level = self._level
        if level is None:
            return True
        firm = self._envelope.overhead + self._user_message_media(cut)
        return after <= max(int(level * ROOM_TO_GROW), (level + firm) // 2)

    def message_pressure(self, most: int) -> MessagePressure:
        """Return the pressure of a limit on the number of messages."""
        return MessagePressure(most, self._envelope.head_messages, self._sizes.ends, self.replacement_messages)

    def byte_pressure(
        self, most: int, body: Sequence[Turn], pinned: frozenset[int], lighter: Mapping[str, Sequence[int]]
    ) -> BytePressure:
        """Return the pressure of a limit on bytes. ``lighter`` lists the bytes that each stage saves, by group."""
        sizes = self._sizes
        kept = kept_sizes(body, sizes.clips)
        groups = list(zip(sizes.starts, sizes.ends, strict=True))
        retained = sizes.retained.totals([sum(kept[start:end]) for start, end in groups])
        newest = [0]
        for start, end in groups:
            first = body[start].facts
            own = first.kind == "user" and not first.foreign and pinned.isdisjoint(range(start, end))
            newest.append(kept[start] if own else newest[-1])

        def replacement(cut: int) -> int:
            if cut == 0:
                return 0
            user_message = newest[cut] if sizes.keeps_user_message(cut) else 0
            return SUMMARY_BYTES * self._summary_tokens(cut) + retained[cut] + user_message

        return BytePressure(most, self._envelope.overhead_bytes, groups, kept, lighter, replacement)

    def _replacement(self, cut: int) -> int:
        """Return the tokens that replace the groups before a cut.

        The summary counts with its limit, so that its actual length doesn't move later checkpoints.
        """
        if cut == 0:
            return 0
        newest = min(self._user_message_tokens(cut), self._limits.newest) + self._user_message_media(cut)
        return self._summary_tokens(cut) + newest + self._sizes.retained.tokens[cut]

    def _summary_tokens(self, cut: int) -> int:
        """Return the most tokens that the summary message may have."""
        sizes = self._sizes
        limits = self._limits.for_span(sizes.total[cut])
        users = min(sizes.users[cut] - self._user_message_tokens(cut), limits.users)
        return SUMMARY_FRAME_TOKENS + limits.summary + limits.words + limits.index + users

    def _user_message_tokens(self, cut: int) -> int:
        return self._sizes.newest_user[cut] if self._sizes.keeps_user_message(cut) else 0

    def _user_message_media(self, cut: int) -> int:
        return self._sizes.newest_media[cut] if self._sizes.keeps_user_message(cut) else 0
