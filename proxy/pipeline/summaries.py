"""Ask for the summaries that compaction inserts: stored ones, new ones from a writer, or digests.

``CheckpointSummaries`` asks, and ``ExchangeModels`` has the models that may write the summaries of one conversation.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import structlog
from cachetools import LRUCache
from msgspec.structs import replace

from proxy.access.authenticator import may_use
from proxy.access.spending import limit_of
from proxy.compaction.format import TextCounter
from proxy.compaction.summary_message import SummaryParts, collect_names, summary_message
from proxy.config import Route
from proxy.dialects.answers import Answers
from proxy.dialects.apis import CHAT
from proxy.dialects.conditions import NO_CONDITIONS, Conditions
from proxy.dialects.request import Request
from proxy.errors import ConfigurationError, ProxyError, SpendingExceeded
from proxy.http.headers import VIA, client_query, for_other_request, for_upstream
from proxy.limits.budget import budget, reserved_output
from proxy.limits.learned import for_others, limit_from_overflow, lower, published
from proxy.overflow import Overflow
from proxy.pipeline.billing import EXPECTED_OUTPUT, Bill, Pricing, pricing
from proxy.pipeline.facts_cache import FactsCache
from proxy.pipeline.job import CompactionJob, last_prompt, whole_prompt
from proxy.summary.allowance import AllowanceSpent
from proxy.summary.extract import extract
from proxy.summary.forms import FORMS
from proxy.summary.model import CONTINUED, UpstreamSummaryModel, Way, output_limit, reasoning_room
from proxy.summary.prompt import Redaction
from proxy.summary.single_flight import NothingToAsk, Progress
from proxy.summary.store import Cause, Lineage, Origin, Patience, StoredSummary, Summaries, SummaryFactory
from proxy.summary.writer import SummaryModels, SummaryTask, SummaryTry, SummaryUnasked
from proxy.summary.writers import SummaryTries
from proxy.telemetry.metrics import SUMMARIES
from proxy.telemetry.record import CANCELED, Usage, summary_record
from proxy.upstream.transport import Answer

if TYPE_CHECKING:  # the runtime has the compactor, which asks for summaries
    from proxy.pipeline.exchange import Exchange
    from proxy.pipeline.runtime import Runtime

log = structlog.get_logger(__name__)

MARKED = 8
"""Messages at the end of a conversation by which it's recognized, three at a time. Results don't count."""

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
            piece = await self._facts.run(lambda: job.summary_piece(empty.entry("", digest=True)), *job.workload)
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
            grown = replaced[position] - replaced.get(start, 0) >= 2 * job.plan.limits_at(position).summary
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
            asked = cause in ("failed", "timeout")
            cause = reason or cause
            if cause == "over_budget":
                SUMMARIES.labels(outcome="over_budget").inc()
            if cause == "unused":
                log.info("summary.not_worth_it", wasted=lineage.wasted, policy=policy)
            SUMMARIES.labels(outcome="digest").inc()
            entry = await self._digest(span, cause)
            return replace(entry, unasked=not asked, over_budget=cause == "over_budget")

        return make

    async def _digest(self, span: _Span, cause: Cause) -> StoredSummary:
        """Return an entry with a digest in place of a model's summary."""
        return replace(await self._facts.run(span.digest, *span.job.workload), cause=cause)


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

    def entry(self, text: str, *, digest: bool = False) -> StoredSummary:
        """Return the entry with a text. This takes milliseconds."""
        job, position, limits = self.job, self.position, self.job.plan.limits_at(self.position)
        format, earlier = job.case.counter.format, self.previous.names if self.previous else None
        names = collect_names(job.body[self.start : position], earlier, format, self.start)
        omitted = len(job.plan.omitted.get(position, ()))
        parts = SummaryParts(job.quoted(position), text, job.archived(position), omitted, job.folders)
        message, index_at = summary_message(parts, limits, job.case.rules, format)
        return StoredSummary(text, message, names, index_at, digest=digest)

    def digest(self) -> StoredSummary:
        """Return the entry with an extract in place of a model's text."""
        job, position, earlier = self.job, self.position, self.previous.text if self.previous else None
        directives = [job.body[index] for index in job.plan.omitted.get(position, ())]
        most, format = job.plan.limits_at(position).summary, job.case.counter.format
        return self.entry(extract(job.body[self.start : position], earlier, most, format, directives), digest=True)


class ExchangeModels(SummaryModels):
    """The models that may write the summaries of a request's conversation.

    The caller's key goes only to the upstream of the caller's request. Models that the caller's team may not use don't
    get its conversations. ``tool`` returns what adds the proxy's own tool to a body, if the request gets the tool.
    """

    def __init__(
        self, runtime: Runtime, exchange: Exchange, tool: Callable[[], Callable[[bytes], bytes] | None] = lambda: None
    ) -> None:
        self._runtime = runtime
        self._exchange = exchange
        self._tool = tool
        self._conditions = NO_CONDITIONS
        self._policy = exchange.caller.policy
        self._settings = self._policy.summary
        same_prompt = not exchange.body.references and not exchange.profile.strict_alternation
        self.may_continue = same_prompt and exchange.dialect.name in FORMS
        self.own = f"{exchange.route.upstream} {exchange.route.model}"

    @property
    def any_for_transcript(self) -> bool:
        first, other = self._settings.model, self._settings.fallback_model
        names = [name for name in (first, other) if name is not None and may_use(self._exchange.caller, name)]
        route = self._exchange.configuration.settings.route
        # The conversation's own model takes the place of the first one.
        return first not in names or any(route(name) for name in names)

    @property
    def refuses_transcripts(self) -> bool:
        return CONTINUED in self._runtime.traits.edits(self._exchange.place)

    def refused_transcript(self) -> None:
        self._runtime.traits.learn(self._exchange.place, (CONTINUED,))
        log.warning("summary.transcript_refused", policy=self._policy.name)

    def with_tool(self, body: bytes) -> bytes:
        tool = self._tool()
        return body if tool is None else tool(body)

    def keep_conditions(self, body: Request) -> None:
        if self._conditions is NO_CONDITIONS:
            scope = self._exchange.scope
            headers = for_other_request(for_upstream(scope["headers"]))
            fields, query = body.outer_fields(), client_query(scope)
            self._conditions = Conditions.of(self._exchange.dialect.name, fields, headers, query)

    async def for_transcript(self, max_tokens: int) -> Sequence[UpstreamSummaryModel]:
        first, other = self._allowed(self._settings.model), self._allowed(self._settings.fallback_model)
        names: list[str | Route] = [first or self._exchange.route, *((other,) if other else ())]
        models = []
        for name in names:
            route = self._exchange.configuration.settings.route(name) if isinstance(name, str) else name
            if route is None:
                log.warning("summary.no_route", model=name, policy=self._policy.name)
                continue
            if self.refuses_transcripts and route.upstream == self._exchange.route.upstream:
                continue
            try:
                models.append(await self._model(route, max_tokens, CHAT.answers))
            except ConfigurationError as error:  # the other models, or a digest, take its place
                log.error("summary.model_unusable", model=name, upstream=route.upstream, reason=error.message)
        return models

    async def for_continuation(self, max_tokens: int) -> UpstreamSummaryModel:
        exchange, route, dialect = self._exchange, self._exchange.route, self._exchange.dialect
        if not self.may_continue:
            raise SummaryUnasked("the conversation can't be continued")
        model = await self._model(route, max_tokens, dialect.answers)
        headers = for_other_request(for_upstream(exchange.scope["headers"]))
        return dataclasses.replace(
            model,
            transport=await exchange.configuration.upstreams.transport(route.upstream, dialect.path, exchange.asker),
            form=FORMS[dialect.name],
            others=(),
            headers=[*headers, (VIA, exchange.via)],
            query=client_query(exchange.scope),
        )

    def _allowed(self, name: str | None) -> str | None:
        """Return the name of a model if the caller's team may use it."""
        if name is None or may_use(self._exchange.caller, name):
            return name
        log.warning("summary.model_not_allowed", model=name, policy=self._policy.name)
        return None

    async def _model(self, route: Route, max_tokens: int, answers: Answers) -> UpstreamSummaryModel:
        """Return the model of a route. ``answers`` reads the usage in its responses.

        Raises ``ConfigurationError`` if its upstream or its tokenizer can't be used.
        """
        runtime, exchange, caller = self._runtime, self._exchange, self._exchange.caller
        limits, key = runtime.limits, (route.upstream, route.model, caller.tenant)
        profile = await limits.profile(route, exchange.configuration)
        counter = limits.measures.counter(profile, CHAT)
        # Reasoning must not use all of a small window that it shares with the transcript.
        shared = (profile.context_window or 0) // 2
        most = min(filter(None, (profile.max_output_tokens, shared)), default=None)
        output = output_limit(route.model, max_tokens, most, reasoning_room(runtime.traits.edits(key)))
        await limits.load(*key)
        learned = limits.learned.get(*key)
        if exchange.provisional is not None and key == exchange.place:
            learned = lower(learned, for_others(exchange.provisional.limit))
        factor = limits.calibration.factor(*key)

        def learn(overflow: Overflow, sent: int, output: int) -> None:
            limit = limit_from_overflow(overflow, sent, output, factor)
            if limit.source == "refusal":
                limits.learned.learn(*key, limit, published(profile, factor))

        near = route.upstream == exchange.route.upstream
        same, conditions = near and route.model == exchange.route.model, self._conditions
        (form, transport), *others = await self._ways(route)
        price_of = pricing(exchange.configuration.price(route, profile))
        return UpstreamSummaryModel(
            transport,
            route.model,
            route.upstream,
            input_limit=budget(profile, reserved_output(profile, output, None), learned, factor),
            max_output=most,
            count=counter.text,
            credential=caller.credential if near else None,
            timeout=max(self._settings.timeout, exchange.configuration.settings.server.deadline),
            on_overflow=learn,
            form=form,
            others=others,
            conditions=partial(conditions.for_call, upstream=near, model=same),
            place=key,
            traits=runtime.traits,
            family=profile.family,
            takes_effort=profile.reasons,
            on_missing=partial(
                exchange.configuration.upstreams.missing(route.upstream).add, caller=f"{caller.tenant} {route.model}"
            ),
            calls=CallRecords(runtime, exchange, route, price_of, answers, counter.text, factor).call,
            trace=exchange.record.trace,
        )

    async def _ways(self, route: Route) -> list[Way]:
        """Return the APIs through which an upstream can summarize, in the order to try them. There is at least one.

        An upstream without an API of its own gets chat completions, which LiteLLM translates.
        """
        exchange, upstream = self._exchange, route.upstream
        upstreams = exchange.configuration.upstreams
        # Most servers have chat completions, and the conversation's own API works.
        own_first = self._conditions.need_own_api
        first = [exchange.dialect.name, "chat"] if own_first else ["chat", exchange.dialect.name]
        ways: list[Way] = []
        for form in sorted(FORMS.values(), key=lambda form: first.index(form.api) if form.api in first else len(first)):
            transport = await upstreams.native(upstream, form.path, f"{exchange.caller.tenant} {route.model}")
            if transport is not None:
                ways.append((form, transport))
        if not ways:
            return [(FORMS["chat"], await upstreams.transport(upstream))]
        certain = exchange.configuration.settings.upstreams[upstream].certain_apis is not None
        return ways[:1] if certain else ways


@dataclass(frozen=True, slots=True)
class CallRecords:
    """Records the calls to a summary model, and reserves and counts what they cost the team.

    A call that ends early counts with the most tokens that it may cost.
    """

    runtime: Runtime
    exchange: Exchange
    route: Route
    price_of: Pricing | None
    answers: Answers
    count: TextCounter
    factor: float

    @asynccontextmanager
    async def call(
        self, sent: int, size: Callable[[], int], most: int, span: str | None
    ) -> AsyncIterator[Callable[[Answer], None]]:
        """See ``summary.model.Calls``."""
        parent, caller, bill, tokens = self.exchange.record, self.exchange.caller, Bill(), 0
        record = summary_record(parent, self.route.upstream, self.route.model)
        if parent.trace is not None and span is not None:
            record.trace = parent.trace.child(span)
        bill.price_of = self.price_of
        money, allowance = self.runtime.money, self.runtime.money.allowances.for_caller(caller)
        limited = limit_of(caller) is not None
        if limited or allowance is not None:
            tokens = await asyncio.to_thread(size)  # counting a long transcript would block the event loop
        async with nullcontext() if allowance is None else allowance.call(tokens + most) as paid:
            if limited:
                cost = bill.amount(Usage(tokens, min(most, EXPECTED_OUTPUT)))
                try:
                    await money.spending.reserve(caller, record.id, cost)
                except SpendingExceeded as error:
                    raise AllowanceSpent("the team's limit is spent") from error
            began, meter = perf_counter(), bill.call(self.answers.tail(), sent, tokens or None)
            try:
                with meter:
                    yield meter.watch
                    meter.complete = True
            except (ProxyError, asyncio.CancelledError) as error:
                record.error = error.code if isinstance(error, ProxyError) else CANCELED
                raise
            finally:
                record.status = meter.status
                record.phases = {"total": round((perf_counter() - began) * 1000, 3)}
                free, complete = meter.free, meter.complete
                await bill.settle(record, partial(asyncio.to_thread, size), self.count, lambda: self.factor)
                if paid is not None and (free or complete):
                    paid.cost = bill.amount(record.usage or Usage()).tokens
                self.runtime.records.recorder.add(record)
