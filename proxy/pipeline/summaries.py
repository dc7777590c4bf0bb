"""Ask for the summaries that compaction inserts: stored ones, new ones from a writer, or digests.

``CheckpointSummaries`` decides which summary a request needs. ``summary.single_flight`` finds it, or has it made once
for all requests that wait. Then ``_Order.make`` decides whether to ask a model, and makes the tries of the writers.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Hashable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial

import structlog
from cachetools import LRUCache

from proxy.access.spending import AllowanceSpent
from proxy.compaction.summary_message import SummaryParts, collect_names, summary_message
from proxy.dialects.request import Request
from proxy.pipeline.facts_cache import FactsCache
from proxy.pipeline.job import CompactionJob, last_prompt, whole_prompt
from proxy.store.guarded import Change, CircuitBreaker
from proxy.summary import times
from proxy.summary.extract import extract
from proxy.summary.prompt import Redaction
from proxy.summary.quality import SummaryFailed, SummaryRefused, SummaryRejected, SummaryUnasked
from proxy.summary.single_flight import Lineage, NothingToAsk, Progress, Summaries, SummaryOrder
from proxy.summary.store import Cause, Origin, StoredSummary
from proxy.summary.writer import SummaryTask, SummaryTry
from proxy.telemetry.metrics import BREAKER, SUMMARIES

log = structlog.get_logger(__name__)

MARKED = 8
"""Messages at the end of a conversation by which it's recognized, three at a time. Results don't count."""

MUCH = 1_000  # new tokens. A summary of fewer costs about as much as they do

SIZES = 10_000
"""Checkpoints whose expected sizes are remembered, the most recently used ones."""


class CheckpointSummaries:
    """Obtain the summaries of a request's checkpoints. ``breaker`` is by tenant and name of a try."""

    def __init__(self, facts: FactsCache, summaries: Summaries) -> None:
        self.facts = facts
        self.summaries = summaries
        self.breaker = CircuitBreaker(times.FIRST_PAUSE, times.LONGEST_PAUSE, is_failure=_is_failure, report=_report)
        self._sizes: LRUCache[tuple[str, str], int] = LRUCache(SIZES)

    def prepare(self, job: CompactionJob) -> None:
        """Start making the summary of the next checkpoint in the background."""
        positions = [*job.plan.checkpoints, *([job.plan.upcoming] if job.plan.upcoming else [])]
        wanted = positions and job.case.mode == "enforce" and job.case.stores_summaries
        # Without a model, there is nothing to do ahead of need, so don't take a lease and read the store.
        if wanted and any(writer.available for writer in job.case.writers):
            self.summaries.begin(_Order(self, job, positions, ahead=True))

    async def obtain(self, job: CompactionJob, *, may_ask: bool) -> tuple[StoredSummary, Origin]:
        """Return the summary of the last checkpoint and its origin. With ``may_ask`` false, don't wait for a model."""
        if not job.case.stores_summaries:
            # A model's summary that the proxy can't store would cost money in every turn.
            return await _Span(job, job.plan.cut).digest("not_stored", self.facts), "digest"
        order = _Order(self, job, job.plan.checkpoints)
        order.lineage.see(order.place[1])
        if may_ask:
            return await self.summaries.obtain(order)
        stored = await self.summaries.stored(order.place)
        if stored is not None:
            return stored, "digest" if stored.digest else "stored"
        self.summaries.begin(order)
        return await _Span(job, job.plan.cut).digest("waiting", self.facts), "digest"

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
            piece = await self.facts.run(lambda: job.summary_piece(empty.entry("")), *job.workload)
            size = self._sizes[key] = piece.tokens + job.plan.limits_at(cut).summary // 2
        return size

    def lineage(self, job: CompactionJob) -> Lineage:
        """Return the lineage of a conversation, which its last texts identify. Clients change results and old ones."""
        said = [turn.facts.digest for turn in job.body if turn.facts.kind in ("user", "assistant")][-MARKED:]
        ends = range(len(said), min(2, len(said) - 1), -1)
        model = f"{job.case.upstream}\0{job.case.body.model}\0".encode()
        marks = [hashlib.sha256(model + b"".join(said[max(0, end - 3) : end])).hexdigest() for end in ends]
        return self.summaries.lineage(job.case.tenant, job.case.request, marks)


class _Order(SummaryOrder):
    """The summary of the last of these positions of a request. It's ``ahead`` of need if no request waits for it."""

    def __init__(
        self, service: CheckpointSummaries, job: CompactionJob, positions: Sequence[int], *, ahead: bool = False
    ) -> None:
        case = job.case
        super().__init__(case.tenant, job.checkpoints(positions), case.policy.summary.timeout)
        self.lineage = service.lineage(job)
        self._service, self._job, self._ahead = service, job, ahead
        # The request may drop its bytes before the summary is made in the background.
        self._body = copy(case.body) if any(writer.needs_body for writer in case.writers) else None
        for writer in case.writers:
            writer.models.keep_conditions(case.body)

    async def make(self, previous: StoredSummary | None, start: int, progress: Progress) -> StoredSummary:
        """See ``SummaryOrder``. Without a text of a model, make a digest, or ahead of need, raise ``NothingToAsk``."""
        job, case, allowance = self._job, self._job.case, self._job.case.allowance
        position, keys = self.checkpoints[-1].position, [one.key for one in self.checkpoints]
        span, replaced, tries = _Span(job, position, previous, start), job.plan.replaced, list[SummaryTry]()
        if allowance is not None:
            await allowance.load()
        much = max(MUCH, 2 * job.plan.limits_at(position).summary)
        grown = replaced[position] - replaced.get(start, 0) >= much
        reason: Cause | None = None
        if allowance is not None and allowance.spent:
            reason = "over_budget"
        elif self._service.summaries.given_up(self):
            reason = "given_up"
        elif not self.lineage.worth(keys, grown=grown):
            reason = "unused"
        else:
            task = span.task(self._body, self._service.facts)
            tries = [one for writer in case.writers for one in await writer.tries(task)]
        if self._ahead and not tries:
            raise NothingToAsk
        text, cause = await self._first_text(tries, progress)
        if text is not None:
            self.lineage.made(keys, grown=grown)
            return await self._service.facts.run(partial(span.entry, text), *job.workload)
        cause = reason or cause
        if cause == "over_budget":
            SUMMARIES.labels(outcome="over_budget").inc()
        if cause == "unused":
            log.info("summary.not_worth_it", wasted=self.lineage.wasted, policy=case.policy.name)
        SUMMARIES.labels(outcome="digest").inc()
        return await span.digest(cause, self._service.facts)

    async def digest(self, previous: StoredSummary | None, start: int) -> StoredSummary:
        SUMMARIES.labels(outcome="digest").inc()
        span = _Span(self._job, self.checkpoints[-1].position, previous, start)
        return await span.digest("timeout", self._service.facts)

    async def _first_text(self, tries: Sequence[SummaryTry], progress: Progress) -> tuple[str | None, Cause]:
        """Return the first text that one of the tries writes. If there is none, return ``None`` and the cause."""
        case, policy, clock = self._job.case, self._job.case.policy.name, asyncio.get_running_loop().time
        asked, end = False, clock() + case.deadline
        cause: Cause = "no_model"
        waiting = [one for one in tries if not one.after_refusal]
        others = [one for one in tries if one.after_refusal]
        while waiting:
            (key, write, _), *waiting = waiting
            attempt = self._service.breaker.attempt((case.tenant, *key))
            if attempt is None:
                cause = cause if asked else "breaker_open"
                SUMMARIES.labels(outcome="skipped").inc()
                continue
            left = (end - clock()) / (len(waiting) + 1)
            asked = True
            try:
                with attempt:
                    # Not wait_for: its task and the error would form a reference cycle with the conversation.
                    async with progress.trying(max(self.seconds, left), last=not waiting):
                        text = await write()
            except AllowanceSpent:
                return None, "over_budget"
            except (SummaryFailed, SummaryRejected, TimeoutError) as failure:
                cause = "timeout" if isinstance(failure, TimeoutError) or cause == "timeout" else "failed"
                SUMMARIES.labels(outcome="failed").inc()
                log.warning("summary.failed", reason=str(failure) or "timeout", policy=policy)
                if isinstance(failure, SummaryRefused):
                    waiting, others = [*waiting, *others], []
                continue
            SUMMARIES.labels(outcome="made").inc()
            return text, cause
        return None, cause


@dataclass(frozen=True, slots=True)
class _Span:
    """The messages that a summary replaces: those before ``position``. ``previous`` covers those before ``start``."""

    job: CompactionJob
    position: int
    previous: StoredSummary | None = None
    start: int = 0

    def task(self, body: Request | None, facts: FactsCache) -> SummaryTask:
        """Return the task for writers. ``body`` is a copy of the request, if they need it."""
        job, start, end, case = self.job, self.start, self.position, self.job.case
        settings = case.policy.summary
        return SummaryTask(
            turns=[turn for index, turn in enumerate(job.body[start:end], start) if index not in job.plan.pinned],
            format=case.counter.format,
            previous=self.previous.text if self.previous else None,
            max_tokens=job.plan.limits_at(end).summary,
            settings=settings,
            redact=Redaction(secrets=settings.redact_secrets, patterns=settings.redact) if settings.redacts else None,
            body=body,
            fixed=job.fixed,
            last_prompt=partial(last_prompt, job, body or case.body, self.previous, start, end),
            whole_prompt=partial(whole_prompt, job, self.previous, start, end),
            in_thread=partial(facts.run, tenant=case.tenant, size=len(case.body.raw)),
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

    async def digest(self, cause: Cause, facts: FactsCache) -> StoredSummary:
        """Return the entry with an extract in place of a model's text."""
        job, position, earlier = self.job, self.position, self.previous.text if self.previous else None
        most, format = job.plan.limits_at(position).summary, job.case.counter.format

        def made() -> StoredSummary:
            directives = [job.body[index] for index in job.plan.omitted.get(position, ())]
            text = extract(job.body[self.start : position], earlier, most, format, directives)
            return self.entry(text, cause)

        return await facts.run(made, *job.workload)


def _is_failure(error: BaseException) -> bool:
    """Return whether the model failed. Otherwise the caller left, or the proxy sent no request."""
    return isinstance(error, Exception) and not isinstance(error, SummaryUnasked | AllowanceSpent)


def _report(change: Change, key: Hashable, pause: float) -> None:
    BREAKER.labels(change=change).inc()
    # Omit the tenant, because it may be the digest of a caller's key.
    model = key[1:] if isinstance(key, tuple) else key
    log.warning(f"summary.breaker_{change}", model=model, **({"pause": pause} if pause else {}))
