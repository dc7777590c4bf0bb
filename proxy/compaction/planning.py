"""Decide where a conversation is compacted, in one pass over its messages.

The plan is a pure function of the messages. The pass adds one segment after another, as if the proxy had received the
conversation turn by turn. A client that sends the whole history at once therefore gets the same checkpoints.
Frontiers move only when a trigger fires, and never back. Between two checkpoints each outgoing request is a strict
prefix of the next one, which keeps the provider's prompt cache valid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from proxy.compaction import keeps
from proxy.compaction.format import Format
from proxy.compaction.pressure import BytePressure, Gains, MessagePressure, Pressure, stage_gains
from proxy.compaction.rules import Envelope, Rules, SectionLimits, section_limits
from proxy.compaction.settings import Clause, Trigger, any_met, lowest_level, part, raised, share_of
from proxy.compaction.sizes import Projection, RetainedGroups, Sizes
from proxy.compaction.stages import evict_results, media, truncate_args
from proxy.compaction.stages.stage import Stage
from proxy.compaction.state import NOTHING, Live, State, state_of
from proxy.compaction.turn import Turn


@dataclass(frozen=True, slots=True)
class Frontier:
    """How far a stage is applied: to the messages before ``position``.

    ``seen`` is the number of messages that the body had when the planner decided this.
    """

    position: int
    seen: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The changes to make to a body. Positions are message indexes in the body.

    - ``checkpoints``: every position up to which the conversation was summarized. The last one applies now.
    - ``frontiers``: how far each cheap stage is applied, by stage name.
    - ``clips``: the token limits of messages that are too large, by index.
    - ``upcoming``: the next checkpoint, if the planner chose it before the trigger fired.
    - ``replaced``: the tokens before each checkpoint, including the upcoming one.
    - ``seen``: the number of messages that the body had when each checkpoint was made.
    - ``current_user_message``: the user messages before each checkpoint that are sent unchanged after the summary.
    - ``retained``: the messages before the last checkpoint that are kept.
    - ``state``: what was put into effect before the last checkpoint.
    - ``omitted``: the system messages that aren't kept, for the last checkpoint and the upcoming one.
    - ``pinned``: the messages that no stage may change.
    - ``stale_reasoning``: the index before which reasoning is invalid, because the prompt before it changed.
    """

    limits: SectionLimits
    checkpoints: tuple[int, ...] = ()
    frontiers: dict[str, Frontier] = field(default_factory=dict)
    clips: dict[int, int] = field(default_factory=dict)
    upcoming: int | None = None
    replaced: dict[int, int] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)
    current_user_message: dict[int, tuple[int, ...]] = field(default_factory=dict)
    retained: tuple[int, ...] = ()
    state: Live = NOTHING
    omitted: dict[int, tuple[int, ...]] = field(default_factory=dict)
    pinned: frozenset[int] = frozenset()
    stale_reasoning: int = 0

    def limits_at(self, position: int) -> SectionLimits:
        """Return the limits of the summary that replaces the messages before a checkpoint."""
        return self.limits.for_span(self.replaced[position])

    @property
    def cut(self) -> int:
        """Return the index before which a summary replaces all messages. 0: no summary."""
        return self.checkpoints[-1] if self.checkpoints else 0

    @property
    def empty(self) -> bool:
        """Return whether the plan changes nothing."""
        return not (self.checkpoints or self.clips or self.frontiers)


def assemble_plan(
    body: Sequence[Turn],
    sizes: Sizes,
    gains: Mapping[str, Gains],
    limits: SectionLimits,
    pinned: frozenset[int],
    checkpoints: Mapping[int, int],
    pending: int | None,
    state: State | None = None,
) -> Plan:
    """Convert checkpoints and frontiers from group indexes to message indexes, and look up the messages to keep.

    ``checkpoints`` has the number of groups when each of them was made. ``pending`` is the next checkpoint if it was
    chosen early.
    """
    starts = [*sizes.starts, sizes.ends[-1] if len(sizes) else 0]
    cut = max(checkpoints, default=0)
    first = starts[cut]
    places = [g for g in (*checkpoints, pending) if g is not None]
    current = {starts[g]: carried for g in places if (carried := sizes.carried(g))}
    retained = _retained(sizes, cut)
    clips = {i: tokens for i, tokens in sizes.clips.items() if i >= first or i in retained}
    held = {i: limits.newest for i in retained if body[i].facts.kind == "system" and i not in pinned}
    carried = current.get(first, ()) if cut else ()
    room = limits.newest
    for index in reversed(carried):  # the newest one stays whole if it can
        held[index] = room
        room = max(room // 2, room - body[index].facts.text_tokens)
    for index, most in held.items():
        if body[index].facts.text_tokens > most:
            clips[index] = most + body[index].facts.apart
    return Plan(
        limits=limits,
        checkpoints=tuple(starts[g] for g in checkpoints),
        frontiers={
            name: Frontier(starts[gain.frontier], sizes.ends[gain.seen - 1])
            for name, gain in gains.items()
            if gain.frontier > cut
        },
        clips=clips,
        upcoming=None if pending is None else starts[pending],
        replaced={starts[g]: sizes.total[g] for g in places},
        seen={starts[g]: sizes.ends[seen - 1] for g, seen in checkpoints.items()},
        current_user_message=current,
        retained=tuple(retained),
        state=state.at(cut) if state is not None else NOTHING,
        omitted={starts[g]: _omitted(sizes, g, body) for g in places[-2:]},
        pinned=pinned,
    )


def _retained(sizes: Sizes, cut: int) -> list[int]:
    return [i for g in sizes.retained.groups(cut) for i in range(sizes.starts[g], sizes.ends[g])]


def _omitted(sizes: Sizes, cut: int, body: Sequence[Turn]) -> tuple[int, ...]:
    """Return the system messages before a cut whose content no kept message repeats.

    Of identical messages, only the last one counts.
    """
    system = (sizes.starts[group] for group in sizes.retained.system if group < cut)
    last = {body[index].facts.said_alike: index for index in system}
    staying = {body[index].facts.said_alike for index in _retained(sizes, cut)} if last else set()
    return tuple(sorted(index for said, index in last.items() if said not in staying))


_LIGHTENING = (media.NAME, evict_results.NAME, truncate_args.NAME)
"""The stages that reduce bytes, in the order in which they are applied. Media come first: they have the most bytes."""


def make_plan(body: Sequence[Turn], rules: Rules, envelope: Envelope, format: Format) -> Plan:
    """Return the plan for a body under a policy. This function rounds ``envelope``."""
    level = lowest_level(rules.trigger, envelope.budget)
    envelope = envelope.rounded(level, rules.bounds.bytes)
    stages = rules.applied_to(body, format)
    limits = section_limits(rules, envelope)
    pinned = rules.pins.among(body, format)
    retained = RetainedGroups(limits.system, limits.newest)
    alone = rules.rows and not any(turn.facts.calls for turn in body)
    sizes = Sizes(body, limits.group, pinned, retained, rules.keep_newest, format, alone=alone)
    gains, lighter = stage_gains(stages, body, sizes, pinned)
    state = state_of(body, sizes.starts, limits.state, format)
    level, acting = lowest_level(rules.trigger, envelope.budget), rules
    if level is not None and (floor := envelope.floor(level)):
        level, acting = max(level, floor), replace(rules, trigger=raised(rules.trigger, floor))
    projection = Projection(envelope, limits, sizes, gains, level, state)
    most = rules.bounds.bytes
    byte_pressure = None if most is None else projection.byte_pressure(most, body, pinned, lighter)
    planner = Planner(acting, envelope.budget, stages, sizes, gains, projection, byte_pressure)
    for end in range(1, len(sizes) + 1):
        planner.arrive(end)
    plan = assemble_plan(body, sizes, gains, limits, pinned, planner.checkpoints, planner.pending, state)
    stale, changed_at = 0, planner.changed_at
    if format.binds_reasoning == "always":  # limits of results matter only to this binding, to the whole prompt
        stale = ([0, *sizes.ends])[max(changed_at, planner.limited_at)]
    elif format.binds_reasoning == "until_open_round" and changed_at:
        stale = sizes.starts[sizes.newest(changed_at)]
    return replace(plan, stale_reasoning=stale)


class Planner:
    """The state of the pass. Positions are indexes of segments (see ``Sizes``), and cuts are at the start of groups.

    ``checkpoints`` are the checkpoints so far, each with the number of segments when it was made. ``pending`` is the
    next one, if it was chosen before the trigger fired. ``changed_at`` is the number of segments when the start of the
    prompt last changed; 0 if it never did. ``limited_at`` is the same for limits of results.
    """

    def __init__(
        self,
        rules: Rules,
        budget: int | None,
        stages: Sequence[Stage],
        sizes: Sizes,
        gains: dict[str, Gains],
        projection: Projection,
        byte_pressure: BytePressure | None,
    ) -> None:
        self.checkpoints: dict[int, int] = {}
        self.pending: int | None = None
        self.changed_at = 0
        self.limited_at = 0
        self._rules = rules
        self._budget = budget
        self._stages = stages
        self._sizes = sizes
        self._gains = gains
        self._projection = projection
        self._size = projection.size
        self._cut = 0
        self._message_pressure: MessagePressure | None = None
        if rules.bounds.messages is not None:
            self._message_pressure = projection.message_pressure(rules.bounds.messages)
        self._byte_pressure = byte_pressure
        triggers = [rules.trigger, rules.prepare, *(stage.trigger for stage in stages)]
        # No trigger can fire below this size, so most groups are skipped without evaluating each trigger.
        self._quiet = min((c.least_tokens(budget) for trigger in triggers for c in trigger), default=math.inf)
        self._level = lowest_level(rules.trigger, budget)
        self._settle()
        self._whole = self._base

    def arrive(self, end: int) -> None:
        """Add one more segment, so that there are ``end`` segments."""
        messages, heavy = self._message_pressure, self._byte_pressure
        crowded = messages is not None and messages.grown[end] >= self._crowded
        if crowded or (heavy is not None and heavy.grown[end] >= self._heavy):
            self._relieve(end)
        sizes, size = self._sizes, self._base + self._sizes.total[end]
        # The limits of results change messages if the prompt that had them without limits was sent before.
        sent = sizes.clipped[end] and self._whole + sizes.total[end] + sizes.clipped[end] >= self._quiet
        if sent and (not self.limited_at or end in sizes.eased):
            self.limited_at = end
        if size < self._quiet:
            return
        moves, after = self._cheap_moves(end, size)
        worth = size - after >= self._rules.least_gain * size
        if worth and self._enough(after):
            self._apply(moves, end)
        elif self._fires(self._rules.trigger, size, end):
            if not self._summarize(end, size) and worth:
                self._apply(moves, end)
        elif worth and self._own_trigger(moves):
            self._apply(moves, end)
        size = self._base + self._sizes.total[end]
        if self.pending is None and self._fires(self._rules.prepare, size, end):
            self._prepare(end, size)

    def _settle(self) -> None:
        """Update the sizes that stay constant until the next move."""
        cut = self._cut
        messages, heavy = self._message_pressure, self._byte_pressure
        self._base = self._size(cut, cut) - self._sizes.total[cut]
        # Most groups arrive far below these levels and are skipped.
        self._crowded = math.inf if messages is None else messages.level(cut, keeps.NEARING)
        self._heavy = math.inf if heavy is None else heavy.level(cut, keeps.PRESSING)

    def _relieve(self, end: int) -> None:
        """Compact because the request is near a limit on messages or bytes.

        For bytes, shorten media and long results first. If that isn't enough, make a checkpoint that leaves room to
        grow. If the number of messages is only approaching its limit, choose the next cut early.
        """
        messages, heavy = self._message_pressure, self._byte_pressure
        pressures: list[Pressure] = []
        if messages is not None and self._at(messages, end) >= part(keeps.PRESSING, messages.most):
            pressures.append(messages)
        if heavy is not None and self._at(heavy, end) >= part(keeps.PRESSING, heavy.most):
            pressures.append(heavy)
        if not pressures:
            if (
                messages is not None
                and self.pending is None
                and self._at(messages, end) >= part(keeps.NEARING, messages.most)
            ):
                self._prepare_for_messages(messages, end)
            return
        moves: dict[str, int] = {}
        if heavy is not None and heavy in pressures:
            now = self._at(heavy, end)
            moves, after = self._lighter_moves(heavy, end, now)
            if not self._worth(heavy, now, after):
                moves = {}
            if moves and len(pressures) == 1 and after <= part(keeps.ROOM, heavy.most):
                self._apply(moves, end)
                return
            # If a summary is needed too, remove media first: they may be the only excess in the kept messages.
            first = {name: frontier for name, frontier in moves.items() if name == media.NAME}
            if first:
                self._apply(first, end)
        if not self._summarize(end, self._base + self._sizes.total[end], pressures) and moves:
            self._apply(moves, end)

    def _at(self, pressure: Pressure, end: int) -> int:
        return pressure.at(self._cut, end)

    def _worth(self, pressure: Pressure, now: int, after: int) -> bool:
        """Return whether a compaction saves the policy's least gain, or brings the request below the limit."""
        return now - after >= self._rules.least_gain * now or after <= pressure.most < now

    def _lighter_moves(self, heavy: BytePressure, end: int, now: int) -> tuple[dict[str, int], int]:
        """Return the frontiers that give the bytes room to grow, and the bytes after those moves."""
        moves: dict[str, int] = {}
        target = part(keeps.ROOM, heavy.most)
        stages = {stage.name: stage for stage in self._stages}
        for name in _LIGHTENING:
            stage = stages.get(name)
            if stage is None or now <= target:
                continue
            last = end - 1
            if stage.spares_newest_user:
                last = min(last, max(0, self._sizes.newest_user_place[end]))
            first = min(last, max(self._gains[name].frontier, self._boundary(stage, end)))
            moves[name], saved = heavy.frontier(name, self._cut, first, last, now - target)
            now -= saved
            if not saved:
                del moves[name]
        return moves, now

    def _prepare_for_messages(self, messages: MessagePressure, end: int) -> None:
        """Choose the next cut before the number of messages reaches its limit.

        Messages that arrive before then count as kept.
        """
        if not self._rules.prepare:
            return
        growth = part(keeps.PRESSING, messages.most) - self._at(messages, end)
        latest = self._sizes.boundary(self._rules.keep, end, self._budget)
        cut = max(latest, self._cut)
        while cut < self._sizes.newest(end) and messages.at(cut, end) + growth > part(keeps.ROOM, messages.most):
            cut = self._sizes.next(cut)
        if cut > self._cut and self._worth(messages, self._at(messages, end), messages.at(cut, end)):
            self.pending = cut

    def _fires(self, trigger: Trigger, size: int, end: int) -> bool:
        return any_met(trigger, size, self._projection.messages(self._cut, end), self._budget)

    def _enough(self, after: int) -> bool:
        return self._projection.leaves_room(after, self._cut)

    def _own_trigger(self, moves: dict[str, int]) -> bool:
        """Return whether a stage that would move has a trigger other than the summary's."""
        return any(s.trigger != self._rules.trigger for s in self._stages if s.name in moves)

    def _cheap_moves(self, end: int, size: int, *, ahead: bool = False) -> tuple[dict[str, int], int]:
        """Return the new frontiers of the cheap stages, and the size after those moves.

        Stages are added in order until the size is small enough. With ``ahead``, assume that every trigger fires.
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
        frontier = self._sizes.boundary(stage.keep, end, self._budget)
        return min(frontier, max(0, self._sizes.newest_user_place[end])) if stage.spares_newest_user else frontier

    def _apply(self, moves: dict[str, int], end: int) -> None:
        for name, frontier in moves.items():
            self._gains[name].apply(frontier, end)
            if self._byte_pressure is not None:
                self._byte_pressure.apply(name, frontier, end)
        self.changed_at = end
        self.pending = None
        self._settle()

    def _summarize(self, end: int, size: int, pressures: Sequence[Pressure] = ()) -> bool:
        """Make a checkpoint if it saves enough. Return whether it was made.

        Use the pending cut if it still leaves room to grow; otherwise choose a new one. ``pressures`` are the limits
        that require the checkpoint: savings there are enough, even if the tokens hardly shrink.
        """
        least = self._least_gain(size)

        def worth(cut: int) -> bool:
            gained = size - self._size(cut, end) >= least
            return gained or any(self._worth(p, self._at(p, end), p.at(cut, end)) for p in pressures)

        newest = self._sizes.newest(end)
        if self._rules.rows or not worth(newest):
            return False
        latest = self._sizes.boundary(self._rules.keep, end, self._budget)
        cut = self.pending
        if cut is None or not worth(cut):
            holds = False
        elif pressures or self._level is None:
            holds = self._leaves_room(cut, end, pressures=pressures)
        else:  # the summary is already paid for, so it's good enough unless the trigger would fire again at once
            holds = self._size(cut, end) < self._level
        if cut is None or not holds:
            cut = self._roomy(latest, end, newest, pressures=pressures)
        if cut <= self._cut or not worth(cut):
            return False
        self._cut = cut
        self.checkpoints[cut] = end
        self.changed_at = end
        self.pending = None
        self._settle()
        return True

    def _least_gain(self, size: int) -> float:
        """Return the tokens that a checkpoint must save. If the budget is almost full, one token is enough."""
        budget = self._budget
        if budget is None or size < share_of(keeps.FULL, budget):
            return self._rules.least_gain * size
        # A summary that gains less would be bought again in the next turn. Beyond the budget, there is no choice.
        return 1 if size >= budget else max(1.0, self._rules.least_gain * self._projection.room)

    def _prepare(self, end: int, size: int) -> None:
        """Choose the next cut early, unless the cheap stages will save enough, or the cut wouldn't leave room to grow.

        Messages that arrive before the trigger fires count as kept, so such a cut keeps more than a later one. If it
        left no room, the next summary would follow soon, which costs more than a request that waits. In little room, a
        turn as large as one of the last ones must reach the trigger.
        """
        level, sizes = self._level, self._sizes
        growth = 0 if level is None else max(0, level - size)
        turn = max(sizes.turn(group) for group in range(max(0, end - 6), end))
        moves, after = self._cheap_moves(end, size, ahead=True)
        if (self._projection.room and growth > turn) or (moves and self._enough(after + growth)):
            return
        keep, last = self._rules.keep, end if sizes.goes_on(end) else sizes.newest(end)
        if keep.messages is None:
            wanted = keep.tokens or share_of(keep.fraction or 0, self._budget or 0)
            keep = Clause(tokens=max(0, wanted - growth))
        latest = last if keep.tokens == 0 else sizes.boundary(keep, end, self._budget)
        cut = self._roomy(latest, end, last, growth=growth + turn)
        worth = size - self._size(cut, end) >= self._least_gain(size)
        if cut > self._cut and worth and self._leaves_room(cut, end, growth=growth):
            self.pending = cut

    def _roomy(self, cut: int, end: int, last: int, *, growth: int = 0, pressures: Sequence[Pressure] = ()) -> int:
        """Move a cut forward, at most to ``last``, until the kept groups leave room to grow."""
        cut = max(cut, self._cut)
        while cut < last and not self._leaves_room(cut, end, growth=growth, pressures=pressures):
            cut = self._sizes.next(cut)
        return cut

    def _leaves_room(self, cut: int, end: int, *, growth: int = 0, pressures: Sequence[Pressure] = ()) -> bool:
        """Return whether a cut leaves room to grow, in tokens and under each given limit."""
        roomy = all(pressure.at(cut, end) <= part(keeps.ROOM, pressure.most) for pressure in pressures)
        return roomy and self._projection.leaves_room(self._size(cut, end) + growth, cut)
