"""The sizes of a conversation: running totals of its parts, the messages kept with a summary, and its size with a cut.

The size of any range is one subtraction.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

from proxy.compaction import keeps
from proxy.compaction.effects import is_plan
from proxy.compaction.format import Format
from proxy.compaction.pressure import SUMMARY_BYTES, BytePressure, Gains, MessagePressure, kept_sizes
from proxy.compaction.rules import Envelope, SectionLimits
from proxy.compaction.settings import Clause, share_of
from proxy.compaction.state import State
from proxy.compaction.turn import Facts, Turn, group_starts


class RetainedGroups:
    """The groups that are kept with a summary, for every possible cut.

    ``tokens`` and ``messages`` have one entry per cut: entry ``g`` is for a cut before group ``g``. Each entry depends
    only on the groups before its cut. ``system`` lists the groups of all system messages that aren't pinned.

    Groups with a pinned message are always kept, and so is the newest system message. Older system messages are kept,
    newest first, until all of them reach ``most`` tokens (``None``: no limit). Identical system messages count once,
    at the position of the last one, and so do those that only count something. Each system message counts with at most
    ``newest`` tokens, because the proxy shortens it to that size.
    """

    def __init__(self, most: int | None, newest: int | None) -> None:
        self.tokens = [0]
        self.messages = [0]
        self.system: list[int] = []
        self._most = most
        self._newest = newest
        # The kept system messages, oldest first: group, tokens, and number of messages, by content.
        self._kept: dict[tuple[bytes | str, ...], tuple[int, int, int]] = {}
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
        content = tuple(turn.facts.said_alike for turn in turns)
        if content in self._kept:
            self._leave(content)
        self._kept[content] = (group, tokens, len(turns))
        self._taken += tokens
        self._enter(group, tokens, len(turns))
        while self._most is not None and self._taken > self._most and len(self._kept) > 1:
            self._leave(next(iter(self._kept)))

    def _leave(self, content: tuple[bytes | str, ...]) -> None:
        group, tokens, messages = self._kept.pop(content)
        self._taken -= tokens
        self._change(group, -tokens, -messages, enters=False)

    def _enter(self, group: int, tokens: int, messages: int) -> None:
        self._change(group, tokens, messages, enters=True)

    def _change(self, group: int, tokens: int, messages: int, *, enters: bool) -> None:
        self.tokens[-1] += tokens
        self.messages[-1] += messages
        self._changes.setdefault(len(self.tokens) - 1, []).append((group, enters))


class Sizes:
    """Running totals over the segments of a body, in tokens.

    A segment is a message with the results behind it. A group has one, unless it goes on after a client's request, such
    as a program that calls the client. Totals have one entry more than there are segments: entry ``s`` covers all
    segments before ``s``.

    - ``segments``: the segment of each message.
    - ``cuts``: the first segment of each group, and the number of segments.
    - ``users``: the user's messages as a summary message quotes them.
    - ``newest_users``: the indexes of those that the assistant works on: the last one, and the task if that one came
      after results. ``newest_user`` are their tokens as quotes; ``newest_media``: the tokens of their media parts.
    - ``newest_user_place``: the segment of the last user message; -1 if there is none.
    - ``retained``: the messages that are kept with a summary: system messages, and groups with a pinned message.
    - ``planned``: whether one of them has a plan.
    - ``clips``: the token limit of each tool result that is too large for any prompt, by index.
    - ``clipped``: the tokens that these limits save.
    - ``eased``: the numbers of segments at which a limit changed a message before the newest segment.
    """

    def __init__(
        self,
        body: Sequence[Turn],
        group_cap: int | None,
        pinned: frozenset[int] = frozenset(),
        retained: RetainedGroups | None = None,
        plan_tools: Collection[str] = (),
        format: Format | None = None,
        *,
        alone: bool = False,
    ) -> None:
        """Take the messages. With ``alone``, each result is a group, because the client left out the calls."""
        self.starts = [i for i, turn in enumerate(body) if alone or turn.facts.kind != "result" or not i]
        self.ends = [*self.starts[1:], len(body)] if body else []
        self.segments = [place for place, start in enumerate(self.starts) for _ in range(start, self.ends[place])]
        self.cuts = [*(self.segments[start] for start in group_starts(body, group_cap, alone=alone)), len(self.starts)]
        self.clips: dict[int, int] = {}
        self.clipped = [0]
        self.eased: set[int] = set()
        self.total = [0]
        self.users = [0]
        self.newest_user = [0]
        self.newest_users: list[tuple[int, ...]] = [()]
        self.newest_media = [0]
        self.newest_user_place = [-1]
        self.planned = [False]
        self.retained = retained or RetainedGroups(None, None)
        self._asks = [*(body[start].facts.kind == "user" for start in self.starts), False]
        self._answers = [body[end - 1].facts.kind == "assistant" for end in self.ends]
        self._pinned = pinned
        self._plan_tools = plan_tools
        self._format = format
        self._shortened = 0
        for first, last in pairwise(self.cuts):
            stays = not self._pinned.isdisjoint(range(self.starts[first], self.ends[last - 1]))
            for segment in range(first, last):
                self._add_segment(body, segment, first, group_cap, pinned=stays)

    def __len__(self) -> int:
        return len(self.starts)

    def boundary(self, keep: Clause, end: int, budget: int | None) -> int:
        """Return the latest cut such that the segments from it up to ``end`` (exclusive) satisfy ``keep``."""
        if keep.messages is not None:
            before, most = self.starts, self.ends[end - 1] - keep.messages
        else:
            wanted = keep.tokens or 0
            if keep.fraction is not None and budget is not None:
                wanted = max(wanted, share_of(keep.fraction, budget))
            before, most = self.total, self.total[end] - wanted
        place = bisect_right(self.cuts, most, 0, bisect_left(self.cuts, end), key=before.__getitem__)
        return self.cuts[max(0, place - 1)]

    def newest(self, end: int) -> int:
        """Return the first segment of the group of the last segment before ``end``."""
        return self.cuts[bisect_left(self.cuts, end) - 1]

    def next(self, cut: int) -> int:
        """Return the next cut."""
        return self.cuts[bisect_right(self.cuts, cut)]

    def carried(self, cut: int) -> tuple[int, ...]:
        """Return the user messages before a cut that are kept because later messages work on them."""
        return () if self._asks[cut] else self.newest_users[cut]

    def goes_on(self, end: int) -> bool:
        """Return whether the assistant's answer follows the segments before ``end``, so that a cut may be there."""
        return not self._answers[end - 1] and not self._asks[end] and self.newest(end + 1) == end

    def turn(self, segment: int) -> int:
        """Return the tokens of a segment, and of the answer before it if the user wrote it."""
        return self.total[segment + 1] - self.total[segment - 1 if segment and self._asks[segment] else segment]

    def _add_segment(self, body: Sequence[Turn], segment: int, cut: int, most: int | None, *, pinned: bool) -> None:
        """Add a segment of the group that starts at a cut and may have ``most`` tokens."""
        start, end = self.starts[segment], self.ends[segment]
        tokens, saved = sum([turn.facts.tokens for turn in body[start:end]]), 0
        if most is not None and (excess := self.total[-1] + tokens - self.total[cut] - most) > 0:
            saved = self._shorten(body, segment, cut, excess, int(most * (1 - keeps.ROOM_TO_GROW)))
            tokens -= saved
        self.clipped.append(self.clipped[-1] + saved)
        users = 0
        newest = self.newest_users[-1]
        first = body[start].facts
        if pinned or (first.kind == "system" and not first.rare.effects):
            self.retained.add(segment, body[start:end], tokens, pinned=pinned)
        else:
            self.retained.skip()
        if first.kind == "user" and not pinned:
            users = _quoted_tokens(first)
            # Right after results, the assistant still works on an older message of the user.
            kinds = (body[index].facts.kind for index in range(start - 1, -1, -1))
            beside = next(filter(None, kinds), "") == "result"
            self._asks[segment] = not beside
            if not first.rare.foreign:
                # Media of the task that no prompt has room for would rule out every cut. The summary quotes its text.
                task = [i for i in newest[:1] if beside and (most is None or body[i].facts.apart <= most)]
                newest = (*task, start)
        self.total.append(self.total[-1] + tokens)
        self.users.append(self.users[-1] + users)
        self.newest_users.append(newest)
        self.newest_user.append(sum([_quoted_tokens(body[index].facts) for index in newest]))
        self.newest_media.append(sum([body[index].facts.apart for index in newest]))
        self.newest_user_place.append(segment if first.kind == "user" else self.newest_user_place[-1])
        self.planned.append(self.planned[-1] or is_plan(first, self._plan_tools))

    def _shorten(self, body: Sequence[Turn], segment: int, cut: int, excess: int, room: int) -> int:
        """Shorten results of a group that is too large, and return the tokens that this saves.

        In a group that has grown, the oldest results come first, and the group gets ``room`` to grow again.
        """
        saved = 0
        for index in range(max(self._shortened, self.starts[cut]), self.starts[segment]):
            self._shortened = index + 1  # each message is read once
            facts, shortest = body[index].facts, keeps.SMALLEST_RESULT + body[index].facts.apart
            if facts.kind != "result":  # results of the provider's tools
                if self._format is None or facts.kind != "assistant" or not facts.rare.links.refers or facts.calls:
                    continue
                shortest += self._format.frame_tokens(body[index].raw, facts)
            gain = self.clips.get(index, facts.tokens) - shortest
            if index in self._pinned or gain <= 0:
                continue
            self.clips[index] = shortest
            self.eased.add(segment + 1)
            saved += gain
            if saved >= excess + room:
                return saved
        span = [index for index in range(self.starts[segment], self.ends[segment]) if index not in self._pinned]
        clipped = clip_results(body, span, sum(body[i].facts.tokens for i in span) - excess + saved)
        self.clips.update(clipped)
        return saved + sum(body[index].facts.tokens - held for index, held in clipped.items())


def clip_results(body: Sequence[Turn], span: Sequence[int], cap: int | None) -> dict[int, int]:
    """Return the token limit of each tool result, so that a span of messages has at most ``cap`` tokens.

    The results with the largest texts are limited first. All get the same limit, not counting their media. The limit
    is never below ``keeps.SMALLEST_RESULT``, so the span may still exceed ``cap``.
    """
    if cap is None:
        return {}
    excess = sum(body[i].facts.tokens for i in span) - cap
    if excess <= 0:
        return {}
    results = sorted((i for i in span if body[i].facts.kind == "result"), key=lambda i: -body[i].facts.text_tokens)
    taken = 0
    level = 0
    for count, index in enumerate(results, start=1):
        below = body[results[count]].facts.text_tokens if count < len(results) else 0
        taken += body[index].facts.text_tokens
        level = max((taken - excess) // count, keeps.SMALLEST_RESULT)
        if level >= below:
            break
    return {i: level + body[i].facts.apart for i in results if body[i].facts.text_tokens > level}


def _quoted_tokens(facts: Facts) -> int:
    """Return the tokens of a user's message as a summary message quotes it."""
    return facts.text_tokens + keeps.USER_FRAME_TOKENS + (keeps.LABEL_TOKENS if facts.media else 0)


class Projection:
    """Compute sizes for any cut and any number of groups. Positions are group indexes.

    ``level`` is the size in tokens at which the summary's trigger fires; ``None`` if no size makes it fire. ``room`` is
    the tokens of the budget that head and tools leave if they use more than a third of it; else 0.
    """

    def __init__(
        self,
        envelope: Envelope,
        limits: SectionLimits,
        sizes: Sizes,
        gains: Mapping[str, Gains],
        level: int | None,
        state: State | None = None,
    ) -> None:
        self._state = state or State()
        self._envelope = envelope
        self._limits = limits
        self._sizes = sizes
        self._gains = gains
        self._level = level
        budget, overhead = envelope.budget, envelope.overhead
        large_head = budget is not None and overhead > budget // keeps.LARGE_HEAD_DIVISOR
        self.room = max(0, (budget or 0) - overhead) if large_head else 0

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
        if not cut:
            return 0
        live = self._state.at(cut)
        kept = self._sizes.retained.messages[cut] + len(self._sizes.carried(cut))
        return 1 + kept + len(live.units) + bool(live.unloaded)

    def leaves_room(self, after: int, cut: int) -> bool:
        """Return whether a size in tokens leaves room to grow before the summary's trigger fires.

        If the parts that are always kept are already near the trigger, half of the room they leave is enough.
        """
        level = self._level
        if level is None:
            return True
        firm = self._envelope.overhead + self._carried_tokens(cut)[1]
        return after <= max(int(level * keeps.ROOM_TO_GROW), (level + firm) // 2)

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

        def replacement(cut: int) -> int:
            if cut == 0:
                return 0
            user_message = sum([kept[index] for index in sizes.carried(cut)])
            return SUMMARY_BYTES * self._summary_tokens(cut) + retained[cut] + user_message + self._state.at(cut).bytes

        return BytePressure(most, self._envelope.overhead_bytes, groups, kept, lighter, replacement)

    def _replacement(self, cut: int) -> int:
        """Return the tokens that replace the groups before a cut.

        The summary doesn't count with its actual length, so that this doesn't move later checkpoints.
        """
        if cut == 0:
            return 0
        most = self._limits.newest * 3 // 2 if len(self._sizes.carried(cut)) > 1 else self._limits.newest
        quoted, media = self._carried_tokens(cut)
        newest = min(quoted, most) + media
        return self._summary_tokens(cut) + newest + self._sizes.retained.tokens[cut] + self._state.at(cut).tokens

    def _summary_tokens(self, cut: int) -> int:
        """Return the most tokens that the summary message may have.

        If head and tools use more than a third of the budget, its written parts count half, which is usual. The rest
        of the budget beyond the trigger is enough for the other half.
        """
        sizes = self._sizes
        limits = self._limits.for_span(sizes.total[cut])
        users = min(sizes.users[cut] - self._carried_tokens(cut)[0], limits.users)
        plan = limits.plan if sizes.planned[cut] else 0
        written = limits.summary + limits.words + limits.index + plan
        return keeps.SUMMARY_FRAME_TOKENS + (written // 2 if self.room else written) + users

    def _carried_tokens(self, cut: int) -> tuple[int, int]:
        """Return the tokens of the user messages that are kept for later ones: as quotes, and those of their media."""
        sizes = self._sizes
        return (sizes.newest_user[cut], sizes.newest_media[cut]) if sizes.carried(cut) else (0, 0)
