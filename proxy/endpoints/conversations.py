"""Serve a conversation, from the client's bytes to the upstream's response and back.

authenticate the caller              pipeline.context, access.authenticator
read and parse the body              http.request_body, dialects.dialect
find the model's limits              pipeline.measures, pipeline.budget
compact, send, and retry             pipeline.attempts
send the response                    endpoints.reply
learn from the reported usage        pipeline.usage_feedback
"""

from __future__ import annotations

from functools import partial

import structlog
from starlette.types import Receive, Scope, Send

from proxy.access.admission import BodyLease
from proxy.access.authenticator import Caller, for_model, may_use
from proxy.access.spending import limit_of
from proxy.config import Route
from proxy.dialects.chat.answers import without_usage
from proxy.dialects.dialect import Dialect
from proxy.dialects.request import Request, fields_of
from proxy.dialects.usage import usage_of
from proxy.endpoints.paths import AZURE, DEPLOYMENT
from proxy.endpoints.reply import send_answer, send_error_event, send_rest
from proxy.endpoints.restrictions import check_body, check_path
from proxy.errors import BadBody, ModelNotAllowed, ProxyError, UnknownModel
from proxy.http.headers import Own
from proxy.http.heartbeat import Heartbeat
from proxy.http.request_body import ClientLeft, Sent, answer_error, leaving, read_body
from proxy.http.timers import CoarseTimer
from proxy.overflow.silent import Finished
from proxy.pipeline.attempts import Attempts
from proxy.pipeline.budget import TokenBudgets
from proxy.pipeline.context import ConversationContext, RequestContext, begin_request, conversation_key
from proxy.pipeline.costs import NO_BASIS, Costs, Pricing, dearer, price_for, pricing
from proxy.pipeline.description import describe, milliseconds_since
from proxy.pipeline.facts_cache import MANY
from proxy.pipeline.item_references import Tap, item_reader
from proxy.pipeline.outcome import Outcome
from proxy.pipeline.response_start import ResponseStart
from proxy.pipeline.services import Services
from proxy.pipeline.snapshot import ConfigSnapshot
from proxy.pipeline.state_recovery import background_response, note_size, sized_response
from proxy.pipeline.usage_feedback import Feedback, UsageFeedback
from proxy.telemetry.model_names import shown_model
from proxy.telemetry.record import record_of
from proxy.upstream.relay import without_api_version

log = structlog.get_logger(__name__)


UNIT_BYTES = 1_000
"""Bytes of memory that a request takes for each unit, such as a chat message, in addition to its body."""


Served = tuple[Feedback, Finished] | None


class Conversations:
    """The endpoint of one dialect, such as ``POST /v1/chat/completions``."""

    def __init__(self, service: Services, dialect: Dialect) -> None:
        self._service = service
        self._dialect = dialect
        budgets = TokenBudgets(service)
        self._attempts = Attempts(service, budgets)
        self._costs = Costs()
        self._usage_feedback = UsageFeedback(service, budgets, self._attempts.compaction_input)
        self.holders = (budgets, self._attempts, self._costs, self._usage_feedback)
        """What this endpoint remembers of tenants, so that maintenance can make it forget them."""

    async def __call__(self, scope: Scope, receive: Receive, send: Sent) -> None:
        """Serve one request."""
        record = record_of(scope)
        record.api = self._dialect.name
        contexts: list[ConversationContext] = []
        try:
            service = self._service
            request = begin_request(service, scope)
            check_path(scope, request.caller)
            await service.spending.check(request.caller)
            with service.bodies.lease() as held:
                async with service.quotas.admit(request.caller):
                    limit = request.configuration.settings.server.body_limit
                    # `_serve` empties the list. A variable here would keep the body until the response ends.
                    came = [await read_body(scope, receive, limit, held)]
                    with leaving(receive, send) as clock:
                        served = await self._serve(request, came, held, clock, send, contexts)
                if served is not None:
                    # The client has the whole response, so a disconnect doesn't matter anymore.
                    await self._settle(contexts)
                    await self._usage_feedback.record(*served)
        except ClientLeft:
            return
        except ProxyError as error:
            policy = [] if record.policy is None else [(Own.POLICY, record.policy)]
            extra = [(Own.VERDICT, "none"), *policy, (Own.ID, record.id)]
            await answer_error(send, error, extra, shape=self._dialect.errors)
        finally:
            await self._settle(contexts)

    async def _serve(
        self,
        request: RequestContext,
        came: list[bytes],
        held: BodyLease,
        clock: CoarseTimer,
        send: Send,
        contexts: list[ConversationContext],
    ) -> Served:
        """Serve one request. Return it if its response can show how the upstream counts, and the response's end.

        ``came`` is a list with the body. This method empties it, and adds the request's context to ``contexts``.
        """
        scope, caller, configuration = request.scope, request.caller, request.configuration
        server = configuration.settings.server
        now, record = clock.now(), request.record
        record.phases["body"] = milliseconds_since(request.started)
        record.bytes_in = len(came[0])
        body = await self._dialect.parse(came.pop())
        if (deployment := scope.get(DEPLOYMENT)) is not None:
            body = body.named(deployment)
        if len(body.units) > MANY:
            await held.more(UNIT_BYTES * len(body.units))
        record.stream, record.model = body.stream, shown_model(body.model) if body.model else None
        route = _route(configuration, body, caller, self._dialect)
        record.upstream, record.upstream_model = route.upstream, shown_model(route.model)
        if scope.get(AZURE) and configuration.settings.upstreams[route.upstream].provider != "azure":
            query = without_api_version(scope["query_string"].decode("latin-1"))
            scope = {**scope, "query_string": query.encode("latin-1")}
        if caller.models is not None:
            await check_body(scope, caller, body.raw)
        if not body.units and limit_of(caller) is not None:
            fields_of(body.raw)  # raises BadBody, because a budget can't count what can't be read
        caller = for_model(caller, body.model or "")
        record.policy = caller.policy.name
        profile, counter = await self._service.measure(route, configuration, self._dialect)
        context = ConversationContext(
            record=record,
            started=request.started,
            configuration=configuration,
            scope=scope,
            via=request.via,
            caller=caller,
            bill=request.bill,
            dialect=self._dialect,
            body=body,
            route=route,
            profile=profile,
            counter=counter,
            memory=held,
            clock=clock,
            deadline=now + server.deadline,
        )
        contexts.append(context)
        context.bill.price_of = price = pricing(price_for(configuration, route, profile))
        context.asks_usage = self._attempts.usage_requests.wanted(context, priced=price is not None)
        try:
            return await self._bridged(context, held, send, now)
        finally:
            await context.close_answer()

    async def _bridged(self, context: ConversationContext, held: BodyLease, send: Send, now: float) -> Served:
        """Answer a request, with heartbeats if its client wants a stream. ``now`` is when its body had arrived."""
        if not context.body.stream:
            return await self._answered(context, held, send)
        every = context.configuration.settings.server.keepalive
        heartbeat = context.heartbeat = Heartbeat(send, every, now, lambda: begun(context), self._dialect.heartbeat)
        try:
            return await self._answered(context, held, send)
        except ProxyError as error:
            if not heartbeat.begun:
                raise
            await heartbeat.stop()
            await send_error_event(send, error, self._dialect.errors)
            return None
        finally:
            heartbeat.close()

    async def _answered(self, context: ConversationContext, held: BodyLease, send: Send) -> Served:
        start, outcome = await self._attempts.run(context)
        describe(context, outcome)
        answered = start.answer.status == 200
        feedback = self._usage_feedback.prepare(context, start, outcome) if answered else None
        if answered:
            basis = self._costs.basis(context, outcome)
            if isinstance(context.bill.price_of, Pricing):
                context.bill.price_of = Pricing(context.bill.price_of.price, basis)
        conversation = conversation_key(context) if context.caller.policy.summary.method == "auto" else None
        sized = sized_response(context, start) if answered else None
        context.bill.background = background_response(context, start) if answered else None
        room = self._service.archive.writes.room if outcome.verdict == "compacted" else None
        reader = item_reader(self._service, context, start, outcome)
        tap = None if reader is None and room is None else Tap(reader, room)
        headers = self._headers(context, outcome)
        # From here on there are no retries, and a stream may take hours.
        if context.recall is not None:
            # The response holds its own copy of the request.
            context.recall.body.release()
        if outcome.after is not None or context.counter is None:
            # Otherwise the body must be counted if the upstream reports no usage.
            context.body.release()
        del outcome
        if not start.answer.keeps_request:
            held.shrink(context.body.size + (0 if feedback is None else feedback.size))
        await self._forward(context, start, headers, tap, send)
        meter = context.bill.last
        if not answered or meter is None:
            return None
        await meter.unpack()
        if (end := meter.end) is None:
            return None
        if sized is not None:
            note_size(self._service, context, sized, end)
        if conversation is not None and (usage := usage_of(end)) is not None:
            self._service.cache_reads.note(conversation, usage)
        # The usage of several rounds says nothing about the size of one prompt.
        return None if feedback is None or context.record.recalls else (feedback, end)

    def _headers(self, context: ConversationContext, outcome: Outcome) -> list[tuple[str, str]]:
        headers = done(outcome, len(context.retries))
        if (left := self._service.spending.remaining(context.caller)) is not None:
            headers.append((Own.BUDGET_REMAINING, left))
        if context.advice is not None:
            headers.append((Own.ADVICE, context.advice))
        if context.record.recalls:
            headers.append((Own.RECALL, str(context.record.recalls)))
        return headers

    async def _forward(
        self,
        context: ConversationContext,
        start: ResponseStart,
        headers: list[tuple[str, str]],
        tap: Tap | None,
        send: Send,
    ) -> None:
        """Send the response to the client."""
        shape, hide = self._dialect.errors, without_usage if context.asks_usage else None
        linger = limit_of(context.caller) is not None
        if context.heartbeat is not None and context.heartbeat.begun:
            await context.heartbeat.stop()
            await send_rest(send, start, headers, tap, shape=shape, hide=hide, linger=linger)
        else:
            await send_answer(send, start, headers + identity(context), tap, shape=shape, hide=hide, linger=linger)
        if tap is not None:
            await tap.finish()

    async def _settle(self, contexts: list[ConversationContext]) -> None:
        """Count what the calls of a request cost, also if the client left. Errors are logged."""
        while contexts:
            context = contexts.pop()
            counter = context.counter
            try:
                if (limit := limit_of(context.caller)) is not None and limit.usd is not None:
                    await self._priced_by_answer(context)
                await context.bill.settle(
                    context.record,
                    partial(self._attempts.counted, context),
                    None if counter is None else counter.text,
                    partial(self._service.calibration.factor, *context.place),
                )
                self._service.spending.settle(context.record)
                if (id := context.bill.background) is not None:
                    self._service.background.begin(context.caller.tenant, id, context.route.model, context.record)
            except Exception as error:  # the client has its response
                log.exception("counting.failed", error=type(error).__name__)

    async def _priced_by_answer(self, context: ConversationContext) -> None:
        """With a budget in US dollars, let the dearer model count: that of the request, or that of its answer.

        A body may name several models, of which the upstream takes one, or none.
        """
        meter, known = context.bill.last, context.bill.price_of
        if meter is None:
            return
        await meter.unpack()
        if not meter.model or meter.model == context.route.model:
            return
        route = Route(context.route.upstream, meter.model, None)
        profile = await self._service.profile(route, context.configuration)
        price = price_for(context.configuration, route, profile)
        own = known if isinstance(known, Pricing) else None
        if price is not None and dearer(price, None if own is None else own.price):
            context.bill.price_of = Pricing(price, NO_BASIS if own is None else own.basis)


def _route(configuration: ConfigSnapshot, body: Request, caller: Caller, dialect: Dialect) -> Route:
    model = body.model or ""
    route = configuration.route(model, dialect.name)
    if body.model is None and (route is None or not may_use(caller, model)):
        raise BadBody(
            "The body isn't a JSON object, or has no model. Send a JSON object with 'model'.",
            param="model",
        )
    if route is None:
        raise UnknownModel(
            f"This proxy doesn't serve the model {model[:100]!r}. Use a model that GET /v1/models lists.",
            param="model",
        )
    if not may_use(caller, model):
        raise ModelNotAllowed(
            f"This key may not use the model {model[:100]!r}. Use another, or ask the operator to allow it.",
            param="model",
        )
    return route


def begun(context: ConversationContext) -> list[tuple[str, str]]:
    """Return the headers of a response that starts before the outcome is known. A comment reports the outcome."""
    return [(Own.VERDICT, "pending"), *identity(context)]


def identity(context: ConversationContext) -> list[tuple[str, str]]:
    """Return the response headers that name the policy and the request."""
    return [(Own.POLICY, context.caller.policy.name), (Own.ID, context.record.id)]


def done(outcome: Outcome, retries: int) -> list[tuple[str, str]]:
    """Return the response headers that depend on the outcome."""
    headers: list[tuple[str, str]] = [(Own.VERDICT, outcome.verdict), (Own.RETRIES, str(retries))]
    if outcome.before is not None:
        headers.append((Own.TOKENS_BEFORE, str(outcome.before)))
    result = outcome.forecast or outcome
    if result.after is not None:
        headers.append((Own.TOKENS_AFTER, str(result.after)))
    if result.steps:
        headers.append((Own.STEPS, ",".join(result.steps)))
    if outcome.output is not None:
        headers.append((Own.OUTPUT, "clamped"))
    if outcome.summary is not None:
        headers.append((Own.SUMMARY, outcome.summary))
    if outcome.breaker_open:
        headers.append((Own.BREAKER, "open"))
    return headers
