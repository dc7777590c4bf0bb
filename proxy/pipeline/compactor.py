"""Compact a request: measure, plan, summarize, render, fit, and verify."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from time import perf_counter

import structlog
from msgspec.structs import replace

from proxy.compaction import keeps
from proxy.compaction.render import RenderedConversation
from proxy.compaction.settings import any_met
from proxy.compaction.state import unloaded_tools
from proxy.compaction.turn import Facts, OutgoingMessage, Turn, faults, head_length
from proxy.constants import DAY
from proxy.dialects.counting import Counter
from proxy.dialects.request import Request
from proxy.pipeline.changes import removed_by
from proxy.pipeline.facts_cache import INLINE_BYTES, MANY, FactsCache
from proxy.pipeline.job import (
    CompactionInput,
    CompactionJob,
    Explanation,
    Forecast,
    Outcome,
    PromptDigests,
    Received,
    SummaryUse,
    any_trigger,
    archive_id,
    around_messages,
    fixed_tokens,
    needs_repair,
    parts_of,
    planned,
    tokens_at_most,
)
from proxy.pipeline.summaries import CheckpointSummaries
from proxy.store.archive import Archive, Removed
from proxy.summary.single_flight import Summaries
from proxy.summary.store import StoredSummary

log = structlog.get_logger(__name__)

SLOW_BYTES = 4 * INLINE_BYTES
"""Bytes of messages whose short forms are made on the event loop. More are made in a thread."""

HOPELESS = 1.5
"""A last user message of this many budgets can't fit, even if the count is too high and no output is reserved."""

NewlyStale = Callable[[CompactionInput, Outcome], Awaitable[int]]
"""Returns the number of first units whose reasoning became invalid, 0 if an outcome has none of it."""


class Compactor:
    """Compact requests. Each process has one compactor, which keeps counts and the summaries in progress."""

    def __init__(self, facts: FactsCache, summaries: Summaries, archive: Archive) -> None:
        self._facts = facts
        self._summaries = CheckpointSummaries(facts, summaries)
        self._archive = archive

    def untouched(self, case: CompactionInput) -> Outcome | None:
        """Return the outcome if the mode or the bytes alone prove that there is nothing to do, else ``None``.

        A token has at least one byte, and a message ten.
        """
        body, rules = case.body, case.rules
        if case.mode == "off":
            return Outcome("off")
        if rules.bounds.reached(len(body.units), len(body.raw), keeps.NEARING):
            return None
        if tokens_at_most(case) >= rules.least_size(case.budget) or body.has_remote_media():
            return None
        return Outcome("none" if case.mode == "enforce" else "shadow")

    async def compact(
        self,
        case: CompactionInput,
        *,
        may_ask: bool = True,
        seconds: float = math.inf,
        newly_stale: NewlyStale | None = None,
    ) -> Outcome:
        """Bring a request below its trigger and within its budget. Call ``untouched`` first.

        With ``may_ask`` false, a digest replaces a summary that isn't stored yet. The model writes that summary in the
        background for the next turn. If everything but the wait for a summary takes ``seconds``, the request stays
        unchanged. If ``newly_stale`` finds invalid reasoning in the outcome, compact once more without it.
        """
        while True:
            outcome, limit = Outcome("failed"), asyncio.timeout(seconds)
            try:
                async with limit:
                    outcome = await self._compact(case, limit, may_ask=may_ask)
            except TimeoutError:
                if not limit.expired():
                    raise
                log.warning("compaction.too_slow", seconds=seconds)
            stale = 0 if newly_stale is None else await newly_stale(case, outcome)
            if not stale:
                return outcome
            case, newly_stale = replace(case, stale_reasoning=stale), None

    async def _compact(self, case: CompactionInput, limit: asyncio.Timeout, *, may_ask: bool) -> Outcome:
        turns, fixed, before = await self._measure(case)
        told = await self._facts.overhead(case.body.instructions(), case.counter, case.tenant)
        told -= case.counter.overhead({})
        judge = partial(_reached, case, turns, fixed, told)
        case, outcome, worth_it = await self._facts.run_if(len(turns) > MANY, judge, case.tenant)
        if not worth_it:
            return outcome
        job = await self._plan(case, turns, fixed, before)
        reason = any_trigger(case, before, turns)
        if reason is None:
            self._summaries.prepare(job)
            return outcome
        checkpoints = len(job.plan.checkpoints)
        # The conversation's last request had all messages before its answer, which is the last assistant message.
        newest = next((index for index in range(len(turns) - 1, -1, -1) if turns[index].facts.kind == "assistant"), 0)
        shared = fixed + sum(turn.facts.tokens for turn in turns[:newest])
        received = outcome.received and replace(outcome.received, shared=shared)
        outcome = replace(outcome, reason=reason, checkpoints=checkpoints, received=received)
        if case.mode == "shadow":
            size = await self._summaries.expected_size(job)
            forecast = await self._facts.run_if(len(turns) > MANY, lambda: _forecast(job, size), case.tenant)
            return replace(outcome, forecast=forecast)
        entry: StoredSummary | None = None
        if job.plan.cut:
            began = perf_counter()
            with _paused(limit):
                entry, origin = await self._summaries.obtain(job, may_ask=may_ask)
            waited = round((perf_counter() - began) * 1000, 3)
            used = SummaryUse(origin, entry.cause, entry.replaced or None, entry.blocked, waited)
            outcome = replace(outcome, summary=used)
        if job.plan.upcoming is not None:
            self._summaries.prepare(job)
        heavy = job.plan.clips or len(job.turns) > MANY or not job.has_cached(entry)
        finish = partial(self._finished, job, entry, outcome)
        outcome, rendered = await self._facts.run_if(bool(heavy), finish, *job.workload)
        if rendered is not None:
            outcome = replace(outcome, archive=self._keep(job, rendered))
        if outcome.messages is not None and outcome.prompt is not None:
            sent = await self._facts.turns(outcome.messages, case.counter, case.tenant)
            prompt = replace(outcome.prompt, digests=tuple(turn.facts.digest for turn in sent))
            outcome = replace(outcome, prompt=prompt)
        return outcome

    async def without_reasoning(self, case: CompactionInput) -> Outcome:
        """Return the messages without the reasoning in the first ``stale_reasoning`` ones, and otherwise unchanged."""
        turns, fixed, before = await self._measure(case)
        format, stale = case.counter.format, case.stale_reasoning
        kept = [
            format.without_reasoning(turn.raw) if index < stale and turn.facts.kind == "assistant" else turn.raw
            for index, turn in enumerate(turns)
        ]
        sent = await self._facts.turns([raw for raw in kept if raw], case.counter, case.tenant)
        return Outcome(
            "compacted",
            messages=[turn.raw for turn in sent],
            received=Received(before),
            after=fixed + sum(turn.facts.tokens for turn in sent),
            prompt=replace(_prompt(turns), digests=tuple(turn.facts.digest for turn in sent)),
        )

    async def explain(self, case: CompactionInput) -> Explanation:
        """Return the effect of compaction on a request. Don't send anything or call a model."""
        turns, fixed, before = await self._measure(case)
        case = within_hope(case, turns, fixed)
        job = await self._plan(case, turns, fixed, before)
        size = await self._summaries.expected_size(job)
        forecast = _forecast(job, size) if any_trigger(case, before, turns) else None
        after, steps = (before, ()) if forecast is None else (forecast.after, forecast.steps)
        parts = parts_of(turns, fixed)
        if live := job.plan.state.tokens:
            parts["in effect, after the summary"] = live
        return Explanation(before, after, len(turns), job.head, case.budget, steps, job.plan, parts)

    async def size(self, body: Request, counter: Counter, tenant: str) -> int:
        """Return the tokens of a request as received."""
        fixed, sizes = await self.sizes(body, counter, tenant)
        return fixed + sum(sizes)

    async def sizes(self, body: Request, counter: Counter, tenant: str) -> tuple[int, list[int]]:
        """Return the tokens of tools and framing, and those of each message, of a request as received."""
        turns = await self._facts.turns_of(body, counter, tenant)
        return await self._facts.overhead(body, counter, tenant), [turn.facts.tokens for turn in turns]

    async def turns(self, case: CompactionInput) -> list[Turn]:
        """Return the messages of a request with their facts."""
        return await self._facts.turns_of(case.body, case.counter, case.tenant)

    async def media(self, case: CompactionInput, outcome: Outcome) -> list[str]:
        """Return the kind of each image, audio, video, and file of a request as the proxy sent it."""
        raws = case.body.units if outcome.messages is None else outcome.messages
        return [kind for turn in await self._facts.turns(raws, case.counter, case.tenant) for kind in turn.facts.media]

    async def parts(self, case: CompactionInput, outcome: Outcome) -> dict[str, int]:
        """Return the sizes of the parts of the request as the proxy sent it, in tokens."""
        if outcome.parts:
            return dict(outcome.parts)
        turns, fixed, _ = await self._measure(case)
        return await self._facts.run_if(len(turns) > MANY, lambda: parts_of(turns, fixed), case.tenant)

    async def _measure(self, case: CompactionInput) -> tuple[list[Turn], int, int]:
        """Return the messages with their facts, the tokens of tools and framing, and those of the whole request."""
        turns = await self._facts.turns_of(case.body, case.counter, case.tenant)
        fixed = await self._facts.overhead(case.body, case.counter, case.tenant)
        return turns, fixed, fixed + sum(turn.facts.tokens for turn in turns)

    async def _plan(self, case: CompactionInput, turns: list[Turn], fixed: int, before: int) -> CompactionJob:
        if len(turns) > MANY:
            plan = lambda: planned(case, turns, fixed, before, needs_repair(case, turns))  # noqa: E731
            return await self._facts.run(plan, case.tenant, len(case.body.raw))
        repair = needs_repair(case, turns)
        # Stages cache the short forms of messages, so only new large messages and repaired ones take time.
        cold = (len(turn.raw) for turn in turns if not turn.facts.made and case.rules.may_shorten(turn.facts))
        slow = len(case.body.raw) > SLOW_BYTES if repair else any(size > SLOW_BYTES for size in accumulate(cold))
        work = partial(planned, case, turns, fixed, before, repair)
        return await self._facts.run_if(slow, work, case.tenant, len(case.body.raw))

    def _finished(
        self, job: CompactionJob, entry: StoredSummary | None, outcome: Outcome
    ) -> tuple[Outcome, RenderedConversation | None]:
        """Return the complete outcome, and the messages to send, or ``None`` if the request stays unchanged."""
        rendered = leaving = job.render(None if entry is None else job.summary_piece(entry))
        if job.case.strict:
            leaving = RenderedConversation(job.case.counter.format.alternating(rendered.pieces), rendered.steps)
        if not job.gains(leaving):
            return replace(outcome, summary=replace(outcome.summary, origin=None)), None
        found = faults([p.turn.facts for p in rendered.pieces if p.turn])
        if found and found > faults([t.facts for t in job.turns]):
            log.error("compaction.invalid_outcome", steps=rendered.steps)
            return replace(outcome, verdict="failed", summary=replace(outcome.summary, origin=None)), None
        outcome = replace(
            outcome,
            verdict="compacted",
            messages=[piece.raw for piece in leaving.pieces],
            after=leaving.tokens + job.fixed,
            steps=leaving.steps,
            parts=parts_of([p.turn for p in leaving.pieces if p.turn], job.fixed),
            retention=job.retention(entry, rendered),
            replacement=rendered.summary_tokens,
            state=rendered.state_tokens,
            unloaded=unloaded_tools(job.plan.state) if rendered.state_tokens else (),
        )
        return outcome, rendered

    def _keep(self, job: CompactionJob, rendered: RenderedConversation) -> tuple[str, ...]:
        """Archive the messages before each checkpoint, and the originals of shortened messages.

        Return the ids of the newest checkpoint, which leads to the earlier ones, and of the shortened messages.
        """
        archive = job.case.policy.archive
        if archive is None:
            return ()
        removed: list[Removed] = []
        start, previous = 0, None
        for checkpoint in job.checkpoints(job.plan.checkpoints):
            messages = tuple([turn.raw for turn in job.body[start : checkpoint.position]])
            removed.append(Removed(archive_id(checkpoint), messages, previous))
            start, previous = checkpoint.position, archive_id(checkpoint)
        shortened = [Removed(p.turn.facts.id, (p.turn.raw,)) for p in rendered.pieces if p.turn and p.changed]
        removed += shortened
        removed += removed_by(job, rendered)
        self._archive.keep(job.case.tenant, removed, archive.days * DAY)
        newest = () if previous is None else (previous,)
        return (*newest, *(one.id for one in shortened[:LISTED]))


LISTED = 50
"""Archive ids of shortened messages that a record lists."""


def _forecast(job: CompactionJob, size: int) -> Forecast | None:
    """Predict the outcome of ``enforce``, with a summary message of ``size`` tokens."""
    stand_in = OutgoingMessage(b"", size, None) if job.plan.cut else None
    rendered = job.render(stand_in)
    if not job.gains(rendered):
        return None
    if stand_in is None:
        return Forecast(rendered.tokens + job.fixed, rendered.steps)
    *_, earlier, last = (0, *job.plan.checkpoints)
    summarized = sum(turn.facts.tokens for turn in job.body[earlier:last])
    return Forecast(rendered.tokens + job.fixed, rendered.steps, summarized, job.plan.limits_at(last).summary)


@contextmanager
def _paused(limit: asyncio.Timeout) -> Iterator[None]:
    """Don't count the time of a part of the work."""
    loop, end = asyncio.get_running_loop(), limit.when()
    left = None if end is None else end - loop.time()
    limit.reschedule(None)
    try:
        yield
    finally:
        limit.reschedule(None if left is None else loop.time() + left)


def _reached(
    case: CompactionInput, turns: Sequence[Turn], fixed: int, told: int
) -> tuple[CompactionInput, Outcome, bool]:
    """Return the input to work on, the outcome so far, and whether there is something to do."""
    case, sizes = within_bytes(case, turns), [turn.facts.tokens for turn in turns]
    before, last = fixed + sum(sizes), turns[-1].facts if turns else None
    stays = fixed + sum(sizes[: head_length(turns)])
    bound = case.counter.format.binds_reasoning == "always"
    estimated = any(turn.facts.rare.estimated for turn in turns)
    outcome = Outcome(
        "shadow" if case.mode == "shadow" else "none",
        received=Received(before, (fixed, sizes), estimated, head=stays - fixed, told=told),
        after=before,
        prompt=_prompt(turns) if bound else None,
    )
    if last is not None and case.largest_budget is not None and hopeless(case, last, stays):
        case = replace(case, budget=case.largest_budget)
    rules, messages = case.rules, len(turns)
    # Only the bound on messages matters here. Bytes are mostly images, which the proxy removes without a summary.
    near = bool(rules.prepare) and rules.bounds.reached(messages, 0, keeps.NEARING)
    prepares = case.mode == "enforce" and (near or any_met(rules.prepare, before, messages, case.budget))
    if last is None or not (prepares or any_trigger(case, before, turns)):
        return case, outcome, False
    if not hopeless(case, last, stays):
        return case, outcome, True
    # The request can't fit. The proxy sends it unchanged, and the upstream decides.
    return case, replace(outcome, reason=any_trigger(case, before, turns)), False


def _prompt(turns: Sequence[Turn]) -> PromptDigests:
    answers = tuple(index for index, turn in enumerate(turns) if turn.facts.kind == "assistant")
    return PromptDigests(tuple(turn.facts.digest for turn in turns), answers)


def within_hope(case: CompactionInput, turns: Sequence[Turn], fixed: int) -> CompactionInput:
    """Return the input without the limits that the parts that must stay exceed.

    The requested output may leave too little room for them. Many upstreams count the prompt alone, so the proxy then
    compacts to a budget without most of that output.
    """
    if turns and case.largest_budget is not None and hopeless(case, turns[-1].facts, fixed_tokens(turns, fixed)):
        case = replace(case, budget=case.largest_budget)
    return within_bytes(case, turns)


def within_bytes(case: CompactionInput, turns: Sequence[Turn]) -> CompactionInput:
    """Return the input without the bound on bytes if the parts that must stay exceed it. The upstream decides then.

    The newest user message keeps its images.
    """
    most = case.rules.bounds.bytes
    if most is None or not turns or len(case.body.raw) <= most:
        return case
    stays = around_messages(case.body) + sum(len(turn.raw) for turn in turns[: head_length(turns)])
    newest = next((turn for turn in reversed(turns) if turn.facts.kind == "user"), None)
    firm = turns[-1] is newest and not case.rules.shorten_last_user_message
    if newest is not None and (newest.facts.media or firm):
        stays += len(newest.raw)
    if stays <= most:
        return case
    bounds = dataclasses.replace(case.rules.bounds, bytes=None)
    return replace(case, rules=dataclasses.replace(case.rules, bounds=bounds))


def hopeless(case: CompactionInput, last: Facts, stays: int) -> bool:
    """Return whether the parts that must stay are too large: head, tools, and a user message at the end.

    ``stays`` is the tokens of the head and the tools, and ``last`` the facts about the last unit.
    """
    if case.budget is None:
        return False
    may_shorten = case.rules.shorten_last_user_message or last.kind != "user"
    return stays >= case.budget or (not may_shorten and stays + last.tokens >= HOPELESS * case.budget)
