"""Serve a conversation, from the client's bytes to the upstream's response and back.

authenticate the caller              pipeline.context, access.authenticator
read and parse the body              http.request_body, dialects.dialect
find the model's limits              pipeline.measures, pipeline.budget
compact, send, and retry             pipeline.attempts
send the response                    endpoints.reply
learn from the reported usage        pipeline.usage_feedback
"""

from __future__ import annotations

import structlog
from starlette.types import Receive, Scope, Send

from proxy.access.admission import BodyLease
from proxy.access.authenticator import Caller, for_model, may_use
from proxy.config import Route
from proxy.dialects.dialect import Dialect, Request
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
from proxy.pipeline.costs import Costs, cost_of, price_for
from proxy.pipeline.description import describe, milliseconds_since, usage_of
from proxy.pipeline.facts_cache import MANY
from proxy.pipeline.item_references import Tap, item_reader
from proxy.pipeline.outcome import Outcome
from proxy.pipeline.services import Services
from proxy.pipeline.snapshot import ConfigSnapshot
from proxy.pipeline.state_recovery import note_size, sized_response
from proxy.pipeline.usage_feedback import Feedback, UsageFeedback, end_of
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

    async def __call__(self, scope: Scope, receive: Receive, send: Sent) -> None:
        """Serve one request."""
        record = record_of(scope)
        record.api = self._dialect.name
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
                        served = await self._serve(request, came, held, clock, send)
                if served is not None:
                    # The client has the whole response, so a disconnect doesn't matter anymore.
                    await self._usage_feedback.record(*served)
        except ClientLeft:
            return
        except ProxyError as error:
            policy = [] if record.policy is None else [(Own.POLICY, record.policy)]
            extra = [(Own.VERDICT, "none"), *policy, (Own.ID, record.id)]
            await answer_error(send, error, extra, shape=self._dialect.errors)

    async def _serve(
        self, request: RequestContext, came: list[bytes], held: BodyLease, clock: CoarseTimer, send: Send
    ) -> Served:
        """Serve one request. Return it if its response can show how the upstream counts, and the response's end.

        ``came`` is a list with the body. This method empties it.
        """
        scope, caller, configuration = request.scope, request.caller, request.configuration
        server = configuration.settings.server
        now = clock.now()
        record = request.record
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
            dialect=self._dialect,
            body=body,
            route=route,
            profile=profile,
            counter=counter,
            memory=held,
            clock=clock,
            deadline=now + server.deadline,
        )
        if not body.stream:
            return await self._answered(context, held, send)
        heartbeat = context.heartbeat = Heartbeat(
            send, server.keepalive, now, lambda: begun(context), self._dialect.heartbeat
        )
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
        tail = self._dialect.answers.tail() if start.answer.status == 200 else None
        feedback = None if tail is None else self._usage_feedback.prepare(context, start, outcome)
        basis = None if tail is None else self._costs.basis(context, outcome)
        conversation = conversation_key(context) if context.caller.policy.summary.method == "auto" else None
        sized = None if tail is None else sized_response(context, start)
        tap = Tap(tail, item_reader(self._service, context, start, outcome))
        pending = context.heartbeat is not None and context.heartbeat.begun
        headers = done(outcome, context.retries)
        if (left := self._service.spending.remaining(context.caller)) is not None:
            headers.append((Own.BUDGET_REMAINING, left))
        if context.advice is not None:
            headers.append((Own.ADVICE, context.advice))
        if context.record.recalls:
            headers.append((Own.RECALL, str(context.record.recalls)))
        if not pending:
            headers += identity(context)
        # From here on there are no retries, and a stream may take hours.
        if context.recall is not None:
            # The response holds its own copy of the request.
            context.recall.body.release()
        if feedback is None or feedback.facts is not None:
            context.body.release()
        del outcome
        if not start.answer.keeps_request:
            held.shrink(context.body.size + (0 if feedback is None else feedback.size))
        if pending and context.heartbeat is not None:
            await context.heartbeat.stop()
            await send_rest(send, start, headers, tap, shape=self._dialect.errors)
        else:
            await send_answer(send, start, headers, tap, shape=self._dialect.errors)
        await tap.finish()
        if tail is None or basis is None:
            return None
        end = end_of(tail)
        if end is None:
            return None
        if sized is not None:
            note_size(self._service, context, sized, end)
        context.record.usage = usage = usage_of(end)
        if usage is not None and conversation is not None:
            self._service.cache_reads.note(conversation, usage)
        if (
            usage is not None
            and (price := price_for(context.configuration, context.route, context.profile)) is not None
        ):
            context.record.cost = cost_of(price, usage, basis)
        # The usage of several rounds says nothing about the size of one prompt.
        return None if feedback is None or context.record.recalls else (feedback, end)


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
