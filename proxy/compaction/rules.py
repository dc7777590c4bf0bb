"""What a policy asks of the core, and how the budget of a request is shared out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from proxy.compaction.conditions import Clause, Trigger, lowest_level, share_of
from proxy.compaction.message import RESULT_ROLES, Facts


@dataclass(frozen=True, slots=True)
class ArgumentRules:
    """Arguments of old tool calls. ``max_length`` is in characters; ``tools`` are names, ``*`` for all of them."""

    trigger: Trigger
    keep: Clause
    max_length: int
    truncation_text: str
    tools: frozenset[str]


@dataclass(frozen=True, slots=True)
class ResultRules:
    """Old tool results. ``max_tokens`` is the size from which a result is shortened; ``exclude`` are tool names."""

    trigger: Trigger
    keep: Clause
    max_tokens: int
    exclude: frozenset[str]


@dataclass(frozen=True)
class Rules:
    """The policy as the core sees it. Sizes are in tokens."""

    trigger: Trigger
    keep: Clause
    prepare: Trigger
    arguments: ArgumentRules | None
    results: ResultRules | None
    summary_tokens: int
    user_tokens: int
    index_tokens: int
    shorten_last_user_message: bool = False
    least_gain: float = 0.10

    @cached_property
    def clauses(self) -> tuple[Clause, ...]:
        """What may set anything off, each clause once."""
        stages = [stage.trigger for stage in (self.arguments, self.results) if stage]
        return tuple(dict.fromkeys(clause for trigger in (self.prepare, self.trigger, *stages) for clause in trigger))

    def may_shorten(self, facts: Facts) -> bool:
        """Whether a cheap stage may have work with a message: such work is dear the first time, and then remembered."""
        if facts.role in RESULT_ROLES:
            return self.results is not None and facts.tokens > self.results.max_tokens
        return self.arguments is not None and bool(facts.calls) and facts.tokens > self.arguments.max_length // 8


# Shares of the budget that no part of a compacted conversation may exceed, whatever the policy's own figures say.
# With `keep` at 0.10 a conversation begins again at 0.25 of the budget at most and so grows by 0.60 of it before the
# trigger at 0.85. The scan and the renderer both read this table.
SUMMARY_SHARE = 0.05
USER_SHARE = 0.06
# The newest of the user's messages, when it stands before the checkpoint: the task at hand.
NEWEST_SHARE = 0.10
INDEX_SHARE = 0.025
# What the newest exchange may take, when its results are larger than everything else together: it is kept, its
# results are shortened.
GROUP_SHARE = 0.50
# A checkpoint must bring the size to this share of the trigger's level or below, or it is not worth the prompt cache
# that it costs: `keep` is lowered to the newest group if need be.
ROOM_TO_GROW = 0.65

# The shares are meant for a conversation that is compacted at this part of the budget.
USUAL_TRIGGER = 0.85

# Tokens that the fixed wording of the summary message takes, with a margin.
SUMMARY_FRAME_TOKENS = 160
# Tokens that the tags around one of the user's messages take in it.
USER_FRAME_TOKENS = 12
SMALLEST_RESULT = 200


@dataclass(frozen=True, slots=True)
class Frame:
    """What surrounds the body in one request, in tokens.

    ``budget`` is what the input may take (``None``: nobody knows), ``overhead`` what the head, the tools and the
    framing of the request take, ``head_messages`` how many messages the head has. The scan takes a frame whose
    figures are rounded coarsely (``rounded``), so that slow changes do not move checkpoints.
    """

    budget: int | None
    overhead: int
    head_messages: int

    def rounded(self) -> Frame:
        """The frame with the overhead rounded up and the budget down, in steps of under 1 % of the budget."""
        step = max(32, (self.budget or 200_000) // 128)
        step = 1 << (step.bit_length() - 1)
        budget = None if self.budget is None else max(step, self.budget // step * step)
        return Frame(budget, -(-self.overhead // step) * step, self.head_messages)


@dataclass(frozen=True, slots=True)
class Caps:
    """The most that each part may take in this request, in tokens; ``group`` is ``None`` without a known budget."""

    summary: int
    users: int
    newest: int
    index: int
    group: int | None

    def for_span(self, tokens: int) -> Caps:
        """The caps where ``tokens`` of conversation are replaced: a summary is to be half of them at most."""
        return replace(self, summary=min(self.summary, tokens // 2), index=min(self.index, tokens // 4))


def caps(rules: Rules, frame: Frame) -> Caps:
    """The policy's figures, bounded by the shares of the budget, or of less where the trigger's level is lower."""
    level = lowest_level(rules.trigger, frame.budget)
    bases = [frame.budget, None if level is None else int(level / USUAL_TRIGGER) + 1]
    base = min((base for base in bases if base), default=None)
    if base is None:
        return Caps(rules.summary_tokens, rules.user_tokens, rules.user_tokens, rules.index_tokens, None)
    room = max((frame.budget or base) - frame.overhead, base // 8)
    return Caps(
        summary=min(rules.summary_tokens, share_of(SUMMARY_SHARE, base)),
        users=min(rules.user_tokens, share_of(USER_SHARE, base)),
        newest=min(rules.user_tokens, share_of(NEWEST_SHARE, base)),
        index=min(rules.index_tokens, share_of(INDEX_SHARE, base)),
        group=share_of(GROUP_SHARE, room) if frame.budget else None,
    )
