"""The way of a chat completion, from the client's bytes to the upstream's and back.

who is calling, which policy        teams
which model, which limits           profiles, limits, room
measure, plan, summarise, render    compactor
send                                upstream: an overflow before the first content is learned from and tried again
answer                              unchanged, with headers that say what was done
learn                               afterwards: from the usage that the answer reports
"""

from __future__ import annotations

import os
from typing import Literal

import structlog
from starlette.types import Receive, Scope, Send

from proxy.access.admission import BodyLease
from proxy.access.authenticator import Caller, for_model, may_use
from proxy.config import Route
from proxy.dialects.chat.request import MESSAGE_BYTES, ChatRequest, named, parsed
from proxy.dialects.chat.usage import is_silence, read_usage
from proxy.endpoints.paths import DEPLOYMENT
from proxy.endpoints.reply import add_what_does_not_fit, send_answer, send_error_event, send_rest
from proxy.endpoints.restrictions import check_body
from proxy.errors import BadBody, ConfigurationError, ModelNotAllowed, ProxyError, UnknownModel, UpstreamTimeout
from proxy.http.headers import VIA, for_upstream
from proxy.http.heartbeat import Keepalive
from proxy.http.loop_detection import next_via
from proxy.http.request_body import ClientLeft, Sent, answer_error, header, leaving, read_body
from proxy.http.timers import CoarseTimer
from proxy.overflow import Overflow
from proxy.overflow.silent import empty_stream
from proxy.pipeline.budget import TokenBudgets
from proxy.pipeline.compactor import CompactionInput, Outcome
from proxy.pipeline.context import RequestContext
from proxy.pipeline.facts_cache import MANY
from proxy.pipeline.response_start import Asked, ResponseStart, read_start
from proxy.pipeline.services import Services
from proxy.pipeline.snapshot import ConfigSnapshot
from proxy.pipeline.usage_feedback import Seen, UsageFeedback
from proxy.telemetry.metrics import RETRIES, TOKENS_REMOVED, requests
from proxy.upstream.connections import not_in_time
from proxy.upstream.transport import Outgoing, Transport

log = structlog.get_logger(__name__)

DEADLINE = "The request's deadline has passed. Try again, or have server.deadline raised."

OUTPUT_PART = "output asked for (max_tokens)"

Mode = Literal["enforce", "shadow", "off"]


class ChatCompletions:
    """``POST /v1/chat/completions``."""

    def __init__(self, service: Services) -> None:
        self._service = service
        self._room = TokenBudgets(service)
        self._afterwards = UsageFeedback(service, self._room, self._case)

    async def __call__(self, scope: Scope, receive: Receive, send: Sent) -> None:
        """Serve one request."""
        configuration = self._service.configuration
        known: list[tuple[str, str]] = []
        try:
            service = self._service
            hops = next_via(scope, service.instance)
            caller = configuration.teams.identify(scope["headers"])
            known.append(("x-compaction-policy", caller.policy.name))
            with service.bodies.holding() as held:
                async with service.quotas.admitted(caller):
                    # The list is emptied below: a name for the body in this frame would keep it until the answer ends.
                    came = [await read_body(scope, receive, configuration.settings.server.body_limit, held)]
                    with leaving(receive, send) as clock:
                        seen = await self._serve(configuration, scope, caller, came, held, hops, clock, send)
                if seen is not None:
                    # The client has the whole answer, so its leaving doesn't matter any more.
                    await self._afterwards.look(seen)
        except ClientLeft:
            requests("client_left").inc()
        except ProxyError as error:
            requests("refused").inc()
            said = [("x-compaction", "none"), *known, ("x-compaction-id", fresh_id())]
            await answer_error(send, error, said)

    async def _serve(
        self,
        configuration: ConfigSnapshot,
        scope: Scope,
        caller: Caller,
        came: list[bytes],
        held: BodyLease,
        hops: str,
        clock: CoarseTimer,
        send: Send,
    ) -> Seen | None:
        """Answer one request. Return it if its answer can show how the upstream counts.

        ``came`` has the body as its only item, and is emptied.
        """
        server = configuration.settings.server
        now = clock.now()
        body = await parsed(came.pop())
        if (deployment := scope.get(DEPLOYMENT)) is not None:
            body = named(body, deployment)
        if len(body.messages) > MANY:
            await held.more(MESSAGE_BYTES * len(body.messages))
        route = self._route(configuration, body, caller)
        if caller.models is not None:
            await check_body(scope, caller, body.raw)
        caller = for_model(caller, body.model or "")
        profile, counter = await self._service.measure(route, configuration)
        deadline = now + server.deadline
        exchange = RequestContext(configuration, scope, caller, body, route, profile, counter, hops, clock, deadline)
        if not body.stream:
            return await self._answered(exchange, held, send)
        line = exchange.line = Keepalive(send, server.keepalive, now, lambda: begun(exchange))
        try:
            return await self._answered(exchange, held, send)
        except ProxyError as error:
            if not line.begun:
                raise
            requests("refused").inc()
            await line.hush()
            await send_error_event(send, error)
            return None
        finally:
            line.close()

    async def _answered(self, exchange: RequestContext, held: BodyLease, send: Send) -> Seen | None:
        opening, outcome = await self._exchange(exchange)
        requests(outcome.verdict).inc()
        if outcome.verdict == "compacted" and outcome.before and outcome.after:
            # For the sake of a bound on messages a conversation may be replaced by a summary that is longer.
            TOKENS_REMOVED.inc(max(0, outcome.before - outcome.after))
        seen = self._afterwards.watch(exchange, opening, outcome)
        tail = None if seen is None else seen.tail
        pending = exchange.line is not None and exchange.line.begun
        headers = done(outcome, exchange.retries)
        if not pending:
            headers = report(headers, exchange.caller.policy.name)
        # From here on the request can't be sent again, and a stream may take hours.
        if seen is None or seen.known is not None:
            exchange.body.release()
        del outcome
        if not opening.answer.keeps_request:
            held.shrink(exchange.body.size + (0 if seen is None else seen.size))
        if pending and exchange.line is not None:
            await exchange.line.hush()
            await send_rest(send, opening, headers, tail)
        else:
            await send_answer(send, opening, headers, tail)
        return seen

    def _route(self, configuration: ConfigSnapshot, body: ChatRequest, caller: Caller) -> Route:
        model = body.model or ""
        route = configuration.route(model)
        if body.model is None and (route is None or not may_use(caller, model)):
            raise BadBody(
                "The body names no model, or is not a JSON object. Send a JSON object with 'model' and 'messages'.",
                param="model",
            )
        if route is None:
            raise UnknownModel(
                f"No model {model[:100]!r} is configured here. Ask GET /v1/models for what there is.", param="model"
            )
        if not may_use(caller, model):
            raise ModelNotAllowed(
                f"This key may not use the model {model[:100]!r}. Use another, or ask the operator of this proxy.",
                param="model",
            )
        return route

    async def _exchange(self, exchange: RequestContext) -> tuple[ResponseStart, Outcome]:
        """Send the request, compacted if need be; after a refusal as too long, again, compacted harder."""
        lane = await exchange.configuration.upstreams.lane(exchange.route.upstream)
        if exchange.counter is None:
            outcome = Outcome("off" if mode_of(exchange.scope, exchange.caller) == "off" else "failed")
            return await self._send(exchange, lane, outcome), outcome
        await self._service.recall(*exchange.place)
        case = self._case(exchange)
        outcome = await self._compacted(exchange, case) if exchange.body.messages else Outcome(unmeasured(case.mode))
        while True:
            opening = await self._send(exchange, lane, outcome)
            try:
                following = await self._following(exchange, case, outcome, opening)
                if following is None:
                    return opening, outcome
            except ConfigurationError as error:  # the client gets the response, though it can't be judged
                self._service.measures.fail(exchange.profile.tokenizer, error)
                return opening, outcome
            except BaseException:
                await opening.answer.close()
                raise
            await opening.answer.close()
            RETRIES.inc()
            exchange.retries += 1
            case, outcome = following

    async def _following(
        self, exchange: RequestContext, case: CompactionInput, outcome: Outcome, opening: ResponseStart
    ) -> tuple[CompactionInput, Outcome] | None:
        """What is to be sent after an answer that is none; ``None`` where it is for the client."""
        if opening.written:
            self._room.proved(exchange)
            return None
        overflow = opening.overflow or await self._silent(exchange, case, outcome, opening)
        if self._worth_repeating(exchange, case, opening, overflow):
            exchange.repeated = True
            return case, outcome
        if overflow is None and opening.answer.status < 400 and not opening.empty:
            self._room.proved(exchange)
        if overflow is None or case.mode != "enforce" or outcome.verdict == "failed":
            return None
        if may_retry(exchange, overflow):
            harder = await self._harder(exchange, case, outcome, overflow, may_ask=exchange.retries > exchange.repeated)
            if harder is not None:
                return harder
        if opening.overflow is not None:  # else nothing was refused
            parts = await self._service.compactor.parts(case, outcome)
            await add_what_does_not_fit(opening, parts | {OUTPUT_PART: outcome.output or exchange.body.max_output or 0})
        return None

    def _worth_repeating(
        self, exchange: RequestContext, case: CompactionInput, opening: ResponseStart, overflow: Overflow | None
    ) -> bool:
        """Decide whether to send a request once more unchanged: the upstream ended a stream before it wrote anything.

        It turned to another request, or failed. If it fails again, the prompt may be too long.
        """
        if exchange.repeated or case.mode != "enforce" or exchange.retries >= case.policy.overflow_retries:
            return False
        ended = overflow is not None and opening.is_stream and is_silence(opening.first)
        return opening.interrupted or (ended and opening.overflow is None)

    async def _silent(
        self, exchange: RequestContext, case: CompactionInput, outcome: Outcome, opening: ResponseStart
    ) -> Overflow | None:
        """The overflow that an answer with nothing in it stands for, if it does."""
        if not opening.empty or not exchange.body.messages or case.mode != "enforce" or outcome.verdict == "failed":
            return None
        counted = int(await self._service.compactor.size(case, outcome) * self._room.factor(exchange))
        if opening.is_stream and is_silence(opening.first):
            return empty_stream(counted, window=self._room.window(exchange))
        asked = outcome.output or exchange.body.max_output
        return self._room.silent(exchange, read_usage(opening.first), counted, asked)

    async def _compacted(self, exchange: RequestContext, case: CompactionInput, *, may_ask: bool = True) -> Outcome:
        """Compact the request if it needs that. A fault of the proxy is logged, and the request is sent unchanged.

        Raises ``UpstreamTimeout`` when the deadline passes; no other error of the compaction reaches the client.
        """
        try:
            untouched = self._service.compactor.untouched(case)
            outcome = untouched or await self._in_time(exchange, case, may_ask=may_ask)
            outcome.output = await self._room.output(exchange, case, outcome)
            return outcome
        except UpstreamTimeout:
            raise
        except ConfigurationError as error:
            self._service.measures.fail(exchange.profile.tokenizer, error)
            return Outcome("failed")
        except Exception as error:  # whatever it is, the caller must not suffer for it
            log.exception("compaction.failed", error=type(error).__name__)
            return Outcome("failed")

    async def _in_time(self, exchange: RequestContext, case: CompactionInput, *, may_ask: bool) -> Outcome:
        """The request compacted within its deadline; a streaming client that waits for it hears comments.

        Raises ``UpstreamTimeout``.
        """
        line = exchange.line
        late = line.watch if line is not None and case.mode == "enforce" else None
        limit = exchange.clock.until(exchange.deadline, late)
        try:
            with limit:
                return await self._service.compactor.compact(case, may_ask=may_ask)
        except TimeoutError as error:
            if not limit.expired:
                raise
            raise UpstreamTimeout(DEADLINE) from error
        finally:
            if line is not None:
                line.unwatch()

    def _case(self, exchange: RequestContext) -> CompactionInput:
        assert exchange.counter is not None  # noqa: S101 - such a request is sent before it gets here
        service, caller, route = self._service, exchange.caller, exchange.route
        policy = caller.policy
        room, _, rules = self._room.of(exchange)
        return CompactionInput(
            body=exchange.body,
            counter=exchange.counter,
            policy=policy,
            mode=mode_of(exchange.scope, caller),
            budget=room,
            tenant=caller.tenant,
            upstream=route.upstream,
            models=lambda tokens: service.summary_models(
                exchange.configuration, route, caller, tokens, exchange.unproven
            ),
            rules=rules,
            strict=exchange.profile.strict_alternation,
            kept=caller.kept,
            allowance=service.budgets.of(caller),
        )

    async def _harder(
        self, exchange: RequestContext, case: CompactionInput, outcome: Outcome, overflow: Overflow, *, may_ask: bool
    ) -> tuple[CompactionInput, Outcome] | None:
        """The request brought below the limit that a refusal told; ``None`` if that cannot be, or would not help."""
        smaller = await self._room.after(exchange, case, outcome, overflow)
        if smaller is None:
            return None
        if isinstance(smaller, Outcome):
            return case, smaller
        harder = await self._compacted(exchange, smaller, may_ask=may_ask)
        sent = await self._service.compactor.size(case, outcome)
        if harder.messages is None or harder.after is None or harder.after >= sent:
            return None
        return smaller, harder

    async def _send(self, exchange: RequestContext, lane: Transport, outcome: Outcome) -> ResponseStart:
        body, route = exchange.body, exchange.route
        model = route.model if route.model != body.model and body.model is not None else None
        headers = for_upstream(exchange.scope["headers"])
        if body.stream:
            # The beginning of a stream is read here, so it must not come compressed.
            headers = [pair for pair in headers if pair[0] != "accept-encoding"]
        remaining = exchange.deadline - exchange.clock.now()
        if remaining <= 0:
            raise UpstreamTimeout(DEADLINE)
        request = Outgoing(
            body=body.rewritten(messages=outcome.messages, model=model, max_output=outcome.output),
            model=route.model,
            stream=body.stream,
            headers=[*headers, (VIA, exchange.hops)],
            credential=exchange.caller.credential,
            timeout=remaining,
            bounded=True,
        )
        answer = None
        try:
            with exchange.clock.until(exchange.deadline):
                answer = await lane.send(request)
                return await read_start(answer, Asked(body.raw, exchange.caller.policy.rate_limit_as_limit))
        except TimeoutError as error:
            if answer is None:
                raise not_in_time(remaining) from error
            await answer.close()
            raise UpstreamTimeout("The upstream began to answer and then said nothing. Try again.") from error
        except BaseException:
            if answer is not None:
                await answer.close()
            raise


def mode_of(scope: Scope, caller: Caller) -> Mode:
    """What the policy says, or the request header ``x-compaction`` where the policy allows it to.

    The header can only make less of what the policy does: ``shadow`` of ``enforce``, ``off`` of anything.
    """
    policy = caller.policy
    asked = (header(scope, b"x-compaction") or "").strip().lower()
    if not asked or not policy.allow_header:
        return policy.mode
    if asked == "off":
        return "off"
    if asked == "shadow":
        return "off" if policy.mode == "off" else "shadow"
    raise BadBody("The header x-compaction takes 'off' or 'shadow'. Correct it, or leave it out.")


def may_retry(exchange: RequestContext, overflow: Overflow) -> bool:
    """Whether a request may be sent again. An answer with nothing in it, which says nothing, is worth one attempt."""
    said_nothing = overflow.kind == "silent" and overflow.limit is None
    return exchange.retries < exchange.caller.policy.overflow_retries and not (said_nothing and exchange.doubtful)


def begun(exchange: RequestContext) -> list[tuple[str, str]]:
    """Return the headers of a response that begins before the outcome is known; a comment reports that later."""
    policy = exchange.caller.policy.name
    return [("x-compaction", "pending"), ("x-compaction-policy", policy), ("x-compaction-id", fresh_id())]


def fresh_id() -> str:
    """A random id for an answer."""
    return os.urandom(8).hex()


def unmeasured(mode: Mode) -> Literal["none", "shadow", "off"]:
    """The verdict on a body without messages."""
    return "none" if mode == "enforce" else mode


def report(outcome: list[tuple[str, str]], policy: str) -> list[tuple[str, str]]:
    """Return the response headers that describe what the proxy did. ``outcome`` are those that ``done`` returns."""
    return [*outcome, ("x-compaction-policy", policy), ("x-compaction-id", fresh_id())]


def done(outcome: Outcome, retries: int) -> list[tuple[str, str]]:
    """Return those of the response headers that depend on the outcome."""
    headers = [("x-compaction", outcome.verdict), ("x-compaction-retries", str(retries))]
    if outcome.before is not None:
        headers.append(("x-compaction-tokens-before", str(outcome.before)))
    if outcome.after is not None:
        headers.append(("x-compaction-tokens-after", str(outcome.after)))
    if outcome.steps:
        headers.append(("x-compaction-steps", ",".join(outcome.steps)))
    if outcome.output is not None:
        headers.append(("x-compaction-output", "clamped"))
    if outcome.summary is not None:
        headers.append(("x-compaction-summary", outcome.summary))
    if outcome.resting:
        headers.append(("x-compaction-breaker", "open"))
    return headers
