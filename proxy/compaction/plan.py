"""The plan for one body: its cut, and how far each cheap stage is applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from proxy.compaction.gains import Gains
from proxy.compaction.rules import SectionLimits
from proxy.compaction.sizes import Sizes
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
    - ``current_user_message``: the user message before each checkpoint that is sent unchanged after the summary.
    - ``retained``: the messages before the last checkpoint that are kept.
    - ``omitted``: the system messages that aren't kept, for the last checkpoint and the upcoming one.
    - ``pinned``: the messages that no stage may change.
    - ``stale_reasoning``: the index before which reasoning is invalid, because the prompt before it changed.
    - ``stale_otherwise``: the same without the newest checkpoint. A provider's summary keeps later reasoning valid.
    """

    limits: SectionLimits
    checkpoints: tuple[int, ...] = ()
    frontiers: dict[str, Frontier] = field(default_factory=dict)
    clips: dict[int, int] = field(default_factory=dict)
    upcoming: int | None = None
    replaced: dict[int, int] = field(default_factory=dict)
    current_user_message: dict[int, int] = field(default_factory=dict)
    retained: tuple[int, ...] = ()
    omitted: dict[int, tuple[int, ...]] = field(default_factory=dict)
    pinned: frozenset[int] = frozenset()
    stale_reasoning: int = 0
    stale_otherwise: int = 0

    def limits_at(self, position: int) -> SectionLimits:
        """Return the limits of the summary that replaces the messages before a checkpoint."""
        return self.limits.for_span(self.replaced[position])

    @property
    def cut(self) -> int:
        """Return the index before which a summary replaces all messages. 0: no summary."""
        return self.checkpoints[-1] if self.checkpoints else 0

    def behind_native_summary(self) -> Plan:
        """Return the plan for a summary by the provider. Nothing may come between it and the messages after the cut."""
        return replace(self, current_user_message={}, retained=(), stale_reasoning=self.stale_otherwise)

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
    checkpoints: Sequence[int],
    pending: int | None,
) -> Plan:
    """Convert checkpoints and frontiers from group indexes to message indexes, and look up the messages to keep.

    ``pending`` is the next checkpoint if it was chosen early.
    """
    starts = [*sizes.starts, sizes.ends[-1] if len(sizes) else 0]
    cut = checkpoints[-1] if checkpoints else 0
    first = starts[cut]
    places = [g for g in (*checkpoints, pending) if g is not None]
    current = {starts[g]: _newest_user(body, starts[g], pinned) for g in places if sizes.keeps_user_message(g)}
    retained = _retained(sizes, cut)
    clips = {i: tokens for i, tokens in sizes.clips.items() if i >= first or i in retained}
    held = [i for i in retained if body[i].facts.kind == "system" and i not in pinned]
    held += [current[first]] if cut and first in current else []
    for index in held:
        if body[index].facts.text_tokens > limits.newest:
            clips[index] = limits.newest + body[index].facts.apart
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
        current_user_message=current,
        retained=tuple(retained),
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
    last = {body[index].facts.digest: index for index in system}
    staying = {body[index].facts.digest for index in _retained(sizes, cut)} if last else set()
    return tuple(sorted(index for digest, index in last.items() if digest not in staying))


def _newest_user(body: Sequence[Turn], position: int, pinned: frozenset[int]) -> int:
    """Return the newest user message before a position. Skip pinned messages and other tools' summaries."""
    for index in range(position - 1, -1, -1):
        facts = body[index].facts
        if facts.kind == "user" and not facts.foreign and index not in pinned:
            return index
    raise ValueError(f"no user message before position {position}")
