"""Ask for the summaries that compaction inserts: stored ones, new ones from a writer, or digests."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog
from cachetools import LRUCache

from proxy.compaction.summary_message import SummaryParts, collect_names, summary_message
from proxy.dialects.request import Request
from proxy.pipeline.facts_cache import FactsCache
from proxy.pipeline.job import CompactionJob, last_prompt, whole_prompt
from proxy.summary.extract import extract
from proxy.summary.prompt import Redaction
from proxy.summary.single_flight import NothingToAsk, Progress
from proxy.summary.store import Cause, Lineage, Origin, Patience, StoredSummary, Summaries, SummaryFactory
from proxy.summary.writer import SummaryTask, SummaryTry
from proxy.summary.writers import SummaryTries
from proxy.telemetry.metrics import SUMMARIES

log = structlog.get_logger(__name__)

MARKED = 8
"""Messages at the end of a conversation by which it's recognized, three at a time. Results don't count."""

MUCH = 1_000  # new tokens. A summary of fewer costs about as much as they do

SIZES = 10_000
"""Checkpoints whose expected sizes are remembered, the most recently used ones."""


class CheckpointSummaries:
    """Obtain the summaries of a request's checkpoints."""

    def __init__(self, facts: FactsCache, summaries: Summaries) -> None:
        self._facts = facts
        self._summaries = summaries
        self._sizes: LRUCache[tuple[str, str], int] = LRUCache(SIZES)
        self._tries = SummaryTries()

    def prepare(self, job: CompactionJob) -> None:
        """Start making the summary of the next checkpoint in the background."""
        positions = [*job.plan.checkpoints, *([job.plan.upcoming] if job.plan.upcoming else [])]
        wanted = positions and job.case.mode == "enforce" and job.case.stores_summaries
        # Without a model, there is nothing to do ahead of need, so don't take a lease and read the store.
        if wanted and any(writer.available for writer in job.case.writers):
            checkpoints = job.checkpoints(positions)
            make, patience = self._maker(job, positions[-1], ahead=True), self._patience(job, positions[-1])
            self._summaries.begin(job.case.tenant, checkpoints, make, patience)

    async def obtain(self, job: CompactionJob, *, may_ask: bool) -> tuple[StoredSummary, Origin]:
        """Return the summary of the last checkpoint and its origin. With ``may_ask`` false, don't wait for a model."""
        cut, tenant = job.plan.cut, job.case.tenant
        if not job.case.stores_summaries:
            # A model's summary that the proxy can't store would cost money in every turn.
            return await self._digest(_Span(job, cut), "not_stored"), "digest"
        checkpoints = job.checkpoints(job.plan.checkpoints)
        self._lineage(job).see(checkpoints[-1].key)
        make, patience = self._maker(job, cut), self._patience(job, cut)
        if may_ask:
            return await self._summaries.obtain(tenant, checkpoints, make, patience)
        stored = await self._summaries.stored(tenant, checkpoints[-1].key)
        if stored is not None:
            return stored, "digest" if stored.digest else "stored"
        self._summaries.begin(tenant, checkpoints, make, patience)
        return await self._digest(_Span(job, cut), "waiting"), "digest"

    async def expected_size(self, job: CompactionJob) -> int:
        """Return the expected tokens of the summary message of the last checkpoint, 0 without a checkpoint.

        Everything but the summary's text is known. The text is expected to have half of its maximum size.
        """
        cut = job.plan.cut
        if not cut:
            return 0
        key = job.case.tenant, job.checkpoints(job.plan.checkpoints)[-1].key
        size = self._sizes.get(key)
        if size is None:
            empty = _Span(job, cut)
            piece = await self._facts.run(lambda: job.summary_piece(empty.entry("")), *job.workload)
            size = self._sizes[key] = piece.tokens + job.plan.limits_at(cut).summary // 2
        return size

    def _lineage(self, job: CompactionJob) -> Lineage:
        """Return the lineage of a conversation, which its last texts identify. Clients change results and old ones."""
        said = [turn.facts.digest for turn in job.body if turn.facts.kind in ("user", "assistant")][-MARKED:]
        ends = range(len(said), min(2, len(said) - 1), -1)
        model = f"{job.case.upstream}\0{job.case.body.model}\0".encode()
        marks = [hashlib.sha256(model + b"".join(said[max(0, end - 3) : end])).hexdigest() for end in ends]
        return self._summaries.lineage(job.case.tenant, job.case.request, marks)

    def _patience(self, job: CompactionJob, position: int) -> Patience:
        """Return how long requests wait for a summary, and the digest that they get then."""

        async def digest(previous: StoredSummary | None, start: int) -> StoredSummary:
            SUMMARIES.labels(outcome="digest").inc()
            return await self._digest(_Span(job, position, previous, start), "timeout")

        return Patience(job.case.policy.summary.timeout, digest)

    def _maker(self, job: CompactionJob, position: int, *, ahead: bool = False) -> SummaryFactory:
        """Return what makes the entry of a checkpoint. With ``ahead``, it raises ``NothingToAsk`` instead of a digest
        if there is no model to ask.
        """
        case = job.case
        # The request may drop its bytes before the summary is made in the background.
        body = copy(case.body) if any(writer.needs_body for writer in case.writers) else None
        lineage = self._lineage(job)
        for writer in case.writers:
            writer.models.keep_conditions(case.body)

        async def make(previous: StoredSummary | None, start: int, progress: Progress) -> StoredSummary:
            span, tries = _Span(job, position, previous, start), list[SummaryTry]()
            if (allowance := case.allowance) is not None:
                await allowance.load()
            checkpoints = job.checkpoints([*(p for p in job.plan.checkpoints if p < position), position])
            keys, replaced = [one.key for one in checkpoints], job.plan.replaced
            much = max(MUCH, 2 * job.plan.limits_at(position).summary)
            grown = replaced[position] - replaced.get(start, 0) >= much
            reason: Cause | None = None
            if not lineage.worth(keys, grown=grown):
                reason = "unused"
            if self._summaries.given_up(case.tenant, checkpoints):
                reason = "given_up"
            if allowance is not None and allowance.spent:
                reason = "over_budget"
            if reason is None:
                task = span.task(body, partial(self._facts.run, tenant=case.tenant, size=len(case.body.raw)))
                tries = [one for writer in case.writers for one in await writer.tries(task)]
            if ahead and not tries:
                raise NothingToAsk
            settings, policy = case.policy.summary, case.policy.name
            text, cause = await self._tries.first_text(
                tries, progress, tenant=case.tenant, policy=policy, seconds=settings.timeout, deadline=case.deadline
            )
            if text is not None:
                lineage.made(keys, grown=grown)
                return await self._facts.run(partial(span.entry, text), *job.workload)
            cause = reason or cause
            if cause == "over_budget":
                SUMMARIES.labels(outcome="over_budget").inc()
            if cause == "unused":
                log.info("summary.not_worth_it", wasted=lineage.wasted, policy=policy)
            SUMMARIES.labels(outcome="digest").inc()
            return await self._digest(span, cause)

        return make

    async def _digest(self, span: _Span, cause: Cause) -> StoredSummary:
        """Return an entry with a digest in place of a model's summary."""
        return await self._facts.run(partial(span.digest, cause), *span.job.workload)


@dataclass(frozen=True, slots=True)
class _Span:
    """The messages that a summary replaces: those before ``position``. ``previous`` covers those before ``start``."""

    job: CompactionJob
    position: int
    previous: StoredSummary | None = None
    start: int = 0

    def task(self, body: Request | None, in_thread: Callable[[Callable[[], Any]], Awaitable[Any]]) -> SummaryTask:
        """Return the task for writers. ``body`` is a copy of the request, if they need it."""
        job, start, text = self.job, self.start, self.previous.text if self.previous else None
        settings, format = job.case.policy.summary, job.case.counter.format
        return SummaryTask(
            [turn for index, turn in enumerate(job.body[start : self.position], start) if index not in job.plan.pinned],
            format,
            text,
            job.plan.limits_at(self.position).summary,
            settings.prompt,
            settings.trim_tokens_to_summarize,
            Redaction(secrets=settings.redact_secrets, patterns=settings.redact) if settings.redacts else None,
            body,
            job.fixed,
            partial(last_prompt, job, body or job.case.body, self.previous, start, self.position),
            partial(whole_prompt, job, self.previous, start, self.position),
            in_thread,
        )

    def entry(self, text: str, cause: Cause | None = None) -> StoredSummary:
        """Return the entry with a text. This takes milliseconds."""
        job, position, limits = self.job, self.position, self.job.plan.limits_at(self.position)
        format, earlier = job.case.counter.format, self.previous.names if self.previous else None
        names = collect_names(job.body[self.start : position], earlier, format, self.start)
        omitted = len(job.plan.omitted.get(position, ()))
        parts = SummaryParts(job.quoted(position), text, job.archived(position), omitted, job.folders)
        message, index_at = summary_message(parts, limits, job.case.rules, format)
        return StoredSummary(text, message, names, index_at, cause)

    def digest(self, cause: Cause) -> StoredSummary:
        """Return the entry with an extract in place of a model's text."""
        job, position, earlier = self.job, self.position, self.previous.text if self.previous else None
        directives = [job.body[index] for index in job.plan.omitted.get(position, ())]
        most, format = job.plan.limits_at(position).summary, job.case.counter.format
        return self.entry(extract(job.body[self.start : position], earlier, most, format, directives), cause)
