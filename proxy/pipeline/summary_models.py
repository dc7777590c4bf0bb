"""Find the writers and the models for the summaries of a request's conversation, and record the models' calls."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import structlog

from proxy.access.authenticator import may_use
from proxy.access.spending import AllowanceSpent, limit_of
from proxy.compaction.format import TextCounter
from proxy.config import Route
from proxy.dialects.answers import Answers
from proxy.dialects.apis import CHAT
from proxy.dialects.conditions import NO_CONDITIONS, Conditions
from proxy.dialects.request import Request
from proxy.errors import ConfigurationError, NotFound, ProxyError, SpendingExceeded
from proxy.http.headers import VIA, client_query, for_other_request, for_upstream
from proxy.limits.budget import budget, reserved_output
from proxy.limits.learned import for_others, limit_from_overflow, lower, published
from proxy.overflow import Overflow
from proxy.pipeline.billing import EXPECTED_OUTPUT, Bill, Pricing, pricing
from proxy.pipeline.exchange import Exchange
from proxy.pipeline.runtime import Runtime
from proxy.summary.forms import FORMS, SummaryForm
from proxy.summary.model import CONTINUED, UpstreamSummaryModel, Way, output_limit, reasoning_room
from proxy.summary.quality import SummaryUnasked
from proxy.summary.writer import SummaryModels, SummaryWriter
from proxy.summary.writers import NotesAfterRefusal, NotesWriter, TranscriptWriter
from proxy.telemetry.record import CANCELED, Usage, summary_record
from proxy.upstream.transport import Answer

log = structlog.get_logger(__name__)

WRITERS: Mapping[str, Sequence[type[SummaryWriter]]] = {
    "transcript": (TranscriptWriter, NotesAfterRefusal),
    "continue": (NotesWriter, TranscriptWriter),
}
"""The writers of each ``summary.method``, in the order to try them: from the cheapest to the surest."""


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

    async def for_transcript(self, max_tokens: int, form: SummaryForm | None = None) -> Sequence[UpstreamSummaryModel]:
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
                models.append(await self._model(route, max_tokens, CHAT.answers, form))
            except (ConfigurationError, NotFound) as error:  # the other models, or a digest, take its place
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

    async def _model(
        self, route: Route, max_tokens: int, answers: Answers, form: SummaryForm | None = None
    ) -> UpstreamSummaryModel:
        """Return the model of a route. ``answers`` reads the usage in its responses.

        Raises ``ConfigurationError`` if its upstream or its tokenizer can't be used, or ``NotFound`` if the upstream
        can't have a service's ``form``.
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
        service = [] if form is None else [(form, await exchange.configuration.upstreams.relay(route.upstream))]
        (form, transport), *others = service or await self._ways(route)
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
