"""Serve a conversation, from the client's bytes to the upstream's response and back.

authenticate the caller              pipeline.exchange, access.authenticator
read and parse the body              http.request_body, dialects
find the model's limits              pipeline.runtime
compact, send, and retry             pipeline.answering
send the response                    endpoints.reply
count what it cost                   pipeline.sending
learn from the response              pipeline.sending
"""

from __future__ import annotations

import asyncio
from time import perf_counter

from starlette.types import Receive, Scope, Send

from proxy.access.authenticator import Caller, for_model, may_use
from proxy.access.quotas import BodyLease
from proxy.access.spending import limit_of
from proxy.config import Route
from proxy.dialects.apis import Dialect
from proxy.dialects.chat.answers import without_usage
from proxy.dialects.request import LONG_BETA, Request, fields_of
from proxy.endpoints.paths import AZURE, DEPLOYMENT
from proxy.endpoints.reply import send_answer, send_error_event
from proxy.endpoints.restrictions import check_body, check_budget, check_path
from proxy.errors import BadBody, ModelNotAllowed, ProxyError, UnknownModel
from proxy.http.headers import Own
from proxy.http.request_body import ClientLeft, Sent, answer_error, leaving, read_body
from proxy.http.sse import Heartbeat
from proxy.pipeline.answering import Answering
from proxy.pipeline.attempt import Departure
from proxy.pipeline.billing import pricing
from proxy.pipeline.exchange import Exchange, RequestContext, TimeLeft, begin_request
from proxy.pipeline.facts_cache import MANY
from proxy.pipeline.runtime import ConfigSnapshot, Runtime
from proxy.pipeline.sending import Watch, milliseconds_since, settle
from proxy.telemetry.record import record_of, shown_model
from proxy.upstream.relay import without_api_version

UNIT_BYTES = 1_000
"""Bytes of memory that a request takes for each unit, such as a chat message, in addition to its body."""


class Conversations:
    """The endpoint of one dialect, such as ``POST /v1/chat/completions``."""

    def __init__(self, service: Runtime, dialect: Dialect) -> None:
        self._service = service
        self._dialect = dialect
        self.answering = Answering(service)
        self.holders = self.answering.holders

    async def __call__(self, scope: Scope, receive: Receive, send: Sent) -> None:
        record = record_of(scope)
        record.api = self._dialect.name
        # A list, because `settle` empties it: a request is settled once, and only if it has an exchange.
        exchanges: list[Exchange] = []
        try:
            service = self._service
            request = begin_request(service, scope)
            started = perf_counter()
            check_path(scope, request.caller)
            with service.access.bodies.lease() as held:
                async with service.access.quotas.admit(request.caller):
                    limit = request.configuration.settings.server.body_limit
                    # `exchange` empties the list. A variable here would keep the body until the response ends.
                    came = [await read_body(scope, receive, limit, held)]
                    with leaving(receive, send):
                        now, record.phases["body"] = asyncio.get_running_loop().time(), milliseconds_since(started)
                        exchange = await self.exchange(request, came, held, now)
                        exchanges.append(exchange)
                        watch = await self._served(exchange, send, now)
                if watch is not None:
                    # The client has the whole response, so a disconnect doesn't matter anymore.
                    await self.settle(exchanges)
                    await watch.learn()
        except ClientLeft:
            return
        except ProxyError as error:
            policy = [] if record.policy is None else [(Own.POLICY, record.policy)]
            extra = [(Own.VERDICT, "none"), *policy, (Own.ID, record.id)]
            await answer_error(send, error, extra, shape=self._dialect.errors)
        finally:
            await self.settle(exchanges)

    async def exchange(self, request: RequestContext, came: list[bytes], held: BodyLease, now: float) -> Exchange:
        """Parse a body, and find its route, policy, and limits. ``came`` is a list with the body, which gets empty.

        ``now`` is when it had arrived.
        """
        scope, caller, configuration, record = request.scope, request.caller, request.configuration, request.record
        record.bytes_in = len(came[0])
        body = await self._dialect.request.read(came.pop())
        if (deployment := scope.get(DEPLOYMENT)) is not None:
            body = body.named(deployment)
        if len(body.units) > MANY:
            await held.more(UNIT_BYTES * len(body.units))
        record.stream = body.stream
        record.model = shown_model(body.model) if body.model else None
        route = _route(configuration, body, caller, self._dialect)
        record.upstream, record.upstream_model = route.upstream, shown_model(route.model)
        if scope.get(AZURE) and configuration.settings.upstreams[route.upstream].provider != "azure":
            query = without_api_version(scope["query_string"].decode("latin-1"))
            request.scope = {**scope, "query_string": query.encode("latin-1")}
        if caller.models is not None:
            await check_body(scope, caller, body.raw)
        if not body.units and limit_of(caller) is not None:
            fields_of(body.raw)  # raises BadBody, because a spending limit can't count what can't be read
        caller = for_model(caller, body.model or "")
        # Clients ask for Anthropic's long window in a header or in a field of the body.
        betas = b",".join([value for name, value in scope["headers"] if name == b"anthropic-beta"])
        long = LONG_BETA in betas.lower() or (body.long_context and bool(body.units))
        measure = self._service.limits.measure
        profile, counter = await measure(route, configuration, self._dialect, long_context=long)
        record.policy = caller.policy.name
        request.bill.price_of = pricing(configuration.price(route, profile))
        await check_budget(self._service.money.spending, scope, caller, request.bill, body.model or "", body.raw)
        return Exchange(
            record=record,
            configuration=configuration,
            scope=request.scope,
            via=request.via,
            caller=caller,
            bill=request.bill,
            dialect=self._dialect,
            body=body,
            original=body,
            route=route,
            profile=profile,
            counter=counter,
            memory=held,
            time=TimeLeft(now + configuration.settings.server.deadline),
        )

    async def _served(self, exchange: Exchange, send: Send, now: float) -> Watch | None:
        """Answer a request, with heartbeats if its client wants a stream. Return what learns from the response.

        ``now`` is when its body had arrived.
        """
        try:
            if not exchange.body.stream:
                return await self._answered(exchange, send)
            limits, beat = exchange.configuration.settings.server, self._dialect.heartbeat
            heartbeat = Heartbeat(send, limits.keepalive, now, lambda: start_headers(exchange), beat, limits.deadline)
            exchange.heartbeat = heartbeat
            try:
                return await self._answered(exchange, send)
            except ProxyError as error:
                if not heartbeat.begun:
                    raise
                await heartbeat.stop()
                await send_error_event(send, error, self._dialect.errors)
                return None
            finally:
                heartbeat.close()
        finally:
            await exchange.bill.close()

    async def _answered(self, exchange: Exchange, send: Send) -> Watch:
        reply = await self.answering.answer(exchange)
        watch = self.answering.watch(exchange, reply)
        start, tap, heartbeat = reply.start, watch.tap, exchange.heartbeat
        headers = outcome_headers(reply.sent, len(reply.run.retries))
        if (left := self._service.money.spending.remaining(exchange.caller)) is not None:
            headers.append((Own.SPENDING_REMAINING, left))
        if reply.run.advice is not None:
            headers.append((Own.ADVICE, reply.run.advice))
        if exchange.record.recalls:
            headers.append((Own.RECALL, str(exchange.record.recalls)))
        hide = without_usage if reply.sent.asks_usage else None
        del reply  # it has the messages that were sent, and a stream may take hours
        if heartbeat is not None and heartbeat.begun:
            await heartbeat.stop()
        else:
            headers += identity_headers(exchange)
        shape, linger = self._dialect.errors, None if limit_of(exchange.caller) is None else exchange.bill.drain
        await send_answer(send, start, headers, tap, shape=shape, hide=hide, heartbeat=heartbeat, linger=linger)
        if tap is not None:
            tap.finish()
        watch.ended()
        return watch

    async def settle(self, exchanges: list[Exchange]) -> None:
        """Count what requests cost. The list gets empty."""
        while exchanges:
            await settle(self._service, exchanges.pop())


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


def start_headers(exchange: Exchange) -> list[tuple[str, str]]:
    """Return the headers of a response that starts before the outcome is known. A comment reports the outcome."""
    return [(Own.VERDICT, "pending"), *identity_headers(exchange)]


def identity_headers(exchange: Exchange) -> list[tuple[str, str]]:
    return [(Own.POLICY, exchange.caller.policy.name), (Own.ID, exchange.record.id)]


def outcome_headers(sent: Departure, retries: int) -> list[tuple[str, str]]:
    """Return the response headers that depend on the outcome."""
    outcome, summary = sent.outcome, sent.outcome.summary
    headers: list[tuple[str, str]] = [(Own.VERDICT, outcome.verdict), (Own.RETRIES, str(retries))]
    if outcome.before is not None:
        headers.append((Own.TOKENS_BEFORE, str(outcome.before)))
    after, steps = sent.after, outcome.steps
    if outcome.forecast is not None:
        after, steps = outcome.forecast.after, outcome.forecast.steps
    if after is not None:
        headers.append((Own.TOKENS_AFTER, str(after)))
    if steps:
        headers.append((Own.STEPS, ",".join(steps)))
    if sent.output is not None:
        headers.append((Own.OUTPUT, "clamped"))
    if summary.origin is not None:
        headers.append((Own.SUMMARY, summary.origin))
    if summary.origin == "digest" and summary.cause is not None:
        headers.append((Own.SUMMARY_CAUSE, summary.cause))
    if summary.breaker_open:
        headers.append((Own.BREAKER, "open"))
    return headers
