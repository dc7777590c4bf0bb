"""What is done to one request: measure, plan, summarise, render, fit, verify."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import msgspec
import structlog
from msgspec.structs import replace

from proxy.compaction.alternation import alternating
from proxy.compaction.bounds import COMMA, NEARING, SEPARATOR
from proxy.compaction.conditions import any_met
from proxy.compaction.fit import fit
from proxy.compaction.groups import head_length
from proxy.compaction.message import Turn, decode
from proxy.compaction.planning import Plan, make_plan
from proxy.compaction.render import OutgoingMessage, RenderedConversation, render
from proxy.compaction.repair import repaired
from proxy.compaction.rules import Envelope, Rules
from proxy.compaction.summary_message import SummaryParts, collect_identifiers, summary_message
from proxy.compaction.verify import faults, sound
from proxy.config import Policy
from proxy.dialects.chat.counting import Counter
from proxy.dialects.chat.request import ChatRequest
from proxy.pipeline.facts_cache import INLINE_BYTES, MANY, FactsCache
from proxy.store.archive import Archive, Removed
from proxy.summary.breaker import Breaker
from proxy.summary.budget import Budget, BudgetSpent
from proxy.summary.chunking import SummaryFailed, SummaryRequest, write
from proxy.summary.digest import digest
from proxy.summary.model import UpstreamSummaryModel
from proxy.summary.quality import SummaryRejected
from proxy.summary.redaction import redaction
from proxy.summary.store import Checkpoint, Origin, StoredSummary, Summaries, SummaryFactory
from proxy.telemetry.metrics import SUMMARIES
from proxy.tokens import has_remote_media

log = structlog.get_logger(__name__)

PROMPT_VERSION = "5"
"""Part of the key of every summary: raised when the wording of prompt or summary message changes."""

HOPELESS = 1.5
"""A last message of the user's of so many budgets cannot fit, even if the count is off and no answer is left room."""

STRICT_PART = 64
"""This part of the budget is left for the short messages that strict alternation puts between others."""

Verdict = Literal["none", "compacted", "shadow", "off", "failed"]


class CompactionInput(msgspec.Struct, eq=False):
    """A request and all that decides what becomes of it.

    ``budget`` is in tokens; ``models`` gives the models to try, in order, for a summary of so many tokens. ``strict``
    says that the upstream wants user and assistant to speak in turn, ``kept`` that what is made may be stored.
    ``allowance`` is what summaries may still cost.
    """

    body: ChatRequest
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


class Outcome(msgspec.Struct, eq=False):
    """What became of a request: the messages to send (``None``: as they came), and what to report.

    ``before`` and ``after`` are tokens; ``None`` where the bytes alone decided. ``resting`` says that no model was
    asked for the summary because too many attempts failed. ``output`` is what is asked for, in tokens, where the
    request asks for more than fits beside it. ``estimated`` says whether the request, as it came, has images or sound,
    of which ``before`` holds an estimate; ``None`` where nobody looked. ``sizes`` are the tokens of tools and framing,
    and those of each message of the request as it came; ``None`` if nobody counted them.
    """

    verdict: Verdict
    messages: list[bytes] | None = None
    before: int | None = None
    after: int | None = None
    steps: tuple[str, ...] = ()
    summary: Origin | None = None
    resting: bool = False
    output: int | None = None
    estimated: bool | None = None
    parts: Mapping[str, int] = msgspec.field(default_factory=dict)
    sizes: tuple[int, list[int]] | None = None

    @property
    def sent(self) -> int | None:
        """Tokens of the request as it is sent; ``None`` where they were not counted."""
        return self.before if self.messages is None else self.after


@dataclass(frozen=True, slots=True)
class Explanation:
    """What would be done to a request, in tokens and messages; ``head`` messages at its start are never touched."""

    before: int
    after: int
    messages: int
    head: int
    budget: int | None
    steps: tuple[str, ...]
    plan: Plan
    parts: Mapping[str, int]


class Compactor:
    """Compacts requests. Keeps what was counted and which summaries are being made; one per process."""

    def __init__(self, remembered: FactsCache, summaries: Summaries, archive: Archive) -> None:
        self._remembered = remembered
        self._summaries = summaries
        self._archive = archive
        self._breaker = Breaker(time.monotonic)

    def surely_small(self, case: CompactionInput) -> bool:
        """Whether the bytes alone prove that no trigger is reached: a token is at least one byte, a message ten."""
        if case.rules.bounds.reached(len(case.body.messages), len(case.body.raw), NEARING):
            return False
        if case.counter.at_most(case.body.raw) >= case.rules.least_size(case.budget):
            return False
        return not has_remote_media(case.body.raw)

    def untouched(self, case: CompactionInput) -> Outcome | None:
        """The outcome where the mode or the bytes alone say that nothing is done; else ``None``."""
        if case.mode == "off":
            return Outcome("off")
        if self.surely_small(case):
            return Outcome("none" if case.mode == "enforce" else "shadow")
        return None

    async def compact(self, case: CompactionInput, *, may_ask: bool = True) -> Outcome:
        """Bring a request that cannot be left ``untouched`` below its trigger and within its budget.

        With ``may_ask`` false no model is asked: a summary that is not there yet is replaced by a digest, and made in
        the background for the next turn.
        """
        turns, fixed, before = await self._measure(case)
        case, outcome, worth_it = await self._remembered.run_if_many(turns, lambda: _judged(case, turns, fixed, before))
        if not worth_it:
            return outcome
        work = await self._work(case, turns, fixed, before)
        if not _any_trigger(case, before, len(turns)):
            self._prepare(work)
            return outcome
        if case.mode == "shadow":
            return await self._remembered.run_if_many(turns, lambda: self._foreseen(work, outcome))
        return await self._carry_out(work, outcome, may_ask=may_ask)

    async def explain(self, case: CompactionInput) -> Explanation:
        """What would be done to a request; nothing is sent and no summary is made."""
        turns, fixed, before = await self._measure(case)
        case = within_hope(case, turns)
        work = await self._work(case, turns, fixed, before)
        outcome = Outcome("shadow", after=before)
        if _any_trigger(case, before, len(turns)):
            self._foreseen(work, outcome)
        parts = parts_of(turns, fixed)
        after = before if outcome.after is None else outcome.after
        return Explanation(before, after, len(turns), work.head, case.budget, outcome.steps, work.plan, parts)

    async def size(self, case: CompactionInput, outcome: Outcome) -> int:
        """Tokens of the request as it was sent."""
        if outcome.after is not None:
            return outcome.after
        return (await self._measure(case))[2]

    async def sizes(self, case: CompactionInput) -> tuple[int, list[int]]:
        """Return the tokens of tools and framing, and those of each message, of the request as it came."""
        turns, fixed, _ = await self._measure(case)
        return fixed, [turn.facts.tokens for turn in turns]

    async def parts(self, case: CompactionInput, outcome: Outcome) -> dict[str, int]:
        """The sizes of the parts of the request as it was sent, in tokens."""
        if outcome.parts:
            return dict(outcome.parts)
        turns, fixed, _ = await self._measure(case)
        return await self._remembered.run_if_many(turns, lambda: parts_of(turns, fixed))

    async def _measure(self, case: CompactionInput) -> tuple[list[Turn], int, int]:
        """The messages with what is known of them, the tokens of tools and framing, and those of the whole request."""
        turns = await self._remembered.turns(case.body.messages, case.counter, case.tenant)
        fixed = await self._remembered.overhead(case.body, case.counter, case.tenant)
        return turns, fixed, fixed + sum(turn.facts.tokens for turn in turns)

    async def _work(self, case: CompactionInput, turns: list[Turn], fixed: int, before: int) -> CompactionJob:
        def work() -> CompactionJob:
            return _planned(case, turns, fixed, before)

        if len(turns) > MANY:
            return await self._remembered.run(work)
        # Stages remember the forms they make of messages, so only new large messages cost time, or repaired ones.
        cold = sum(len(turn.raw) for turn in turns if not turn.facts.forms and case.rules.may_shorten(turn.facts))
        if cold <= 4 * INLINE_BYTES and len(case.body.raw) > 4 * INLINE_BYTES and _to_repair(case, turns):
            cold = len(case.body.raw)
        return await self._remembered.run(work) if cold > 4 * INLINE_BYTES else work()

    async def _carry_out(self, work: CompactionJob, outcome: Outcome, *, may_ask: bool) -> Outcome:
        piece: OutgoingMessage | None = None
        if work.plan.cut:
            entry, outcome.summary = await self._summary(work, may_ask=may_ask)
            outcome.resting = entry.given_up or (entry.digest and entry.unasked and not entry.over_budget)
            piece = OutgoingMessage(entry.message, entry.tokens, None)
        if work.plan.upcoming is not None:
            self._prepare(work)
        heavy = work.heavy or len(work.turns) > MANY
        finish = partial(self._finished, work, piece, outcome)
        rendered = await self._remembered.run(finish) if heavy else finish()
        if rendered is not None:
            self._keep(work, rendered)
        return outcome

    def _finished(
        self, work: CompactionJob, piece: OutgoingMessage | None, outcome: Outcome
    ) -> RenderedConversation | None:
        """Complete the outcome. Return the messages to send, or ``None`` if the request is left as it came."""
        rendered = leaving = work.render(piece)
        if work.case.strict:
            leaving = RenderedConversation(alternating(rendered.pieces, work.case.counter.message), rendered.steps)
        if not work.gains(leaving):
            outcome.summary = None
            return None
        found = faults([p.turn.facts for p in rendered.pieces if p.turn])
        if found and found > faults([t.facts for t in work.turns]):
            log.error("compaction.invalid_outcome", steps=rendered.steps)
            outcome.verdict, outcome.summary = "failed", None
            return None
        outcome.verdict = "compacted"
        outcome.messages = [piece.raw for piece in leaving.pieces]
        outcome.after = leaving.tokens + work.fixed
        outcome.steps = leaving.steps
        outcome.parts = parts_of([p.turn for p in leaving.pieces if p.turn], work.fixed)
        return rendered

    def _keep(self, work: CompactionJob, rendered: RenderedConversation) -> None:
        """Have the archive keep what was taken out: what stands before each checkpoint, and what was shortened."""
        policy = work.case.policy
        if policy.archive is None:
            return
        removed: list[Removed] = []
        start, previous = 0, None
        for checkpoint in work.checkpoints(work.plan.checkpoints):
            messages = tuple(turn.raw for turn in work.body[start : checkpoint.position])
            removed.append(Removed(archive_id(checkpoint), messages, previous))
            start, previous = checkpoint.position, archive_id(checkpoint)
        removed += [Removed(p.turn.facts.id, (p.turn.raw,)) for p in rendered.pieces if p.turn and p.changed]
        self._archive.keep(work.case.tenant, removed, policy.archive.days * 86_400.0)

    def _foreseen(self, work: CompactionJob, outcome: Outcome) -> Outcome:
        """What enforcing would do, with the summary counted at its cap."""
        stand_in = None
        if work.plan.cut:
            caps = work.plan.caps_at(work.plan.cut)
            stand_in = OutgoingMessage(b"", caps.summary + caps.users + caps.words + caps.index, None)
        rendered = work.render(stand_in)
        if work.gains(rendered):
            outcome.after = rendered.tokens + work.fixed
            outcome.steps = rendered.steps
        return outcome

    def _prepare(self, work: CompactionJob) -> None:
        """Begin making the summary of the next checkpoint, or of one that has just been fixed."""
        positions = [*work.plan.checkpoints, *([work.plan.upcoming] if work.plan.upcoming else [])]
        if positions and work.case.mode == "enforce" and work.case.kept:
            checkpoints = work.checkpoints(positions)
            self._summaries.begin(work.case.tenant, checkpoints, self._maker(work, positions[-1]))

    async def _summary(self, work: CompactionJob, *, may_ask: bool) -> tuple[StoredSummary, Origin]:
        cut = work.plan.cut
        if not work.case.kept:
            # A model's summary that may not be stored would have to be paid for at every turn.
            return await self._digested(work, None, 0, cut), "digest"
        checkpoints = work.checkpoints(work.plan.checkpoints)
        tenant = work.case.tenant
        make = self._maker(work, cut)
        if may_ask:
            return await self._summaries.obtain(tenant, checkpoints, make)
        stored = await self._summaries.stored(tenant, checkpoints[-1].key)
        if stored is not None:
            return stored, "digest" if stored.digest else "stored"
        self._summaries.begin(tenant, checkpoints, make)
        return await self._digested(work, None, 0, cut), "digest"

    def _maker(self, work: CompactionJob, position: int) -> SummaryFactory:
        async def make(previous: StoredSummary | None, start: int) -> StoredSummary:
            settings = work.case.policy.summary
            pinned = work.plan.pinned
            wish = SummaryRequest(
                [turn for index, turn in enumerate(work.body[start:position], start) if index not in pinned],
                previous.text if previous else None,
                work.plan.caps_at(position).summary,
                settings.prompt,
                settings.trim_tokens_to_summarize,
                redaction(secrets=settings.redact_secrets, patterns=settings.redact),
            )
            asked = over_budget = False
            if (allowance := work.case.allowance) is not None:
                await allowance.recall()
                over_budget = allowance.spent
            passed = [p for p in work.plan.checkpoints if p < position]
            given_up = self._summaries.given_up(work.case.tenant, work.checkpoints([*passed, position]))
            for model in () if given_up or over_budget else await work.case.models(wish.max_tokens):
                attempt = self._breaker.attempt((work.case.tenant, model.name))
                if attempt is None:
                    SUMMARIES.labels(outcome="skipped").inc()
                    continue
                asked = True
                try:
                    with attempt:
                        # Not wait_for: its task and the failure would hold each other, and the conversation with them.
                        async with asyncio.timeout(settings.timeout):
                            text = await write(wish, model)
                except BudgetSpent:
                    over_budget = True
                    break
                except (SummaryFailed, SummaryRejected, TimeoutError) as failure:
                    SUMMARIES.labels(outcome="failed").inc()
                    log.warning("summary.failed", reason=str(failure) or "timeout", policy=work.case.policy.name)
                    continue
                SUMMARIES.labels(outcome="made").inc()
                return await self._entry(work, previous, start, position, text)
            if over_budget:
                SUMMARIES.labels(outcome="over_budget").inc()
            SUMMARIES.labels(outcome="digest").inc()
            entry = await self._digested(work, previous, start, position)
            return replace(entry, unasked=over_budget or not asked, over_budget=over_budget)

        return make

    async def _digested(
        self, work: CompactionJob, previous: StoredSummary | None, start: int, position: int
    ) -> StoredSummary:
        """Return the entry that a model's summary is replaced by."""
        text = await self._remembered.run(lambda: work.digest(previous.text if previous else None, start, position))
        return await self._entry(work, previous, start, position, text, digest=True)

    async def _entry(
        self,
        work: CompactionJob,
        previous: StoredSummary | None,
        start: int,
        position: int,
        text: str,
        *,
        digest: bool = False,
    ) -> StoredSummary:
        counter, caps, body = work.case.counter, work.plan.caps_at(position), work.body

        def entry() -> StoredSummary:
            found = collect_identifiers(body[start:position], previous.found if previous else None)
            omitted = len(work.plan.omitted.get(position, ()))
            gist = SummaryParts(work.quoted(position), found, text, work.archived(position), omitted)
            message = summary_message(gist, caps, work.case.rules, counter.text)
            return StoredSummary(text, message, counter.message(decode(message)), found, digest=digest)

        return await self._remembered.run(entry)


@dataclass(slots=True)
class CompactionJob:
    """A request in the middle of its compaction. ``fixed`` are the tokens of tools and framing."""

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
        """Whether something must be shortened that was never shortened before."""
        return bool(self.plan.clips)

    def render(self, summary: OutgoingMessage | None) -> RenderedConversation:
        count = self.case.counter.message
        rendered = render(self.turns, self.head, self.plan, self.case.rules, summary, count)
        budget, most = self.case.budget, self.case.rules.bounds.bytes
        room = None if budget is None else budget - self.fixed - (budget // STRICT_PART if self.case.strict else 0)
        byte_room = None if most is None else most - around_messages(self.case.body)
        return fit(rendered, room, self.case.rules, count, byte_room)

    def gains(self, rendered: RenderedConversation) -> bool:
        """Whether the request is better off with these messages: smaller, or less where a bound was near."""
        if rendered.tokens + self.fixed < self.before:
            return True
        bounds, came = self.case.rules.bounds, self.case.body
        crowded = bounds.reached(len(came.messages), 0) and len(rendered.pieces) < len(came.messages)
        heavy = bounds.reached(0, len(came.raw)) and rendered.bytes + around_messages(came) < len(came.raw)
        return crowded or heavy

    def digest(self, previous: str | None, start: int, end: int) -> str:
        body, caps = self.body, self.plan.caps_at(end)
        directives = [body[index] for index in self.plan.omitted.get(end, ())]
        return digest(body[start:end], previous, caps.summary, self.case.counter.text, directives)

    def checkpoints(self, positions: Sequence[int]) -> list[Checkpoint]:
        """The chained keys of positions: a digest over all messages before, begun from what shapes a summary."""
        known = self._checkpoints.get(tuple(positions))
        if known is not None:
            return known
        case, caps = self.case, self.plan.caps
        shape = (case.tenant, case.policy.fingerprint, case.upstream, case.body.model, PROMPT_VERSION)
        sizes = (caps.summary, caps.users, caps.newest, caps.system, caps.words, caps.index)
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
            # The message that is carried is not quoted in the summary message.
            place = chain.copy()
            place.update(repr(self.plan.carried.get(position)).encode())
            keys.append(Checkpoint(position, place.hexdigest(), content.hexdigest()))
        self._checkpoints[tuple(positions)] = keys
        return keys

    def quoted(self, position: int) -> list[Turn]:
        """The turns before a checkpoint that are not sent beside its summary as they are."""
        apart = {*self.plan.pinned, self.plan.carried.get(position, -1)}
        return [turn for index, turn in enumerate(self.body[:position]) if index not in apart]

    def archived(self, position: int) -> str | None:
        """The id under which the archive keeps all before a checkpoint; ``None`` without an archive."""
        if not self.case.rules.archive:
            return None
        return archive_id(self.checkpoints([position])[0])


def _judged(
    case: CompactionInput, turns: Sequence[Turn], fixed: int, before: int
) -> tuple[CompactionInput, Outcome, bool]:
    """Return the case to work on, the outcome so far, and whether there is something to do."""
    estimated = any(turn.facts.estimated for turn in turns)
    outcome = Outcome("none", before=before, after=before, estimated=estimated)
    outcome.sizes = fixed, [turn.facts.tokens for turn in turns]
    if case.mode == "shadow":
        outcome.verdict = "shadow"
    case = within_hope(case, turns)
    if not turns or not _reached(case, before, len(turns)):
        return case, outcome, False
    # If nothing that may be taken out would make it fit, the upstream decides.
    return case, outcome, not hopeless(case, turns, fixed)


def _reached(case: CompactionInput, tokens: int, messages: int) -> bool:
    rules, budget = case.rules, case.budget
    prepare = any_met(rules.prepare, tokens, messages, budget)
    # The messages are all that is prepared for: bytes are mostly pictures, which need no summary to go.
    prepare = prepare or (bool(rules.prepare) and rules.bounds.reached(messages, 0, NEARING))
    return (prepare and case.mode == "enforce") or _any_trigger(case, tokens, messages)


def _to_repair(case: CompactionInput, turns: Sequence[Turn]) -> bool:
    return case.policy.repair and not sound([turn.facts for turn in turns])


def _planned(case: CompactionInput, turns: list[Turn], fixed: int, before: int) -> CompactionJob:
    """Plan the work on a request. The keys of its checkpoints are ready when it returns."""
    if _to_repair(case, turns):
        # Only a body that is rewritten anyway is repaired; the rest of it is for the upstream to judge.
        turns = repaired(turns, case.counter.message)
    head = head_length(turns)
    overhead = fixed + sum(turn.facts.tokens for turn in turns[:head])
    around = around_messages(case.body, SEPARATOR) + sum(len(turn.raw) + SEPARATOR for turn in turns[:head])
    frame = Envelope(case.budget, overhead, head, around)
    plan = make_plan(turns[head:], case.rules, frame, case.counter.message)
    work = CompactionJob(case, turns, head, fixed, before, plan)
    for positions in (plan.checkpoints, (*plan.checkpoints, *([plan.upcoming] if plan.upcoming else []))):
        if positions:
            work.checkpoints(positions)
    return work


def around_messages(body: ChatRequest, separator: int = COMMA) -> int:
    """The bytes of a body that are not its messages'; between two of these there are so many."""
    return max(0, len(body.raw) - sum(len(raw) + separator for raw in body.messages))


def within_hope(case: CompactionInput, turns: Sequence[Turn]) -> CompactionInput:
    """The case without its bound on bytes where what must stay has more by itself: nothing is spoilt in vain, and the
    upstream has the word. The user's newest message keeps its pictures."""
    most = case.rules.bounds.bytes
    if most is None or len(case.body.raw) <= most or not turns:
        return case
    stays = around_messages(case.body) + sum(len(turn.raw) for turn in turns[: head_length(turns)])
    newest = next((turn for turn in reversed(turns) if turn.facts.role == "user"), None)
    firm = turns[-1] is newest and not case.rules.shorten_last_user_message
    if newest is not None and (newest.facts.media or firm):
        stays += len(newest.raw)
    if stays <= most:
        return case
    bounds = dataclasses.replace(case.rules.bounds, bytes=None)
    return replace(case, rules=dataclasses.replace(case.rules, bounds=bounds))


def hopeless(case: CompactionInput, turns: Sequence[Turn], fixed: int) -> bool:
    """Whether what must stay is too large by itself: head, tools, and the user's newest message at the end."""
    if case.budget is None:
        return False
    stays = fixed_tokens(turns, fixed)
    last = turns[-1].facts
    may_shorten = case.rules.shorten_last_user_message or last.role != "user"
    return stays >= case.budget or (not may_shorten and stays + last.tokens >= HOPELESS * case.budget)


def fixed_tokens(turns: Sequence[Turn], fixed: int) -> int:
    """What nothing may be taken from: the head, tools and framing, in tokens."""
    return fixed + sum(turn.facts.tokens for turn in turns[: head_length(turns)])


def archive_id(checkpoint: Checkpoint) -> str:
    """The id under which the archive keeps what stands before a checkpoint."""
    return checkpoint.content[:20]


def parts_of(turns: Sequence[Turn], fixed: int) -> dict[str, int]:
    """The sizes, in tokens, of the parts of a request that a person could do something about."""
    head = head_length(turns)
    system = sum(turn.facts.tokens for turn in turns[:head])
    users = [turn.facts.tokens for turn in turns if turn.facts.role == "user"]
    largest = max((turn.facts.tokens for turn in turns[head:]), default=0)
    return {
        "system messages": system,
        "tools and framing": fixed,
        "last user message": users[-1] if users else 0,
        "largest message": largest,
    }


def _any_trigger(case: CompactionInput, tokens: int, messages: int) -> bool:
    rules = case.rules
    triggers = [rules.trigger, *(stage.trigger for stage in rules.stages)]
    bounded = rules.bounds.reached(messages, len(case.body.raw))
    return bounded or any(any_met(trigger, tokens, messages, case.budget) for trigger in triggers)
