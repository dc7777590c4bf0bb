"""What a policy asks of the core, and how the budget of a request is shared out."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from proxy.compaction.bounds import UNBOUNDED, Bounds
from proxy.compaction.conditions import Clause, Trigger, lowest_level, share_of
from proxy.compaction.message import RESULT_ROLES, Facts
from proxy.compaction.pins import Pins


@dataclass(frozen=True, slots=True)
class StageRules:
    """When a cheap stage is applied, and how much recent conversation it spares."""

    trigger: Trigger
    keep: Clause


@dataclass(frozen=True, slots=True)
class DuplicateRules(StageRules):
    """Copies of tool results. ``min_length`` is in characters."""

    min_length: int


@dataclass(frozen=True, slots=True)
class ArgumentRules(StageRules):
    """Arguments of old tool calls. ``max_length`` is in characters; ``tools`` are names, ``*`` for all of them.

    ``truncation_text`` may hold ``{characters}`` and ``{id}``; ``None``: the built-in note.
    """

    max_length: int
    truncation_text: str | None
    tools: frozenset[str]


@dataclass(frozen=True, slots=True)
class ResultRules(StageRules):
    """Old tool results. ``max_tokens`` is the size from which a result is shortened; ``exclude`` are tool names.

    ``per_tool`` has the sizes of single tools, where they differ.
    """

    max_tokens: int
    exclude: frozenset[str]
    per_tool: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class MediaRules(StageRules):
    """Old images, audio and files."""


NO_PINS = Pins()


@dataclass(frozen=True)
class Rules:
    """The policy as the core sees it. Sizes are in tokens; a stage that is ``None`` is off.

    ``archive`` says whether what is taken out can be had elsewhere: its id then stands in its place. ``role`` is that
    of the summary message, ``keep_first`` whether the user's first message always stays. ``bounds`` is what a request
    may have besides tokens; a conversation that comes near it is compacted as at the trigger.
    """

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
    duplicates: DuplicateRules | None = None
    media: MediaRules | None = None
    pins: Pins = NO_PINS
    archive: bool = False
    role: str = "user"
    keep_first: bool = True
    bounds: Bounds = UNBOUNDED

    @cached_property
    def stages(self) -> tuple[StageRules, ...]:
        """The cheap stages that are on."""
        return tuple(s for s in (self.duplicates, self.arguments, self.results, self.media) if s is not None)

    @cached_property
    def clauses(self) -> tuple[Clause, ...]:
        """What may set anything off, each clause once."""
        stages = [stage.trigger for stage in self.stages]
        return tuple(dict.fromkeys(clause for trigger in (self.prepare, self.trigger, *stages) for clause in trigger))

    def least_size(self, budget: int | None) -> float:
        """Return the size in tokens below which no clause is met; infinite if there is none.

        A message is at least ten tokens: more than the smallest one takes with its frame.
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
        """Whether a cheap stage may have work with a message: such work is dear the first time, and then remembered."""
        if facts.media and self.media is not None:
            return True
        if facts.role in RESULT_ROLES:
            return self.results is not None and facts.tokens > min(self.results.max_tokens, self._least_per_tool)
        return self.arguments is not None and bool(facts.calls) and facts.tokens > self.arguments.max_length // 8

    @cached_property
    def _least_per_tool(self) -> float:
        return min((tokens for _, tokens in self.results.per_tool), default=math.inf) if self.results else math.inf


# Shares of the budget that no part of a compacted conversation may exceed, whatever the policy's own figures say.
# With `keep` at 0.10 a conversation begins again at about 0.27 of the budget and so grows by 0.58 of it before the
# trigger at 0.85. The scan and the renderer both read this table.
SUMMARY_SHARE = 0.05
USER_SHARE = 0.06
# The newest of the user's messages, if the messages after the checkpoint are still work on it. It stays as it is,
# unless its text is larger than this share.
NEWEST_SHARE = 0.30
# System messages from inside the conversation, the newest first. The newest one may take as much as ``NEWEST_SHARE``.
SYSTEM_SHARE = 0.10
# What the assistant said last.
WORDS_SHARE = 0.02
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
SUMMARY_FRAME_TOKENS = 220
# Tokens that the tags around one of the user's messages take in it.
USER_FRAME_TOKENS = 12
# Tokens of the label that stands for the media parts of one of the user's messages in it.
LABEL_TOKENS = 24
SMALLEST_RESULT = 200
# Tokens of system messages if neither a budget nor a trigger in tokens is known.
MOST_SYSTEM = 20_000
# Tokens of what the assistant said last, in any window.
MOST_WORDS = 2_000


@dataclass(frozen=True, slots=True)
class Envelope:
    """What surrounds the body in one request, in tokens.

    ``budget`` is what the input may take (``None``: nobody knows), ``overhead`` what the head, the tools and the
    framing of the request take, ``head_messages`` how many messages the head has. The scan takes a frame whose
    figures are rounded coarsely (``rounded``), so that slow changes do not move checkpoints. ``overhead_bytes`` is what
    stands around the body in bytes; it matters only where the rules bound them.
    """

    budget: int | None
    overhead: int
    head_messages: int
    overhead_bytes: int = 0

    def rounded(self, level: int | None = None) -> Envelope:
        """The frame with the overhead rounded up and the budget down, in steps of under 1 % of the budget.

        Where the trigger's level (in tokens) is lower than the budget, the steps are parts of that.
        """
        step = max(32, min(self.budget or 200_000, level or 200_000) // 128)
        step = 1 << (step.bit_length() - 1)
        budget = None if self.budget is None else max(step, self.budget // step * step)
        return replace(self, budget=budget, overhead=-(-self.overhead // step) * step)


@dataclass(frozen=True, slots=True)
class SectionLimits:
    """The most that each part may take in this request, in tokens; ``group`` is ``None`` without a known budget."""

    summary: int
    users: int
    newest: int
    system: int
    words: int
    index: int
    group: int | None

    def for_span(self, tokens: int) -> SectionLimits:
        """The caps where ``tokens`` of conversation are replaced: a summary is to be half of them at most."""
        return replace(
            self,
            summary=min(self.summary, tokens // 2),
            words=min(self.words, tokens // 8),
            index=min(self.index, tokens // 8),
        )


def caps(rules: Rules, frame: Envelope) -> SectionLimits:
    """The policy's figures, bounded by the shares of the budget, or of less where the trigger's level is lower or fixed
    parts leave little."""
    level = lowest_level(rules.trigger, frame.budget)
    bases = [frame.budget, None if level is None else int(level / USUAL_TRIGGER) + 1]
    base = min((base for base in bases if base), default=None)
    if base is None:
        users = rules.user_tokens
        return SectionLimits(rules.summary_tokens, users, users, MOST_SYSTEM, MOST_WORDS, rules.index_tokens, None)
    room = max((frame.budget or base) - frame.overhead, base // 8)
    # Where head and tools take more than half, all parts share what they leave.
    base = min(base, 2 * room)
    return SectionLimits(
        summary=min(rules.summary_tokens, share_of(SUMMARY_SHARE, base)),
        users=min(rules.user_tokens, share_of(USER_SHARE, base)),
        newest=share_of(NEWEST_SHARE, base),
        system=share_of(SYSTEM_SHARE, base),
        words=min(MOST_WORDS, share_of(WORDS_SHARE, base)),
        index=min(rules.index_tokens, share_of(INDEX_SHARE, base)),
        group=share_of(GROUP_SHARE, room) if frame.budget else None,
    )
