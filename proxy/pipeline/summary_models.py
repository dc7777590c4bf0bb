"""Find the models that may summarize a conversation."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from time import perf_counter

import structlog

from proxy.access.authenticator import may_use
from proxy.access.spending import limit_of
from proxy.compaction.format import TextCounter
from proxy.config import Route
from proxy.dialects.answers import AnswerTail
from proxy.dialects.apis import CHAT
from proxy.dialects.conditions import Conditions
from proxy.dialects.request import Request
from proxy.errors import ConfigurationError, SpendingExceeded
from proxy.http.headers import for_other_request, for_upstream
from proxy.limits.budget import budget, reserved_output
from proxy.limits.learned import for_others, limit_from_overflow, lower, published
from proxy.overflow import Overflow
from proxy.overflow.silent import Finished
from proxy.pipeline.billing import EXPECTED_OUTPUT, Bill, PriceOf
from proxy.pipeline.costs import price_for, pricing
from proxy.pipeline.exchange import Exchange
from proxy.pipeline.job import SummaryTask, SummaryWriter, Writing
from proxy.pipeline.runtime import Runtime
from proxy.pipeline.sending import client_query, milliseconds_since
from proxy.summary.allowance import AllowanceSpent
from proxy.summary.chunking import write
from proxy.summary.forms import FORMS
from proxy.summary.model import UpstreamSummaryModel, Way, output_limit
from proxy.summary.settings import SummarySettings
from proxy.telemetry.record import Usage, summary_record
from proxy.upstream.transport import Answer

log = structlog.get_logger(__name__)


ReadUsage = Callable[[bytes], Finished]
"""Reads the usage of a whole answer of an API."""


class TranscriptWriter(SummaryWriter):
    """Summaries of transcripts. ``models`` returns the models to try, for a summary of at most the given tokens.

    ``may_try`` and ``note`` are those of ``SummaryWriter``.
    """

    def __init__(
        self,
        models: Callable[[int], Awaitable[Sequence[UpstreamSummaryModel]]],
        may_try: Callable[[], bool] = lambda: True,
        note: Callable[[Request], None] = lambda _: None,
    ) -> None:
        self._models = models
        self._may_try = may_try
        self._note = note

    def note(self, body: Request) -> None:
        """See ``SummaryWriter``."""
        self._note(body)

    def may_try(self) -> bool:
        """See ``SummaryWriter``."""
        return self._may_try()

    async def tries(self, task: SummaryTask) -> Sequence[Writing]:
        """See ``SummaryWriter``."""
        request = task.request
        models = await self._models(request.max_tokens)
        return [Writing((model.name,), partial(write, request, model)) for model in models]


def note_conditions(exchange: Exchange, body: Request) -> None:
    """Keep the conditions of the client's request, which may drop its bytes before a summary is made."""
    if exchange.conditions is None:
        headers = for_other_request(for_upstream(exchange.scope["headers"]))
        query = client_query(exchange.scope)
        exchange.conditions = Conditions.of(exchange.dialect.name, body.outer_fields(), headers, query)


async def summary_models(runtime: Runtime, exchange: Exchange, max_tokens: int) -> Sequence[UpstreamSummaryModel]:
    """Return the models that may summarize a conversation, in the order to try them.

    ``max_tokens`` is the maximum size of the summary, which their windows reserve. The caller's key goes only to the
    upstream of the caller's request. Models that the caller's team may not use don't get its conversations.
    """
    policy, settings = exchange.caller.policy, exchange.caller.policy.section(SummarySettings)
    first, other = _allowed(exchange, settings.model), _allowed(exchange, settings.fallback_model)
    names: list[str | Route] = [first or exchange.route, *((other,) if other else ())]
    models = []
    for name in names:
        route = exchange.configuration.settings.route(name) if isinstance(name, str) else name
        if route is None:
            log.warning("summary.no_route", model=name, policy=policy.name)
            continue
        try:
            models.append(await summary_model(runtime, exchange, route, max_tokens))
        except ConfigurationError as error:  # the other models, or a digest, take its place
            log.error("summary.model_unusable", model=name, upstream=route.upstream, reason=error.message)
    return models


def has_summary_model(exchange: Exchange) -> bool:
    """Return whether there is a route to a model that may summarize a conversation."""
    caller, settings = exchange.caller, exchange.caller.policy.section(SummarySettings)
    names = [name for name in (settings.model, settings.fallback_model) if name is not None and may_use(caller, name)]
    # The conversation's own model takes the place of the first one.
    return settings.model not in names or any(exchange.configuration.settings.route(name) for name in names)


def _allowed(exchange: Exchange, name: str | None) -> str | None:
    """Return the name of a model if the caller's team may use it."""
    if name is None or may_use(exchange.caller, name):
        return name
    log.warning("summary.model_not_allowed", model=name, policy=exchange.caller.policy.name)
    return None


async def summary_model(
    runtime: Runtime,
    exchange: Exchange,
    route: Route,
    max_tokens: int,
    read_usage: ReadUsage = CHAT.answers.read_usage,
) -> UpstreamSummaryModel:
    """Return the model of a route. ``read_usage`` reads the usage in its responses.

    Raises ``ConfigurationError`` if its upstream or its tokenizer can't be used.
    """
    caller = exchange.caller
    place = route.upstream, route.model, caller.tenant
    profile = await runtime.limits.profile(route, exchange.configuration)
    counter = runtime.limits.measures.counter(profile, CHAT)
    # Reasoning must not use all of a small window that it shares with the transcript.
    shared = (profile.context_window or 0) // 2
    most = min(filter(None, (profile.max_output_tokens, shared)), default=None)
    manner = runtime.stores.summaries.manner(caller.tenant, f"{route.upstream} {route.model}")
    output = output_limit(route.model, max_tokens, most, manner.reasoning)
    await runtime.limits.load(*place)
    learned = runtime.limits.learned.get(*place)
    if exchange.provisional is not None and place == exchange.place:
        learned = lower(learned, for_others(exchange.provisional.limit))
    factor = runtime.limits.calibration.factor(*place)

    def learn(overflow: Overflow, sent: int, output: int) -> None:
        limit = limit_from_overflow(overflow, sent, output, factor)
        if limit.source == "refusal":
            runtime.limits.learned.learn(*place, limit, published(profile, factor))

    upstreams = exchange.configuration.upstreams
    price_of = pricing(price_for(exchange.configuration, route, profile))
    near = route.upstream == exchange.route.upstream
    holding, conditions = None, exchange.conditions
    if conditions is not None:
        holding = partial(conditions.for_call, upstream=near, model=near and route.model == exchange.route.model)
    (form, transport), *others = await _ways(
        exchange, route, own_first=conditions is not None and conditions.need_own_api
    )
    return UpstreamSummaryModel(
        transport,
        route.model,
        route.upstream,
        input_limit=budget(profile, reserved_output(profile, output, None), learned, factor),
        max_output=most,
        count=counter.text,
        credential=caller.credential if near else None,
        timeout=max(caller.policy.section(SummarySettings).timeout, exchange.configuration.settings.server.deadline),
        allowance=runtime.money.allowances.for_caller(caller),
        on_overflow=learn,
        form=form,
        others=others,
        conditions=holding,
        manner=manner,
        on_missing=partial(upstreams.missing(route.upstream).add, caller=f"{caller.tenant} {route.model}"),
        calls=_Recorded(runtime, exchange, route, price_of, read_usage, counter.text, factor).call,
        trace=exchange.record.trace,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Recorded:
    """Records the calls to a summary model, and reserves and counts what they cost."""

    runtime: Runtime
    exchange: Exchange
    route: Route
    price_of: PriceOf | None
    read_usage: ReadUsage
    count: TextCounter
    factor: float

    @asynccontextmanager
    async def call(
        self, sent: int, size: Callable[[], int], most: int, span: str | None
    ) -> AsyncIterator[Callable[[Answer], None]]:
        """See ``summary.model.Calls``."""
        parent, caller, bill = self.exchange.record, self.exchange.caller, Bill()
        record = summary_record(parent, self.route.upstream, self.route.model)
        if parent.trace is not None and span is not None:
            record.trace = parent.trace.child(span)
        bill.price_of = self.price_of
        if limit_of(caller) is not None:
            cost = bill.amount(Usage(await asyncio.to_thread(size), min(most, EXPECTED_OUTPUT)))
            try:
                await self.runtime.money.spending.reserve(caller, record.id, cost)
            except SpendingExceeded as error:
                raise AllowanceSpent("the team's limit is spent") from error
        began = perf_counter()
        try:
            with bill.call(AnswerTail(self.read_usage), sent) as meter:
                yield meter.watch
                meter.complete = True
        finally:
            record.status = meter.status
            record.error = None if meter.status else "upstream_error"
            record.phases = {"total": milliseconds_since(began)}
            await bill.settle(record, partial(asyncio.to_thread, size), self.count, lambda: self.factor)
            self.runtime.records.recorder.add(record)


async def _ways(exchange: Exchange, route: Route, *, own_first: bool) -> list[Way]:
    """Return the APIs through which an upstream can summarize, in the order to try them. There is at least one.

    ``own_first`` says that the conversation's own API is to be tried before chat completions.
    An upstream without an API of its own gets chat completions, which LiteLLM translates.
    """
    upstreams, upstream = exchange.configuration.upstreams, route.upstream
    certain = exchange.configuration.settings.upstreams[upstream].certain_apis is not None
    ways: list[Way] = []
    # Most servers have chat completions, and the conversation's own API works.
    first = [exchange.dialect.name, "chat"] if own_first else ["chat", exchange.dialect.name]
    for form in sorted(FORMS.values(), key=lambda form: first.index(form.api) if form.api in first else len(first)):
        transport = await upstreams.native(upstream, form.path, f"{exchange.caller.tenant} {route.model}")
        if transport is not None:
            ways.append((form, transport))
    if not ways:
        return [(FORMS["chat"], await upstreams.transport(upstream))]
    return ways[:1] if certain else ways
