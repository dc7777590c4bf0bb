"""Where a conversation is compacted: one pass over it, as if the proxy had watched it grow.

The outcome is a pure function of the prefix: a frontier moves only when a stage's trigger is reached, never back and
never between two checkpoints. Whoever sends the whole history at once gets the checkpoints that turn-by-turn
growth would have made, and between two checkpoints each outgoing request is a strict prefix of the next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from proxy.compaction.conditions import Clause, Trigger, any_met, lowest_level, share_of
from proxy.compaction.message import MessageCounter, Turn
from proxy.compaction.rules import ROOM_TO_GROW, SUMMARY_FRAME_TOKENS, Caps, Frame, Rules, caps
from proxy.compaction.sizes import Sizes
from proxy.compaction.stages import Stage, cheap_stages


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done to a body. Positions are message indexes into it.

    ``checkpoints`` are all places up to which the conversation was summarised on the way, the last one being in
    force; ``frontiers`` says how far each cheap stage is applied; ``clips`` to how many tokens a result is held;
    ``upcoming`` is the next checkpoint, known ahead of its trigger. ``replaced`` says of each checkpoint, the upcoming
    one too, how many tokens stand before it.
    """

    caps: Caps
    checkpoints: tuple[int, ...] = ()
    frontiers: dict[str, int] = field(default_factory=dict)
    clips: dict[int, int] = field(default_factory=dict)
    upcoming: int | None = None
    replaced: dict[int, int] = field(default_factory=dict)

    def caps_at(self, position: int) -> Caps:
        """The caps of the summary that stands for all before a checkpoint."""
        return self.caps.for_span(self.replaced[position])

    @property
    def cut(self) -> int:
        """The messages before this one are replaced by a summary; 0 where there is none."""
        return self.checkpoints[-1] if self.checkpoints else 0

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.checkpoints or self.clips or any(self.frontiers.values()))


def scan(body: Sequence[Turn], rules: Rules, frame: Frame, count: MessageCounter) -> Plan:
    """The plan for a body under a policy. ``frame`` is rounded here."""
    frame = frame.rounded()
    stages = cheap_stages(rules, body)
    gains = {stage.name: _gains(stage, body, count) for stage in stages}
    limits = caps(rules, frame)
    sizes = Sizes(body, gains, limits.group)
    walk = _Walk(rules, frame, limits, stages, sizes)
    for end in range(1, len(sizes) + 1):
        walk.arrive(end)
    return walk.plan()


def _gains(stage: Stage, body: Sequence[Turn], count: MessageCounter) -> dict[int, int]:
    gains = {}
    for index, turn in enumerate(body):
        form = stage.reduce(body, index, count)
        if form is not None:
            gains[index] = turn.facts.tokens - form.tokens
    return gains


class _Walk:
    """The state of the pass. Positions in here are group indexes."""

    def __init__(self, rules: Rules, frame: Frame, limits: Caps, stages: list[Stage], sizes: Sizes) -> None:
        self._rules = rules
        self._frame = frame
        self._caps = limits
        self._stages = stages
        self._sizes = sizes
        self._frontiers = {stage.name: 0 for stage in stages}
        self._cut = 0
        self._checkpoints: list[int] = []
        self._pending: int | None = None
        triggers = [rules.trigger, rules.prepare, *(stage.trigger for stage in stages)]
        # Most groups arrive while nothing can fire; they are passed over without asking each trigger.
        self._quiet = min((c.least_tokens(frame.budget) for trigger in triggers for c in trigger), default=math.inf)
        level = lowest_level(rules.trigger, frame.budget)
        # Where fixed parts alone are near the trigger, half of what is left is all the room that can be asked for.
        self._target = None if level is None else max(int(level * ROOM_TO_GROW), (level + frame.overhead) // 2)

    def arrive(self, end: int) -> None:
        """One more group is there: ``end`` groups in all."""
        size = self._size(self._cut, end, self._frontiers)
        if size < self._quiet:
            return
        moves, after = self._cheap_moves(end, size)
        worth = size - after >= self._rules.least_gain * size
        if worth and self._enough(after):
            self._apply(moves)
        elif self._fires(self._rules.trigger, size, end):
            if not self._summarise(end, size) and worth:
                self._apply(moves)
        elif worth and self._own_trigger(moves):
            self._apply(moves)
        elif self._pending is None and self._fires(self._rules.prepare, size, end):
            self._prepare(end, size)

    def plan(self) -> Plan:
        """The plan once all groups have arrived."""
        sizes = self._sizes
        starts = [*sizes.starts, sizes.ends[-1] if len(sizes) else 0]
        first = starts[self._cut]
        return Plan(
            caps=self._caps,
            checkpoints=tuple(starts[g] for g in self._checkpoints),
            frontiers={name: starts[g] for name, g in self._frontiers.items() if g > self._cut},
            clips={i: tokens for i, tokens in sizes.clips.items() if i >= first},
            upcoming=None if self._pending is None else starts[self._pending],
            replaced={starts[g]: sizes.total[g] for g in (*self._checkpoints, self._pending) if g is not None},
        )

    def _size(self, cut: int, end: int, frontiers: dict[str, int]) -> int:
        return self._frame.overhead + self._replacement(cut) + self._sizes.span(cut, end, frontiers)

    def _replacement(self, cut: int) -> int:
        """What stands for the groups before a cut. The summary counts with its cap: its length shifts nothing."""
        if cut == 0:
            return 0
        newest = self._sizes.newest_user[cut]
        users = min(self._sizes.users[cut] - newest, self._caps.users) + min(newest, self._caps.newest)
        limits = self._caps.for_span(self._sizes.total[cut])
        return SUMMARY_FRAME_TOKENS + limits.summary + limits.index + users + self._sizes.systems[cut]

    def _messages(self, end: int) -> int:
        kept = self._sizes.ends[end - 1] - (self._sizes.starts[self._cut] if self._cut else 0)
        standing = 1 + self._sizes.system_messages[self._cut] if self._cut else 0
        return self._frame.head_messages + standing + kept

    def _fires(self, trigger: Trigger, size: int, end: int) -> bool:
        return any_met(trigger, size, self._messages(end), self._frame.budget)

    def _enough(self, after: int) -> bool:
        """Whether the size leaves room to grow before the summary's trigger."""
        return self._target is None or after <= self._target

    def _own_trigger(self, moves: dict[str, int]) -> bool:
        """Whether one of the stages that would move has a trigger apart from the summary's."""
        return any(s.trigger != self._rules.trigger for s in self._stages if s.name in moves)

    def _cheap_moves(self, end: int, size: int, *, ahead: bool = False) -> tuple[dict[str, int], int]:
        """Where the cheap stages' frontiers would go, in order until it is enough, and the size after that.

        ``ahead`` asks what it would be if the triggers were reached.
        """
        moves: dict[str, int] = {}
        after = size
        for stage in self._stages:
            if not ahead and not self._fires(stage.trigger, after, end):
                continue
            frontier = self._sizes.boundary(stage.keep, end, self._frame.budget)
            gain = self._sizes.gain(stage.name, max(self._frontiers[stage.name], self._cut), frontier)
            if gain > 0:
                moves[stage.name] = frontier
                after -= gain
            if moves and self._enough(after):
                break
        return moves, after

    def _apply(self, moves: dict[str, int]) -> None:
        self._frontiers.update(moves)
        self._pending = None

    def _summarise(self, end: int, size: int) -> bool:
        """Make a checkpoint, if it gains enough: at the cut fixed ahead, where that still serves, else anew."""
        latest = self._sizes.boundary(self._rules.keep, end, self._frame.budget)
        cut = self._pending
        if cut is None or cut > latest or not self._enough(self._size(cut, end, self._frontiers)):
            cut = self._roomy(latest, end, growth=0)
        if cut <= self._cut or size - self._size(cut, end, self._frontiers) < self._rules.least_gain * size:
            return False
        self._cut = cut
        self._checkpoints.append(cut)
        self._pending = None
        return True

    def _prepare(self, end: int, size: int) -> None:
        """Fix the next cut early, unless the cheap stages will do. What comes before the trigger counts as kept."""
        level = lowest_level(self._rules.trigger, self._frame.budget)
        growth = 0 if level is None else max(0, level - size)
        moves, after = self._cheap_moves(end, size, ahead=True)
        if moves and self._enough(after + growth):
            return
        keep = self._rules.keep
        if keep.messages is None:
            wanted = keep.tokens or share_of(keep.fraction or 0, self._frame.budget or 0)
            keep = Clause(tokens=max(0, wanted - growth))
        cut = self._roomy(self._sizes.boundary(keep, end, self._frame.budget), end, growth)
        after = self._size(cut, end, self._frontiers)
        if cut > self._cut and size - after >= self._rules.least_gain * size:
            self._pending = cut

    def _roomy(self, cut: int, end: int, growth: int) -> int:
        """The cut, moved on until what is kept leaves room to grow; the newest group always stays."""
        cut = max(cut, self._cut)
        while cut < end - 1 and not self._enough(self._size(cut, end, self._frontiers) + growth):
            cut += 1
        return cut
