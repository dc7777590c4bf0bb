"""Find the models that may summarize a conversation."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from time import perf_counter
from typing import Protocol

import structlog

from proxy.access.authenticator import may_use
from proxy.access.spending import limit_of
from proxy.compaction.format import TextCounter
from proxy.config import Route
from proxy.config.upstreams import COMPACTS
from proxy.dialects.answers import AnswerTail
from proxy.dialects.apis import CHAT
from proxy.dialects.dialect import NativeCompaction
from proxy.errors import BudgetExceeded, ConfigurationError
from proxy.http.headers import VIA, for_other_request, for_upstream, with_beta
from proxy.limits.budget import budget, reserved_output
from proxy.limits.learned import for_others, limit_from_overflow, lower, published
from proxy.overflow import Overflow
from proxy.overflow.silent import Finished
from proxy.pipeline.billing import EXPECTED_OUTPUT, Bill, Meter, PriceOf
from proxy.pipeline.context import ConversationContext, conversation_key
from proxy.pipeline.costs import price_for, pricing
from proxy.pipeline.description import milliseconds_since
from proxy.pipeline.sending import client_query
from proxy.pipeline.services import Services
from proxy.summary.budget import BudgetSpent
from proxy.summary.chunking import SummaryUnasked
from proxy.summary.forms import FORMS
from proxy.summary.model import ConversationModel, ProviderCompaction, UpstreamSummaryModel, Way, output_limit
from proxy.telemetry.record import Usage, summary_record

log = structlog.get_logger(__name__)


class UsageReader(Protocol):
    """Reads the usage in responses to an API's requests."""

    def read_usage(self, body: bytes) -> Finished:
        """Read the usage of a whole answer."""
        ...


async def summary_models(
    services: Services, context: ConversationContext, max_tokens: int
) -> Sequence[UpstreamSummaryModel]:
    """Return the models that may summarize a conversation, in the order to try them.

    ``max_tokens`` is the maximum size of the summary, which their windows reserve. The caller's key goes only to the
    upstream of the caller's request. Models that the caller's team may not use don't get its conversations.
    """
    policy = context.caller.policy
    first, other = _allowed(context, policy.summary.model), _allowed(context, policy.summary.fallback_model)
    names: list[str | Route] = [first or context.route, *((other,) if other else ())]
    models = []
    for name in names:
        route = context.configuration.settings.route(name) if isinstance(name, str) else name
        if route is None:
            log.warning("summary.no_route", model=name, policy=policy.name)
            continue
        try:
            models.append(await _summary_model(services, context, route, max_tokens))
        except ConfigurationError as error:  # the other models, or a digest, take its place
            log.error("summary.model_unusable", model=name, upstream=route.upstream, reason=error.message)
    return models


def _allowed(context: ConversationContext, name: str | None) -> str | None:
    """Return the name of a model if the caller's team may use it."""
    if name is None or may_use(context.caller, name):
        return name
    log.warning("summary.model_not_allowed", model=name, policy=context.caller.policy.name)
    return None


def own_model(services: Services, context: ConversationContext) -> Callable[[int], Awaitable[ConversationModel]] | None:
    """Return how to get the conversation's own model for notes, or ``None`` if it may not or can't write them."""
    settings = context.caller.policy.summary
    if settings.method == "transcript" or context.body.references or context.profile.strict_alternation:
        return None
    if settings.method == "auto":
        other = settings.model is not None or settings.prompt is not None
        redacts = settings.redact_secrets or bool(settings.redact)
        if other or redacts or not services.cache_reads.served(conversation_key(context)):
            return None
    return partial(_own_model, services, context)


async def _own_model(services: Services, context: ConversationContext, max_tokens: int) -> ConversationModel:
    """Return the conversation's own model. Raises ``ConfigurationError`` if its upstream can't be used."""
    route, dialect = context.route, context.dialect
    model = await _summary_model(services, context, route, max_tokens, dialect.answers)
    headers = for_other_request(for_upstream(context.scope["headers"]))
    own = dataclasses.replace(
        model,
        transport=await context.configuration.upstreams.transport(route.upstream, dialect.path, context.asker),
        form=next(form for form in FORMS.values() if form.api == dialect.name),
        others=(),
        headers=[*headers, (VIA, context.via)],
        query=client_query(context.scope),
    )
    recall, hidden = context.recall, dialect.hidden_tool
    if recall is None or hidden is None or not recall.tool or recall.refused:
        return ConversationModel(own, None)
    return ConversationModel(own, partial(hidden.with_tool, tool=recall.tool))


def provider_compaction(services: Services, context: ConversationContext) -> ProviderCompaction | None:
    """Return how the provider compacts a conversation; ``None`` if the policy or the request rules it out."""
    api, route, body = context.dialect.native, context.route, context.body
    if not context.caller.policy.summary.native or api is None or context.own_summaries:
        return None
    upstream = context.configuration.settings.upstreams[route.upstream]
    stated = context.profile.native_compaction
    possible = stated if api.listed else stated is not False
    if not possible or COMPACTS.get(upstream.provider) != context.dialect.name:
        return None
    if body.compacted or body.references or not api.accepts(body.raw):
        return None
    caller = context.caller.credential
    key = upstream.api_key.get_secret_value() if upstream.api_key else None if caller is None else caller.key
    digest = hashlib.sha256(repr(key).encode()).hexdigest()
    return ProviderCompaction(api, ("native", route.model, digest), partial(_compacting_model, services, context, api))


async def _compacting_model(
    services: Services, context: ConversationContext, api: NativeCompaction, max_tokens: int
) -> UpstreamSummaryModel:
    """Return the model to ask. Raises ``ConfigurationError`` or ``SummaryUnasked`` if there is none."""
    route, dialect = context.route, context.dialect
    transport = await context.configuration.upstreams.native(route.upstream, dialect.path, context.asker)
    if transport is None:
        raise SummaryUnasked("the upstream doesn't have the API of the conversation")
    headers = for_other_request(for_upstream(context.scope["headers"]))
    return dataclasses.replace(
        await _summary_model(services, context, route, max_tokens, api),
        transport=transport,
        form=next(form for form in FORMS.values() if form.api == dialect.name),
        others=(),
        headers=with_beta([*headers, (VIA, context.via)], api.beta),
        query=client_query(context.scope),
        path=api.path,
    )


async def _summary_model(
    services: Services, context: ConversationContext, route: Route, max_tokens: int, answers: UsageReader = CHAT.answers
) -> UpstreamSummaryModel:
    """Return the model of a route. ``answers`` reads the usage in its responses.

    Raises ``ConfigurationError`` if its upstream or its tokenizer can't be used.
    """
    caller = context.caller
    place = route.upstream, route.model, caller.tenant
    profile = await services.profile(route, context.configuration)
    counter = services.measures.counter(profile, CHAT)
    # Reasoning must not use all of a small window that it shares with the transcript.
    shared = (profile.context_window or 0) // 2
    most = min(filter(None, (profile.max_output_tokens, shared)), default=None)
    output = output_limit(route.model, max_tokens, most)
    await services.recall(*place)
    learned = services.learned.get(*place)
    if context.provisional_limit is not None and place == context.place:
        learned = lower(learned, for_others(context.provisional_limit))
    factor = services.calibration.factor(*place)

    def learn(overflow: Overflow, sent: int, output: int) -> None:
        limit = limit_from_overflow(overflow, sent, output, factor)
        if limit.source == "refusal":
            services.learned.learn(*place, limit, published(profile, factor))

    upstreams = context.configuration.upstreams
    price_of = pricing(price_for(context.configuration, route, profile))
    (form, transport), *others = await _ways(context, route)
    return UpstreamSummaryModel(
        transport,
        route.model,
        route.upstream,
        input_limit=budget(profile, reserved_output(profile, output, None), learned, factor),
        max_output=most,
        count=counter.text,
        credential=caller.credential if route.upstream == context.route.upstream else None,
        timeout=caller.policy.summary.timeout,
        budget=services.budgets.of(caller),
        on_overflow=learn,
        form=form,
        others=others,
        on_missing=partial(upstreams.missing(route.upstream).add, caller=f"{caller.tenant} {route.model}"),
        calls=_Recorded(services, context, route, price_of, answers, counter.text, factor).call,
        trace=context.record.trace,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Recorded:
    """Records the calls to a summary model, and reserves and counts what they cost."""

    services: Services
    context: ConversationContext
    route: Route
    price_of: PriceOf | None
    answers: UsageReader
    count: TextCounter
    factor: float

    @asynccontextmanager
    async def call(self, sent: int, size: Callable[[], int], most: int, span: str | None) -> AsyncIterator[Meter]:
        """See ``summary.model.Calls``."""
        parent, caller, bill = self.context.record, self.context.caller, Bill()
        record = summary_record(parent, self.route.upstream, self.route.model)
        if parent.trace is not None and span is not None:
            record.trace = parent.trace.child(span)
        bill.price_of = self.price_of
        if limit_of(caller) is not None:
            cost = bill.amount(Usage(await asyncio.to_thread(size), min(most, EXPECTED_OUTPUT)))
            try:
                await self.services.spending.reserve(caller, record.id, cost)
            except BudgetExceeded as error:
                raise BudgetSpent("the team's budget is used up") from error
        began = perf_counter()
        try:
            with bill.call(AnswerTail(self.answers.read_usage), sent) as meter:
                yield meter
                meter.complete = True
        finally:
            record.status = meter.status
            record.error = None if meter.status else "upstream_error"
            record.phases = {"total": milliseconds_since(began)}
            await bill.settle(record, partial(asyncio.to_thread, size), self.count, lambda: self.factor)
            self.services.recorder.add(record)


async def _ways(context: ConversationContext, route: Route) -> list[Way]:
    """Return the APIs through which an upstream can summarize, in the order to try them. There is at least one.

    An upstream without an API of its own gets chat completions, which LiteLLM translates.
    """
    upstreams, upstream = context.configuration.upstreams, route.upstream
    certain = context.configuration.settings.upstreams[upstream].certain_apis is not None
    ways: list[Way] = []
    # Most servers have chat completions, and the conversation's own API works.
    for form in sorted(FORMS.values(), key=lambda form: (form.api != "chat", form.api != context.dialect.name)):
        transport = await upstreams.native(upstream, form.path, f"{context.caller.tenant} {route.model}")
        if transport is not None:
            ways.append((form, transport))
    if not ways:
        return [(FORMS["chat"], await upstreams.transport(upstream))]
    return ways[:1] if certain else ways
