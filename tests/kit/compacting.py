"""The way of one request through the pure core, with a made-up text for the summary."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from proxy.compaction.fit import fit
from proxy.compaction.format import Format
from proxy.compaction.identifiers import Names
from proxy.compaction.planning import Plan, make_plan
from proxy.compaction.pressure import COMMA, SEPARATOR
from proxy.compaction.render import RenderedConversation, before_cut, render
from proxy.compaction.rules import Envelope, Pins, Rules
from proxy.compaction.settings import UNBOUNDED, Bounds, Clause, IndexRules, Trigger, UserMessageRules, any_met
from proxy.compaction.stages import ArgumentRules, DuplicateRules, MediaRules, ResultRules
from proxy.compaction.summary_message import SummaryParts, collect_names, summary_message, with_index
from proxy.compaction.turn import OutgoingMessage, Turn, head_length
from proxy.dialects.units import decode
from tests.kit.conversations import FORMAT

FIXED = 40
"""Tokens of tools and framing in these tests."""


@dataclass(frozen=True)
class Sent:
    """The request to the upstream. ``plan`` is ``None`` if it's unchanged."""

    pieces: list[OutgoingMessage]
    plan: Plan | None
    steps: tuple[str, ...] = ()

    @property
    def raws(self) -> list[bytes]:
        return [piece.raw for piece in self.pieces]

    @property
    def messages(self) -> list[Any]:
        return [decode(raw) for raw in self.raws]

    @property
    def tokens(self) -> int:
        return sum(piece.tokens for piece in self.pieces)

    @property
    def epoch(self) -> object:
        """Requests of one epoch have the same checkpoints; ``None`` before anything was done."""
        if self.plan is None:
            return None
        applied = sorted((name, place.position, place.seen) for name, place in self.plan.frontiers.items())
        return self.plan.checkpoints, tuple(applied)


TRIGGER, KEEP, PREPARE = (Clause(fraction=0.85),), Clause(fraction=0.10), (Clause(fraction=0.75),)


def rules(
    *,
    trigger: Trigger = TRIGGER,
    keep: Clause = KEEP,
    prepare: Trigger = PREPARE,
    max_length: int = 400,
    max_tokens: int = 200,
    arguments: bool = True,
    results: bool = True,
    shorten_last: bool = False,
    duplicates: bool = True,
    media: bool = True,
    pinned: tuple[str, ...] = (),
    archive: bool = True,
    bounds: Bounds = UNBOUNDED,
) -> Rules:
    """A policy like the default, with limits that fit small windows."""
    stages = [
        DuplicateRules(trigger, keep) if duplicates else None,
        ArgumentRules(trigger, keep, max_length, tools=("write_file",)) if arguments else None,
        ResultRules(trigger, keep, max_tokens, exclude=("ls",)) if results else None,
        MediaRules(trigger, keep) if media else None,
    ]
    return Rules(
        trigger=trigger,
        keep=keep,
        prepare=prepare,
        stages=tuple(stage for stage in stages if stage is not None),
        pins=Pins(pinned),
        archive=archive,
        summary_tokens=4000,
        user_messages=UserMessageRules(),
        index=IndexRules(),
        shorten_last_user_message=shorten_last,
        bounds=bounds,
    )


POLICIES = (
    rules(),
    rules(max_tokens=60, keep=Clause(fraction=0.3)),
    rules(shorten_last=True),
    rules(arguments=False, results=False, duplicates=False, media=False, archive=False),
    rules(pinned=("missing comma",)),
    rules(results=False),
    rules(keep=Clause(messages=4)),
    rules(trigger=(Clause(messages=12), Clause(fraction=0.85)), prepare=()),
    rules(trigger=(Clause(messages=6, fraction=0.5), Clause(fraction=0.9)), keep=Clause(tokens=300)),
)
policies = st.sampled_from(POLICIES)
budgets = st.sampled_from((1792, 1792, 3584, 7168, 15_000, 62_000))


def summary_text(dropped: Sequence[Turn]) -> str:
    return f"{len(dropped)} messages went by; the last had {dropped[-1].facts.tokens} tokens."


_COLLECTED: dict[tuple[type[Format], tuple[bytes, ...]], Names] = {}


def _names(dropped: Sequence[Turn], format: Format) -> Names:
    """Collect the names in the same messages once, as the proxy does. A growing conversation repeats them."""
    key = type(format), tuple(bytes(turn.raw) for turn in dropped)
    found = _COLLECTED.get(key)
    if found is None:
        if len(_COLLECTED) > 100:
            _COLLECTED.clear()
        found = _COLLECTED[key] = collect_names(dropped, None, format)
    return found


def send(
    turns: Sequence[Turn],
    policy: Rules,
    budget: int | None,
    summary: Callable[[Sequence[Turn]], str] = summary_text,
    format: Format = FORMAT,
    stale_reasoning: int = 0,
) -> Sent:
    """Return the messages that a proxy with this policy sends."""
    untouched = Sent([OutgoingMessage(t.raw, t.facts.tokens, t) for t in turns], None)
    before = sum(t.facts.tokens for t in turns)
    triggers = [policy.trigger, *(part.trigger for part in policy.stages)]
    bounded = policy.bounds.reached(len(turns), sum(len(turn.raw) + COMMA for turn in turns))
    if not bounded and not any(any_met(trigger, before + FIXED, len(turns), budget) for trigger in triggers):
        return untouched
    head = head_length(turns)
    overhead = FIXED + sum(t.facts.tokens for t in turns[:head])
    around = sum(len(turn.raw) + SEPARATOR for turn in turns[:head])
    plan = make_plan(turns[head:], policy, Envelope(budget, overhead, head, around), format)
    plan = replace(plan, stale_reasoning=max(plan.stale_reasoning, stale_reasoning - head))
    piece = None
    if plan.cut:
        dropped = turns[head : head + plan.cut]
        apart = {*plan.pinned, *plan.current_user_message.get(plan.cut, ())}
        quoted = [turn for index, turn in enumerate(dropped) if index not in apart]
        kept = "0123456789abcdef0123" if policy.archive else None
        message = summary_message(
            SummaryParts(quoted, summary(dropped), kept), plan.limits_at(plan.cut), policy, format
        )
        # As in the proxy: later messages may replace kept ones, but don't change the index.
        seen = plan.seen[plan.cut]
        places = (*before_cut(plan), *range(plan.cut, seen))
        shown = policy.shortest(turns[head : head + seen], places, format)
        raw = with_index(message, _names(dropped, format), shown, plan.limits_at(plan.cut), format)
        piece = OutgoingMessage(raw, format.tokens(raw), None)
    rendered: RenderedConversation = render(turns, head, plan, policy, piece, format)
    room = None if budget is None else budget - FIXED
    rendered = fit(rendered, room, policy, format, policy.bounds.bytes)
    if rendered.tokens >= before and not bounded:
        return untouched
    return Sent(list(rendered.pieces), plan, rendered.steps)
