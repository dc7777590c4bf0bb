"""The rules of a policy, the messages that it keeps unchanged, and how the budget of a request is divided.

A policy's patterns select pinned messages, which are never changed or removed. The search takes linear time, for any
expression and any text. pydantic includes Rust's regex engine, which never backtracks. It doesn't support look-around,
backreferences, or possessive quantifiers, because these need backtracking.

Stages don't change the newest plan of an agent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

from pydantic_core import SchemaError, SchemaValidator, core_schema

from proxy.compaction import keeps
from proxy.compaction.effects import is_plan
from proxy.compaction.format import Format
from proxy.compaction.settings import (
    UNBOUNDED,
    Bounds,
    Clause,
    IndexRules,
    Trigger,
    UserMessageRules,
    lowest_level,
    share_of,
)
from proxy.compaction.stages.stage import Stage, StageRules
from proxy.compaction.turn import Facts, Turn

Search = Callable[[str], bool]  # Return whether a pattern matches anywhere in a text. The text must come from `whole`.


class NotSearchable(ValueError):
    """The engine doesn't support an expression. The message is the engine's own."""


def search_for(pattern: str) -> Search:
    """Compile an expression. Raise ``NotSearchable`` if the engine doesn't support it."""
    try:
        checked = SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex", strict=True))
    except SchemaError as error:
        raise NotSearchable(str(error).splitlines()[-1].strip().removeprefix("error: ")) from None
    return checked.isinstance_python


def whole(text: str) -> str:
    """Replace lone surrogates, which the engine can't read, with replacement characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


@dataclass(frozen=True)
class Pins:
    """Regular expressions. A message is pinned if its text or call arguments match one of them."""

    patterns: tuple[str, ...] = ()
    _searches: tuple[Search, ...] = field(init=False, compare=False, repr=False, default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "_searches", tuple(search_for(pattern) for pattern in self.patterns))

    def holds(self, turn: Turn, format: Format) -> bool:
        """Return whether a message is pinned. The result is cached in its facts."""
        if not self.patterns:
            return False
        known = turn.facts.pinned = turn.facts.pinned or {}
        if self.patterns not in known:
            arguments = (text for _, text in format.arguments(turn.raw))
            text = whole("\n".join([format.text(turn.raw), *arguments]))
            known[self.patterns] = any(search(text) for search in self._searches)
        return known[self.patterns]

    def among(self, body: Sequence[Turn], format: Format) -> frozenset[int]:
        """Return the indexes of the pinned messages."""
        if not self.patterns:
            return frozenset()
        return frozenset(index for index, turn in enumerate(body) if self.holds(turn, format))


NO_PINS = Pins()


class _Sparing(Stage):
    """A stage that changes a plan only once there is a newer one."""

    def __init__(self, stage: Stage, following: Mapping[int, int | None]) -> None:
        """Take the next plan after each plan that the stage would change."""
        self.name = stage.name  # type: ignore[misc]
        self.spares_newest_user = stage.spares_newest_user  # type: ignore[misc]
        self.trigger = stage.trigger
        self.keep = stage.keep
        self._stage = stage
        self._newest = {index for index, later in following.items() if later is None}
        self._later = stage.later() | {index: later for index, later in following.items() if later is not None}

    def reduce(self, index: int, turn: Turn) -> Turn | None:
        return None if index in self._newest else self._stage.reduce(index, turn)

    def later(self) -> dict[int, int]:
        return self._later


R = TypeVar("R", bound=StageRules)


@dataclass(frozen=True)
class Rules:
    """The rules of a policy. Sizes are in tokens.

    - ``stages`` are the rules of the stages that are on, in the order in which the planner tries them.
    - ``archive`` means that the archive stores removed messages, so notes name the message's id.
    - ``role`` is the role of the summary message.
    - ``keep_newest`` are further tools whose newest call is kept as a plan.
    - ``bounds`` are the limits on messages and bytes. Near one of them, a conversation is compacted as at the trigger.
    - ``rows`` means that the number and the order of the messages stay: no summary replaces them.
    """

    trigger: Trigger
    keep: Clause
    prepare: Trigger
    stages: tuple[StageRules, ...]
    summary_tokens: int
    user_messages: UserMessageRules
    index: IndexRules
    shorten_last_user_message: bool = False
    least_gain: float = keeps.LEAST_GAIN
    pins: Pins = NO_PINS
    archive: bool = False
    role: str = "user"
    bounds: Bounds = UNBOUNDED
    keep_newest: frozenset[str] = frozenset()
    rows: bool = False

    def stage(self, kind: type[R]) -> R | None:
        """Return the rules of one stage; ``None`` if it's off."""
        return next((stage for stage in self.stages if isinstance(stage, kind)), None)

    def applied_to(self, body: Sequence[Turn], format: Format) -> list[Stage]:
        """Return the stages that are on for a conversation, cheapest first. None changes the newest plan."""
        stages = [stage.stage(body, format, archive=self.archive) for stage in self.stages]
        plans = [index for index, turn in enumerate(body) if turn.facts.calls and is_plan(turn.facts, self.keep_newest)]
        following = dict(zip(plans, [*plans[1:], None], strict=True)) if plans else {}
        for place, stage in enumerate(stages):
            waiting = {at: later for at, later in following.items() if stage.reduce(at, body[at]) is not None}
            if waiting:
                stages[place] = _Sparing(stage, waiting)
        return stages

    def shortest(self, body: Sequence[Turn], places: Iterable[int], format: Format) -> list[Turn]:
        """Return messages in the form that they have after all stages."""
        stages = self.applied_to(body, format)
        forms = []
        for index in places:
            turn = body[index]
            for stage in stages:
                turn = stage.reduce(index, turn) or turn
            forms.append(turn)
        return forms

    @cached_property
    def clauses(self) -> tuple[Clause, ...]:
        """Return the clauses of all triggers, without repetitions."""
        stages = [stage.trigger for stage in self.stages]
        return tuple(dict.fromkeys(clause for trigger in (self.prepare, self.trigger, *stages) for clause in trigger))

    def least_size(self, budget: int | None) -> float:
        """Return the size in tokens below which no clause is met; infinite if there is none.

        A clause on messages counts 10 tokens per message, which is more than the smallest message has.
        """
        found = self._least_sizes.get(budget)
        if found is None:
            levels = (clause.level(budget) for clause in self.clauses)
            messages = (clause.messages * 10 for clause in self.clauses if clause.messages is not None)
            found = min((size for size in (*levels, *messages) if size is not None), default=math.inf)
            if len(self._least_sizes) >= 1_000:
                self._least_sizes.clear()
            self._least_sizes[budget] = found
        return found

    @cached_property
    def _least_sizes(self) -> dict[int | None, float]:
        return {}

    def may_shorten(self, facts: Facts) -> bool:
        """Return whether a cheap stage may rewrite a message, which is slow the first time."""
        for stage in self.stages:  # noqa: SIM110 - as in `is_plan`
            if stage.is_costly(facts):
                return True
        return False


@dataclass(frozen=True, slots=True)
class Envelope:
    """The budget of one request, and the parts of it outside the body. Sizes are in tokens.

    - ``budget``: the tokens that the input may use; ``None`` if unknown.
    - ``overhead``: the tokens of the head, the tools, and the framing of the request.
    - ``head_messages``: the number of messages in the head.
    - ``overhead_bytes``: the bytes outside the body. They count only if the rules limit bytes.

    The planner rounds these numbers (see ``rounded``), so that small changes don't move checkpoints.
    """

    budget: int | None
    overhead: int
    head_messages: int
    overhead_bytes: int = 0

    def floor(self, level: int) -> int:
        """Return the size at which a trigger at ``level`` fires if head and tools use more than a third of the budget.

        It's the same share of the rest. Otherwise these parts alone might reach it, and each turn would be compacted.
        """
        if self.budget is None or self.overhead <= self.budget // keeps.LARGE_HEAD_DIVISOR:
            return 0
        return self.overhead + (self.budget - self.overhead) * level // self.budget

    def rounded(self, level: int | None = None, most: int | None = None) -> Envelope:
        """Round the overhead up and the budget down, in steps of less than 1 % of the budget.

        If the trigger's level (in tokens) is lower than the budget, the steps are relative to the level. ``most`` is
        the limit on bytes. Without one, the bytes of the overhead become 0.
        """
        step = max(32, min(self.budget or 200_000, level or 200_000) // 128)
        step = 1 << (step.bit_length() - 1)
        budget = None if self.budget is None else max(step, self.budget // step * step)
        heavy = 0 if most is None else _up(self.overhead_bytes, max(1, most // 128))
        return replace(self, budget=budget, overhead=_up(self.overhead, step), overhead_bytes=heavy)


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


@dataclass(frozen=True, slots=True)
class SectionLimits:
    """The most tokens that each part of this request may use. ``group`` is ``None`` if the budget is unknown."""

    summary: int
    users: int
    newest: int
    system: int
    words: int
    index: int
    group: int | None
    plan: int = 0
    state: int | None = None

    def for_span(self, tokens: int) -> SectionLimits:
        """Return the limits for a summary that replaces ``tokens`` tokens. It may have at most half of them."""
        return replace(
            self,
            summary=min(self.summary, tokens // keeps.SPAN_SUMMARY_DIVISOR),
            words=min(self.words, tokens // keeps.SPAN_DIVISOR),
            index=min(self.index, tokens // keeps.SPAN_DIVISOR),
            plan=min(self.plan, tokens // keeps.SPAN_DIVISOR),
        )


def section_limits(rules: Rules, envelope: Envelope) -> SectionLimits:
    """Return the policy's limits, reduced to the shares of the budget.

    If the trigger's level is low or the fixed parts leave little room, the shares are relative to a smaller base.
    """
    level = lowest_level(rules.trigger, envelope.budget)
    bases = [envelope.budget, None if level is None else int(level / keeps.USUAL_TRIGGER) + 1]
    base = min((base for base in bases if base), default=None)
    if base is None:
        users = rules.user_messages.max_tokens
        return SectionLimits(
            rules.summary_tokens,
            users,
            users,
            keeps.MOST_SYSTEM,
            keeps.MOST_WORDS,
            rules.index.max_tokens,
            None,
            keeps.MOST_PLAN,
        )
    room = max((envelope.budget or base) - envelope.overhead, base // keeps.LEAST_ROOM_DIVISOR)
    # If head and tools use more than half, all parts share the rest.
    base = min(base, 2 * room)
    return SectionLimits(
        summary=min(rules.summary_tokens, share_of(keeps.SUMMARY_SHARE, base)),
        users=min(rules.user_messages.max_tokens, share_of(keeps.USER_SHARE, base)),
        newest=share_of(keeps.NEWEST_SHARE, base),
        system=share_of(keeps.SYSTEM_SHARE, base),
        words=min(keeps.MOST_WORDS, share_of(keeps.WORDS_SHARE, base)),
        index=min(rules.index.max_tokens, share_of(keeps.INDEX_SHARE, base)),
        plan=min(keeps.MOST_PLAN, share_of(keeps.PLAN_SHARE, base)),
        group=share_of(keeps.GROUP_SHARE, room) if envelope.budget else None,
        state=share_of(keeps.STATE_SHARE, min(base, room)),
    )
