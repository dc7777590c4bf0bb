"""The state of one request during its compaction."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from proxy.compaction.fit import fit
from proxy.compaction.groups import head_length
from proxy.compaction.planning import Plan, make_plan
from proxy.compaction.pressure import COMMA, SEPARATOR
from proxy.compaction.render import OutgoingMessage, RenderedConversation, render
from proxy.compaction.rules import Envelope, Rules
from proxy.compaction.triggers import any_met
from proxy.compaction.turn import Turn
from proxy.config import Policy
from proxy.dialects.counting import Counter
from proxy.dialects.request import Request
from proxy.summary.budget import Budget
from proxy.summary.digest import digest
from proxy.summary.model import ConversationModel, ProviderCompaction, UpstreamSummaryModel
from proxy.summary.store import Checkpoint

PROMPT_VERSION = "7"
"""A part of every summary's key. Increase it when the wording of the prompt or the summary message changes."""

STRICT_PART = 64
"""The divisor of the budget that gives the tokens reserved for messages that strict alternation inserts."""


class CompactionInput(msgspec.Struct, eq=False):
    """A request, and the settings and limits for its compaction.

    ``budget`` is in tokens. ``models`` returns the models to try, in order, for a summary of at most the given tokens.
    ``strict`` is true if the upstream requires user and assistant messages to alternate. ``kept`` is true if the proxy
    may store summaries for the caller. ``allowance`` is the caller's budget for summaries.
    ``request`` is the request's id, and ``attempt`` the number of attempts before this one.
    Reasoning in the first ``stale_reasoning`` units is removed, because an upstream refused it.
    ``native`` asks the provider to compact. It's ``None`` if the policy, the upstream, or the request rules that out.
    """

    body: Request
    counter: Counter
    policy: Policy
    mode: Literal["enforce", "shadow", "off"]
    budget: int | None
    tenant: str
    upstream: str
    models: Callable[[int], Awaitable[Sequence[UpstreamSummaryModel]]]
    rules: Rules
    strict: bool = False
    kept: bool = True
    allowance: Budget | None = None
    stale_reasoning: int = 0
    request: str = ""
    attempt: int = 0
    largest_budget: int | None = None
    own_model: Callable[[int], Awaitable[ConversationModel]] | None = None
    native: ProviderCompaction | None = None


@dataclass(slots=True)
class CompactionJob:
    """A request during its compaction. ``fixed`` is the tokens of tools and framing."""

    case: CompactionInput
    turns: list[Turn]
    head: int
    fixed: int
    before: int
    plan: Plan
    _checkpoints: dict[tuple[int, ...], list[Checkpoint]] = field(default_factory=dict)

    @property
    def body(self) -> list[Turn]:
        return self.turns[self.head :]

    @property
    def heavy(self) -> bool:
        """Return whether a message must be shortened for the first time."""
        return bool(self.plan.clips)

    def render(self, summary: OutgoingMessage | None) -> RenderedConversation:
        format = self.case.counter.format
        plan = self.plan.behind_native_summary() if summary is not None and summary.native else self.plan
        rendered = render(self.turns, self.head, plan, self.case.rules, summary, format)
        budget, most = self.case.budget, self.case.rules.bounds.bytes
        room = None if budget is None else budget - self.fixed - (budget // STRICT_PART if self.case.strict else 0)
        byte_room = None if most is None else most - around_messages(self.case.body)
        return fit(rendered, room, self.case.rules, format, byte_room)

    def gains(self, rendered: RenderedConversation) -> bool:
        """Return whether these messages make the request smaller, in tokens or in an exceeded bound."""
        if rendered.tokens + self.fixed < self.before:
            return True
        bounds, came = self.case.rules.bounds, self.case.body
        crowded = bounds.reached(len(came.units), 0) and len(rendered.pieces) < len(came.units)
        heavy = bounds.reached(0, len(came.raw)) and rendered.bytes + around_messages(came) < len(came.raw)
        return crowded or heavy

    def digest(self, previous: str | None, start: int, end: int) -> str:
        body, limits = self.body, self.plan.limits_at(end)
        directives = [body[index] for index in self.plan.omitted.get(end, ())]
        return digest(body[start:end], previous, limits.summary, self.case.counter.format, directives)

    def checkpoints(self, positions: Sequence[int]) -> list[Checkpoint]:
        """Return the keys of positions. Each is a digest of the summary's settings and all messages before it."""
        known = self._checkpoints.get(tuple(positions))
        if known is not None:
            return known
        case, limits = self.case, self.plan.limits
        native = () if case.native is None else case.native.key
        shape = (case.tenant, case.policy.fingerprint, case.upstream, case.body.model, PROMPT_VERSION, *native)
        sizes = (limits.summary, limits.users, limits.newest, limits.system, limits.words, limits.index)
        chain = hashlib.sha256(repr((shape, sizes)).encode())
        content = hashlib.sha256(b"body")
        keys = []
        start = 0
        body = self.body
        for position in positions:
            for turn in body[start:position]:
                chain.update(turn.facts.digest)
                content.update(turn.facts.digest)
            start = position
            # The summary message doesn't quote the carried message.
            place = chain.copy()
            place.update(repr(self.plan.current_user_message.get(position)).encode())
            keys.append(Checkpoint(position, place.hexdigest(), content.hexdigest()))
        self._checkpoints[tuple(positions)] = keys
        return keys

    def quoted(self, position: int) -> list[Turn]:
        """Return the turns before a checkpoint, without those that are sent unchanged."""
        apart = {*self.plan.pinned, self.plan.current_user_message.get(position, -1)}
        return [turn for index, turn in enumerate(self.body[:position]) if index not in apart]

    def archived(self, position: int) -> str | None:
        """Return the archive id of the messages before a checkpoint, or ``None`` without an archive."""
        if not self.case.rules.archive:
            return None
        return archive_id(self.checkpoints([position])[0])


def planned(case: CompactionInput, turns: list[Turn], fixed: int, before: int) -> CompactionJob:
    """Plan the compaction of a request, and compute the keys of its checkpoints."""
    if needs_repair(case, turns):
        # The proxy repairs a body only if it rewrites the body anyway. The upstream judges all others.
        turns = case.counter.format.repaired(turns)
    head = head_length(turns)
    overhead = fixed + sum(turn.facts.tokens for turn in turns[:head])
    around = around_messages(case.body, SEPARATOR) + sum(len(turn.raw) + SEPARATOR for turn in turns[:head])
    envelope = Envelope(case.budget, overhead, head, around)
    plan = make_plan(turns[head:], case.rules, envelope, case.counter.format)
    stale = case.stale_reasoning - head
    plan = dataclasses.replace(
        plan,
        stale_reasoning=max(plan.stale_reasoning, stale),
        stale_otherwise=max(plan.stale_otherwise, stale),
    )
    work = CompactionJob(case, turns, head, fixed, before, plan)
    for positions in (plan.checkpoints, (*plan.checkpoints, *([plan.upcoming] if plan.upcoming else []))):
        if positions:
            work.checkpoints(positions)
    return work


def tokens_at_most(case: CompactionInput) -> float:
    """Return an upper bound on the tokens of a request, without tokenizing."""
    return case.counter.at_most(case.body.raw) + case.body.hidden * case.counter.profile.token_ratio


def any_trigger(case: CompactionInput, tokens: int, messages: int) -> bool:
    """Return whether a request meets the condition of the policy or of a stage."""
    rules = case.rules
    triggers = [rules.trigger, *(stage.trigger for stage in rules.stages)]
    bounded = rules.bounds.reached(messages, len(case.body.raw))
    return bounded or any(any_met(trigger, tokens, messages, case.budget) for trigger in triggers)


def needs_repair(case: CompactionInput, turns: Sequence[Turn]) -> bool:
    return case.policy.repair and case.counter.format.needs_repair([turn.facts for turn in turns])


def around_messages(body: Request, separator: int = COMMA) -> int:
    """Return the bytes of a body outside its messages. ``separator`` is the bytes between two messages."""
    return max(0, len(body.raw) - sum(len(raw) + separator for raw in body.units))


def fixed_tokens(turns: Sequence[Turn], fixed: int) -> int:
    """Return the tokens that compaction can't reduce: those of the head, tools, and framing."""
    return fixed + sum(turn.facts.tokens for turn in turns[: head_length(turns)])


def archive_id(checkpoint: Checkpoint) -> str:
    """Return the archive id of the messages before a checkpoint."""
    return checkpoint.content[:20]


def parts_of(turns: Sequence[Turn], fixed: int) -> dict[str, int]:
    """Return the sizes, in tokens, of the parts of a request that its author can change."""
    head = head_length(turns)
    system = sum(turn.facts.tokens for turn in turns[:head])
    users = [turn.facts.tokens for turn in turns if turn.facts.kind == "user"]
    largest = max((turn.facts.tokens for turn in turns[head:]), default=0)
    return {
        "system messages": system,
        "tools and framing": fixed,
        "last user message": users[-1] if users else 0,
        "largest message": largest,
    }
