"""Where a conversation is compacted: one pass over it, as if the proxy had watched it grow.

The outcome is a pure function of the prefix: a frontier moves only when a stage's trigger is reached, never back and
never between two checkpoints. Whoever sends the whole history at once gets the checkpoints that turn-by-turn
growth would have made, and between two checkpoints each outgoing request is a strict prefix of the next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from proxy.compaction.bounds import (
    NEARING,
    PRESSING,
    ROOM,
    SUMMARY_BYTES,
    ByteWeight,
    MessageWeight,
    Pressure,
    kept_sizes,
    part,
)
from proxy.compaction.conditions import Clause, Trigger, any_met, lowest_level, share_of
from proxy.compaction.gains import Gains, LateGains, PlainGains
from proxy.compaction.message import HEAD_ROLES, MessageCounter, Turn
from proxy.compaction.rules import ROOM_TO_GROW, SUMMARY_FRAME_TOKENS, Envelope, Rules, SectionLimits, caps
from proxy.compaction.sizes import Sizes
from proxy.compaction.stages import arguments, cheap_stages, media, results
from proxy.compaction.stages.stage import Stage
from proxy.compaction.standing import Standing

FULL = 0.95
"""From this share of the budget on a conversation is compacted whatever it gains: the next turn may be refused."""


_LIGHTENING = (media.NAME, results.NAME, arguments.NAME)
"""The stages that take off bytes, in the order in which they are applied for their sake: most bytes are pictures."""


@dataclass(frozen=True, slots=True)
class Frontier:
    """How far a stage is applied: to the messages before ``position``, as it was when ``seen`` messages were there."""

    position: int
    seen: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done to a body. Positions are message indexes into it.

    ``checkpoints`` are all places up to which the conversation was summarised on the way, the last one being in
    force; ``frontiers`` says how far each cheap stage is applied; ``clips`` to how many tokens a message is held;
    ``upcoming`` is the next checkpoint, known ahead of its trigger. ``replaced`` says of each checkpoint, the upcoming
    one too, how many tokens stand before it, ``carried`` which message of the user's before it is sent as it is,
    after the summary. ``standing`` are the messages before the last checkpoint that stay, ``pinned`` those that nothing
    may change. ``omitted`` are, for the last checkpoint and the upcoming one, the system messages that don't stay.
    """

    caps: SectionLimits
    checkpoints: tuple[int, ...] = ()
    frontiers: dict[str, Frontier] = field(default_factory=dict)
    clips: dict[int, int] = field(default_factory=dict)
    upcoming: int | None = None
    replaced: dict[int, int] = field(default_factory=dict)
    carried: dict[int, int] = field(default_factory=dict)
    standing: tuple[int, ...] = ()
    omitted: dict[int, tuple[int, ...]] = field(default_factory=dict)
    pinned: frozenset[int] = frozenset()

    def caps_at(self, position: int) -> SectionLimits:
        """The caps of the summary that stands for all before a checkpoint."""
        return self.caps.for_span(self.replaced[position])

    @property
    def cut(self) -> int:
        """The messages before this one are replaced by a summary; 0 where there is none."""
        return self.checkpoints[-1] if self.checkpoints else 0

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.checkpoints or self.clips or self.frontiers)


def make_plan(body: Sequence[Turn], rules: Rules, frame: Envelope, count: MessageCounter) -> Plan:
    """The plan for a body under a policy. ``frame`` is rounded here."""
    frame = frame.rounded(lowest_level(rules.trigger, frame.budget))
    stages = cheap_stages(rules, body, count)
    limits = caps(rules, frame)
    pinned = rules.pins.among(body)
    sizes = Sizes(body, limits.group, pinned, Standing(limits.system, limits.newest))
    gains, lighter = _gains(stages, body, sizes, pinned)
    walk = Planner(rules, frame, limits, stages, sizes, gains)
    if rules.bounds.bytes is not None:
        walk.weigh_bytes(rules.bounds.bytes, body, pinned, lighter)
    for end in range(1, len(sizes) + 1):
        walk.arrive(end)
    return walk.plan(body, pinned)


def _gains(
    stages: Sequence[Stage], body: Sequence[Turn], sizes: Sizes, pinned: frozenset[int]
) -> tuple[dict[str, Gains], dict[str, list[int]]]:
    """What each stage takes off in tokens; and in bytes, by group, for the stages that look at one message alone.

    A stage that waits for a later message is counted with what it takes off beyond all the others: whichever of them
    are applied, the conversation is no larger than it is taken for, and what came later plays no part in it.
    """
    plain = [stage for stage in stages if not stage.later()]
    gains: dict[str, Gains] = {}
    lighter: dict[str, list[int]] = {}
    least = [sizes.clips.get(index, turn.facts.tokens) for index, turn in enumerate(body)]
    for stage in plain:
        by_group = [0] * len(sizes)
        bytes_by_group = lighter[stage.name] = [0] * len(sizes)
        for group, (start, end) in enumerate(zip(sizes.starts, sizes.ends, strict=True)):
            for index in range(start, end):
                turn = body[index]
                form = stage.reduce(index, turn)
                if form is None or index in pinned:
                    continue
                # What is held to a size already has less to give.
                held = turn.facts.tokens - sizes.clips.get(index, turn.facts.tokens)
                gain = max(0, turn.facts.tokens - form.facts.tokens - held)
                by_group[group] += gain
                least[index] -= gain
                if gain:
                    bytes_by_group[group] += len(turn.raw) - len(form.raw)
        gains[stage.name] = PlainGains(by_group)
    for stage in stages:
        if stage.name in gains:
            continue
        late: dict[tuple[int, int], int] = {}
        for index, later in stage.later().items():
            form = stage.reduce(index, body[index])
            if form is not None and index not in pinned and form.facts.tokens < least[index]:
                pair = sizes.group_of(index), sizes.group_of(later)
                late[pair] = late.get(pair, 0) + least[index] - form.facts.tokens
        gains[stage.name] = LateGains(len(sizes), late)
    return gains, lighter


class Planner:
    """The state of the pass. Positions in here are group indexes."""

    def __init__(
        self,
        rules: Rules,
        frame: Envelope,
        limits: SectionLimits,
        stages: Sequence[Stage],
        sizes: Sizes,
        gains: dict[str, Gains],
    ) -> None:
        self._rules = rules
        self._frame = frame
        self._caps = limits
        self._stages = stages
        self._sizes = sizes
        self._gains = gains
        self._cut = 0
        self._checkpoints: list[int] = []
        self._pending: int | None = None
        self._crowd: MessageWeight | None = None
        if rules.bounds.messages is not None:
            self._crowd = MessageWeight(rules.bounds.messages, frame.head_messages, sizes.ends, self._beside_messages)
        self._bytes: ByteWeight | None = None
        triggers = [rules.trigger, rules.prepare, *(stage.trigger for stage in stages)]
        # Most groups arrive while nothing can fire; they are passed over without asking each trigger.
        self._quiet = min((c.least_tokens(frame.budget) for trigger in triggers for c in trigger), default=math.inf)
        self._level = lowest_level(rules.trigger, frame.budget)
        self._settle()

    def weigh_bytes(
        self, most: int, body: Sequence[Turn], pinned: frozenset[int], lighter: dict[str, list[int]]
    ) -> None:
        """Have an eye on the bytes, too. ``lighter`` is what stages take off each group."""
        sizes = self._sizes
        kept = kept_sizes(body, sizes.clips)
        groups = list(zip(sizes.starts, sizes.ends, strict=True))
        standing = sizes.standing.totals([sum(kept[start:end]) for start, end in groups])
        newest = [0]
        for start, end in groups:
            first = body[start].facts
            own = first.role == "user" and not first.foreign and pinned.isdisjoint(range(start, end))
            newest.append(kept[start] if own else newest[-1])

        def beside(cut: int) -> int:
            if cut == 0:
                return 0
            carried = newest[cut] if sizes.carries(cut) else 0
            return SUMMARY_BYTES * self._summary_tokens(cut) + standing[cut] + carried

        self._bytes = ByteWeight(most, self._frame.overhead_bytes, groups, kept, lighter, beside)
        self._settle()

    def arrive(self, end: int) -> None:
        """One more group is there: ``end`` groups in all."""
        crowd, heavy = self._crowd, self._bytes
        crowded = crowd is not None and crowd.grown[end] >= self._crowded
        if crowded or (heavy is not None and heavy.grown[end] >= self._heavy):
            self._relieve(end)
        size = self._base + self._sizes.total[end]
        if size < self._quiet:
            return
        moves, after = self._cheap_moves(end, size)
        worth = size - after >= self._rules.least_gain * size
        if worth and self._enough(after):
            self._apply(moves, end)
        elif self._fires(self._rules.trigger, size, end):
            if not self._summarise(end, size) and worth:
                self._apply(moves, end)
        elif worth and self._own_trigger(moves):
            self._apply(moves, end)
        elif self._pending is None and self._fires(self._rules.prepare, size, end):
            self._prepare(end, size)

    def _relieve(self, end: int) -> None:
        """Compact for the sake of a bound, where one is all but reached: pictures and long results first, if it is the
        bytes and that is enough, else by a checkpoint, which leaves room to grow. Ahead of the messages' bound the cut
        is fixed early."""
        crowd, heavy = self._crowd, self._bytes
        weights: list[Pressure] = []
        if crowd is not None and self._at(crowd, end) >= part(PRESSING, crowd.most):
            weights.append(crowd)
        if heavy is not None and self._at(heavy, end) >= part(PRESSING, heavy.most):
            weights.append(heavy)
        if not weights:
            if crowd is not None and self._pending is None and self._at(crowd, end) >= part(NEARING, crowd.most):
                self._prepare_crowd(crowd, end)
            return
        moves: dict[str, int] = {}
        if heavy is not None and heavy in weights:
            now = self._at(heavy, end)
            moves, after = self._lighter_moves(heavy, end, now)
            if not self._worth(heavy, now, after):
                moves = {}
            if moves and len(weights) == 1 and after <= part(ROOM, heavy.most):
                self._apply(moves, end)
                return
            # Where a summary is needed as well, pictures go first: they may be all that is too much in what is kept.
            first = {name: frontier for name, frontier in moves.items() if name == media.NAME}
            if first:
                self._apply(first, end)
        if not self._summarise(end, self._base + self._sizes.total[end], weights) and moves:
            self._apply(moves, end)

    def _at(self, weight: Pressure, end: int) -> int:
        return weight.at(self._cut, end)

    def _worth(self, weight: Pressure, now: int, after: int) -> bool:
        """Whether a compaction takes enough off a bound: a tenth, or as much as it takes to be below it."""
        return now - after >= self._rules.least_gain * now or after <= weight.most < now

    def _lighter_moves(self, heavy: ByteWeight, end: int, now: int) -> tuple[dict[str, int], int]:
        """How far stages would have to be applied for the bytes to have room to grow, and the bytes after that."""
        moves: dict[str, int] = {}
        target = part(ROOM, heavy.most)
        stages = {stage.name: stage for stage in self._stages}
        for name in _LIGHTENING:
            stage = stages.get(name)
            if stage is None or now <= target:
                continue
            last = end - 1
            if stage.spares_newest_user:
                last = min(last, max(0, self._sizes.newest_user_group[end]))
            first = min(last, max(self._gains[name].frontier, self._boundary(stage, end)))
            moves[name], saved = heavy.frontier(name, self._cut, first, last, now - target)
            now -= saved
            if not saved:
                del moves[name]
        return moves, now

    def _prepare_crowd(self, crowd: MessageWeight, end: int) -> None:
        """Fix the next cut before there are too many messages. What comes until then counts as kept."""
        if not self._rules.prepare:
            return
        growth = part(PRESSING, crowd.most) - self._at(crowd, end)
        latest = self._sizes.boundary(self._rules.keep, end, self._frame.budget)
        cut = max(latest, self._cut)
        while cut < end - 1 and crowd.at(cut, end) + growth > part(ROOM, crowd.most):
            cut += 1
        if cut > self._cut and self._worth(crowd, self._at(crowd, end), crowd.at(cut, end)):
            self._pending = cut

    def plan(self, body: Sequence[Turn], pinned: frozenset[int]) -> Plan:
        """The plan once all groups have arrived."""
        sizes = self._sizes
        starts = [*sizes.starts, sizes.ends[-1] if len(sizes) else 0]
        first = starts[self._cut]
        places = [g for g in (*self._checkpoints, self._pending) if g is not None]
        carried = {starts[g]: _newest_user(body, starts[g], pinned) for g in places if sizes.carries(g)}
        standing = self._standing(self._cut)
        clips = {i: tokens for i, tokens in sizes.clips.items() if i >= first or i in standing}
        held = [i for i in standing if body[i].facts.role in HEAD_ROLES and i not in pinned]
        held += [carried[first]] if self._cut and first in carried else []
        for index in held:
            if body[index].facts.text_tokens > self._caps.newest:
                clips[index] = self._caps.newest + body[index].facts.apart
        return Plan(
            caps=self._caps,
            checkpoints=tuple(starts[g] for g in self._checkpoints),
            frontiers={
                name: Frontier(starts[gains.frontier], sizes.ends[gains.seen - 1])
                for name, gains in self._gains.items()
                if gains.frontier > self._cut
            },
            clips=clips,
            upcoming=None if self._pending is None else starts[self._pending],
            replaced={starts[g]: sizes.total[g] for g in places},
            carried=carried,
            standing=tuple(standing),
            omitted={starts[g]: self._omitted(g, body) for g in places[-2:]},
            pinned=pinned,
        )

    def _standing(self, cut: int) -> list[int]:
        sizes = self._sizes
        return [i for g in sizes.standing.groups(cut) for i in range(sizes.starts[g], sizes.ends[g])]

    def _omitted(self, cut: int, body: Sequence[Turn]) -> tuple[int, ...]:
        """Return the system messages before a cut that no message which stays repeats, each once, as the last."""
        starts = self._sizes.starts
        system = (starts[group] for group in self._sizes.standing.system if group < cut)
        last = {body[index].facts.digest: index for index in system}
        staying = {body[index].facts.digest for index in self._standing(cut)} if last else set()
        return tuple(sorted(index for digest, index in last.items() if digest not in staying))

    def _settle(self) -> None:
        """Note what the parts that do not grow take, after a move."""
        cut = self._cut
        self._base = self._size(cut, cut) - self._sizes.total[cut]
        # As with the triggers, most groups arrive far below any bound.
        self._crowded = math.inf if self._crowd is None else self._crowd.level(cut, NEARING)
        self._heavy = math.inf if self._bytes is None else self._bytes.level(cut, PRESSING)

    def _size(self, cut: int, end: int) -> int:
        total = self._sizes.total
        saved = sum([gains.applied(cut) for gains in self._gains.values()])
        return self._frame.overhead + self._replacement(cut) - saved + total[end] - total[cut]

    def _replacement(self, cut: int) -> int:
        """What stands for the groups before a cut. The summary counts with its cap: its length shifts nothing."""
        if cut == 0:
            return 0
        newest = min(self._carried(cut), self._caps.newest) + self._carried_media(cut)
        return self._summary_tokens(cut) + newest + self._sizes.standing.tokens[cut]

    def _summary_tokens(self, cut: int) -> int:
        """What the summary message may take."""
        sizes = self._sizes
        limits = self._caps.for_span(sizes.total[cut])
        users = min(sizes.users[cut] - self._carried(cut), limits.users)
        return SUMMARY_FRAME_TOKENS + limits.summary + limits.words + limits.index + users

    def _carried(self, cut: int) -> int:
        return self._sizes.newest_user[cut] if self._sizes.carries(cut) else 0

    def _carried_media(self, cut: int) -> int:
        return self._sizes.newest_media[cut] if self._sizes.carries(cut) else 0

    def _messages(self, end: int) -> int:
        kept = self._sizes.ends[end - 1] - (self._sizes.starts[self._cut] if self._cut else 0)
        return self._frame.head_messages + self._beside_messages(self._cut) + kept

    def _beside_messages(self, cut: int) -> int:
        """The summary and the messages that stand beside it."""
        return 1 + self._sizes.standing.messages[cut] + self._sizes.carries(cut) if cut else 0

    def _fires(self, trigger: Trigger, size: int, end: int) -> bool:
        return any_met(trigger, size, self._messages(end), self._frame.budget)

    def _enough(self, after: int, cut: int | None = None) -> bool:
        """Return whether a size leaves room to grow before the summary's trigger, with a cut or with the last one.

        If the parts that always stay are near the trigger by themselves, half of the room they leave is enough.
        """
        level = self._level
        if level is None:
            return True
        firm = self._frame.overhead + self._carried_media(self._cut if cut is None else cut)
        return after <= max(int(level * ROOM_TO_GROW), (level + firm) // 2)

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
            gains = self._gains[stage.name]
            frontier = max(gains.frontier, self._boundary(stage, end))
            gain = gains.potential(self._cut, frontier, end) - gains.applied(self._cut)
            if gain > 0:
                moves[stage.name] = frontier
                after -= gain
            if moves and self._enough(after) and size - after >= self._rules.least_gain * size:
                break
        return moves, after

    def _boundary(self, stage: Stage, end: int) -> int:
        frontier = self._sizes.boundary(stage.keep, end, self._frame.budget)
        return min(frontier, max(0, self._sizes.newest_user_group[end])) if stage.spares_newest_user else frontier

    def _apply(self, moves: dict[str, int], end: int) -> None:
        for name, frontier in moves.items():
            self._gains[name].apply(frontier, end)
            if self._bytes is not None:
                self._bytes.apply(name, frontier, end)
        self._pending = None
        self._settle()

    def _summarise(self, end: int, size: int, weights: Sequence[Pressure] = ()) -> bool:
        """Make a checkpoint, if it gains enough: at the cut fixed ahead, where that still serves, else anew.

        ``weights`` are the bounds for whose sake it is made, which then may gain in place of the tokens.
        """
        least = self._least_gain(size)

        def worth(cut: int) -> bool:
            gained = size - self._size(cut, end) >= least
            return gained or any(self._worth(w, self._at(w, end), w.at(cut, end)) for w in weights)

        if not worth(end - 1):
            return False
        latest = self._sizes.boundary(self._rules.keep, end, self._frame.budget)
        cut = self._pending
        if cut is None or cut > latest or not self._leaves_room(cut, end, weights=weights):
            cut = self._roomy(latest, end, weights=weights)
        if cut <= self._cut or not worth(cut):
            return False
        self._cut = cut
        self._checkpoints.append(cut)
        self._pending = None
        self._settle()
        return True

    def _least_gain(self, size: int) -> float:
        """What a checkpoint must take off to be worth its price. Where the budget is all but full anything is."""
        full = self._frame.budget is not None and size >= share_of(FULL, self._frame.budget)
        return 1 if full else self._rules.least_gain * size

    def _prepare(self, end: int, size: int) -> None:
        """Fix the next cut early, unless the cheap stages will do. What comes before the trigger counts as kept."""
        level = lowest_level(self._rules.trigger, self._frame.budget)
        growth = 0 if level is None else max(0, level - size)
        moves, after = self._cheap_moves(end, size, ahead=True)
        if (moves and self._enough(after + growth)) or size - self._size(end - 1, end) < self._rules.least_gain * size:
            return
        keep = self._rules.keep
        if keep.messages is None:
            wanted = keep.tokens or share_of(keep.fraction or 0, self._frame.budget or 0)
            keep = Clause(tokens=max(0, wanted - growth))
        cut = self._roomy(self._sizes.boundary(keep, end, self._frame.budget), end, growth=growth)
        after = self._size(cut, end)
        if cut > self._cut and size - after >= self._rules.least_gain * size:
            self._pending = cut

    def _roomy(self, cut: int, end: int, *, growth: int = 0, weights: Sequence[Pressure] = ()) -> int:
        """The cut, moved on until what is kept leaves room to grow; the newest group always stays."""
        cut = max(cut, self._cut)
        while cut < end - 1 and not self._leaves_room(cut, end, growth=growth, weights=weights):
            cut += 1
        return cut

    def _leaves_room(self, cut: int, end: int, *, growth: int = 0, weights: Sequence[Pressure] = ()) -> bool:
        """Whether a cut leaves room to grow, in tokens and in the bounds for whose sake it is made."""
        roomy = all(weight.at(cut, end) <= part(ROOM, weight.most) for weight in weights)
        return roomy and self._enough(self._size(cut, end) + growth, cut)


def _newest_user(body: Sequence[Turn], position: int, pinned: frozenset[int]) -> int:
    """The newest of the user's own messages before a position, pinned ones and other tools' summaries apart."""
    for index in range(position - 1, -1, -1):
        facts = body[index].facts
        if facts.role == "user" and not facts.foreign and index not in pinned:
            return index
    raise ValueError("no message of the user's stands before this position")
