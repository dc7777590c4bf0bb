"""Obtain the summaries that compaction inserts: stored ones, new ones from a model, or digests."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Hashable, Sequence
from copy import copy
from functools import partial

import structlog
from cachetools import LRUCache
from msgspec.structs import replace

from proxy.compaction.summary_message import SummaryParts, collect_names, summary_message
from proxy.pipeline.facts_cache import FactsCache
from proxy.pipeline.job import CompactionJob, SummaryTask, Writing
from proxy.store.guarded import Change, CircuitBreaker
from proxy.summary.allowance import AllowanceSpent
from proxy.summary.chunking import SummaryFailed, SummaryRequest, SummaryUnasked
from proxy.summary.prompt import redaction
from proxy.summary.quality import SummaryRejected
from proxy.summary.settings import SummarySettings
from proxy.summary.single_flight import NothingToAsk, Progress
from proxy.summary.store import Cause, Lineage, Origin, Patience, StoredSummary, Summaries, SummaryFactory
from proxy.telemetry.metrics import BREAKER, SUMMARIES

log = structlog.get_logger(__name__)

FIRST_PAUSE = 60.0
"""Seconds of the breaker's first pause."""

LONGEST_PAUSE = 600.0
"""Upper bound of a pause, in seconds."""


MARKED = 8
"""Messages at the end of a conversation by which it's recognized, three at a time. Results don't count."""

SIZES = 10_000
"""Checkpoints whose expected sizes are remembered, the most recently used ones."""


class CheckpointSummaries:
    """Obtain the summaries of a request's checkpoints. Keeps the circuit breakers of summary models."""

    def __init__(self, facts: FactsCache, summaries: Summaries) -> None:
        self._facts = facts
        self._summaries = summaries
        self._sizes: LRUCache[tuple[str, str], int] = LRUCache(SIZES)
        self._breaker = CircuitBreaker(FIRST_PAUSE, LONGEST_PAUSE, is_failure=_is_failure, report=_report)

    def prepare(self, job: CompactionJob) -> None:
        """Start making the summary of the next checkpoint in the background."""
        positions = [*job.plan.checkpoints, *([job.plan.upcoming] if job.plan.upcoming else [])]
        wanted = positions and job.case.mode == "enforce" and job.case.kept
        # Without a model, there is nothing to do ahead of need, so don't take a lease and read the store.
        if wanted and any(writer.may_try() for writer in job.case.writers):
            checkpoints = job.checkpoints(positions)
            make, patience = self._maker(job, positions[-1], ahead=True), self._patience(job, positions[-1])
            self._summaries.begin(job.case.tenant, checkpoints, make, patience)

    async def obtain(self, job: CompactionJob, *, may_ask: bool) -> tuple[StoredSummary, Origin]:
        """Return the summary of the last checkpoint and its origin. With ``may_ask`` false, don't wait for a model."""
        cut = job.plan.cut
        if not job.case.kept:
            # A model's summary that the proxy can't store would cost money in every turn.
            return await self._digested(job, None, 0, cut, "not_stored"), "digest"
        checkpoints = job.checkpoints(job.plan.checkpoints)
        tenant = job.case.tenant
        self._lineage(job).see(checkpoints[-1].key)
        make, patience = self._maker(job, cut), self._patience(job, cut)
        if may_ask:
            return await self._summaries.obtain(tenant, checkpoints, make, patience)
        stored = await self._summaries.stored(tenant, checkpoints[-1].key)
        if stored is not None:
            return stored, "digest" if stored.digest else "stored"
        self._summaries.begin(tenant, checkpoints, make, patience)
        return await self._digested(job, None, 0, cut, "waiting"), "digest"

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
            piece = await self._facts.run(
                lambda: job.summary_piece(_entry(job, None, 0, cut, "", digest=True)), *job.place
            )
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
            return await self._digested(job, previous, start, position, "timeout")

        return Patience(job.case.policy.section(SummarySettings).timeout, digest)

    def _maker(self, job: CompactionJob, position: int, *, ahead: bool = False) -> SummaryFactory:
        """Return what makes the entry of a checkpoint. With ``ahead``, it raises ``NothingToAsk`` instead of a digest
        if there is no model to ask.
        """
        # The request may drop its bytes before the summary is made in the background.
        body = copy(job.case.body) if any(writer.needs_body for writer in job.case.writers) else None
        lineage = self._lineage(job)
        for writer in job.case.writers:
            writer.note(job.case.body)

        async def make(previous: StoredSummary | None, start: int, progress: Progress) -> StoredSummary:
            request = _request(job, previous, start, position)
            over_budget = False
            if (allowance := job.case.allowance) is not None:
                await allowance.load()
                over_budget = allowance.spent
            passed = [p for p in job.plan.checkpoints if p < position]
            given_up = self._summaries.given_up(job.case.tenant, job.checkpoints([*passed, position]))
            tries: list[Writing] = []
            keys = [one.key for one in job.checkpoints([*passed, position])]
            unused = not lineage.worth(keys)
            if not given_up and not over_budget and not unused:
                task = SummaryTask(job, body, request, previous, start, position)
                tries = [one for writer in job.case.writers for one in await writer.tries(task)]
            if ahead and not tries:
                raise NothingToAsk
            text, cause = await self._written(job, tries, progress)
            if text is not None:
                lineage.made(keys)
                return await self._facts.run(partial(_entry, job, previous, start, position, text), *job.place)
            over_budget = over_budget or cause == "over_budget"
            if over_budget:
                SUMMARIES.labels(outcome="over_budget").inc()
            SUMMARIES.labels(outcome="digest").inc()
            asked = cause in ("failed", "timeout")
            cause = "over_budget" if over_budget else "given_up" if given_up else "unused" if unused else cause
            if unused:
                log.info("summary.not_worth_it", wasted=lineage.wasted, policy=job.case.policy.name)
            entry = await self._digested(job, previous, start, position, cause)
            return replace(entry, unasked=not asked, over_budget=over_budget)

        return make

    async def _written(
        self, job: CompactionJob, tries: Sequence[Writing], progress: Progress
    ) -> tuple[str | None, Cause]:
        """Return the first text or entry that one of the tries writes. If there is none, return ``None`` and the cause.

        The tries have ``deadline`` together. Requests that wait may skip all but the last one, see ``Patience``.
        """
        policy, asked = job.case.policy, False
        timeout = policy.section(SummarySettings).timeout
        cause: Cause = "no_model"
        end = asyncio.get_running_loop().time() + job.case.deadline
        for number, (key, write) in enumerate(tries, 1):
            attempt = self._breaker.attempt((job.case.tenant, *key))
            if attempt is None:
                cause = cause if asked else "breaker_open"
                SUMMARIES.labels(outcome="skipped").inc()
                continue
            left = (end - asyncio.get_running_loop().time()) / (len(tries) - number + 1)
            asked = True
            try:
                with attempt:
                    # Not wait_for: its task and the error would form a reference cycle with the conversation.
                    async with progress.trying(max(timeout, left), last=number == len(tries)):
                        text = await write()
            except AllowanceSpent:
                return None, "over_budget"
            except (SummaryFailed, SummaryRejected, TimeoutError) as failure:
                cause = "timeout" if isinstance(failure, TimeoutError) or cause == "timeout" else "failed"
                SUMMARIES.labels(outcome="failed").inc()
                log.warning("summary.failed", reason=str(failure) or "timeout", policy=policy.name)
                continue
            SUMMARIES.labels(outcome="made").inc()
            return text, cause
        return None, cause

    async def _digested(
        self, job: CompactionJob, previous: StoredSummary | None, start: int, position: int, cause: Cause
    ) -> StoredSummary:
        """Return an entry with a digest in place of a model's summary."""
        earlier = previous.text if previous else None

        def entry() -> StoredSummary:
            return _entry(job, previous, start, position, job.digest(earlier, start, position), digest=True)

        return replace(await self._facts.run(entry, *job.place), cause=cause)


def _entry(
    job: CompactionJob,
    previous: StoredSummary | None,
    start: int,
    position: int,
    text: str,
    *,
    digest: bool = False,
) -> StoredSummary:
    """Return the entry with a text. This takes milliseconds."""
    format, limits, body = job.case.counter.format, job.plan.limits_at(position), job.body
    found = collect_names(body[start:position], previous.found if previous else None, format, start)
    omitted = len(job.plan.omitted.get(position, ()))
    parts = SummaryParts(job.quoted(position), text, job.archived(position), omitted, job.folders)
    message, place = summary_message(parts, limits, job.case.rules, format)
    return StoredSummary(text, message, found, place, digest=digest)


def _request(job: CompactionJob, previous: StoredSummary | None, start: int, position: int) -> SummaryRequest:
    """Return what to summarize: the messages from ``start`` to ``position``, and the summary before them."""
    settings, pinned = job.case.policy.section(SummarySettings), job.plan.pinned
    return SummaryRequest(
        [turn for index, turn in enumerate(job.body[start:position], start) if index not in pinned],
        job.case.counter.format,
        previous.text if previous else None,
        job.plan.limits_at(position).summary,
        settings.prompt,
        settings.trim_tokens_to_summarize,
        redaction(secrets=settings.redact_secrets, patterns=settings.redact),
    )


def _is_failure(error: BaseException) -> bool:
    """Return whether the model failed. Otherwise the caller left, or the proxy sent no request."""
    return isinstance(error, Exception) and not isinstance(error, SummaryUnasked)


def _report(change: Change, key: Hashable, pause: float) -> None:
    BREAKER.labels(change=change).inc()
    # Omit the tenant, because it may be the digest of a caller's key.
    model = key[1:] if isinstance(key, tuple) else key
    log.warning(f"summary.breaker_{change}", model=model, **({"pause": pause} if pause else {}))
