"""The way of a chat completion, from the client's bytes to the upstream's and back.

who is calling, which policy        teams
which model, which limits           profiles, limits
measure, plan, summarise, render    compactor
send                                upstream: an overflow before the first content is learned from and tried again
answer                              unchanged, with headers that say what was done
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, replace
from typing import Literal

import structlog
from starlette.types import Receive, Scope, Send

from proxy.answering import failed_answer, send_answer, send_error_event, send_rest
from proxy.body import ChatBody, parse
from proxy.calibration import LEAST_COUNTED, Tail
from proxy.compactor import Case, Outcome
from proxy.config import Route
from proxy.door import ClientLeft, answer_error, header, leaving, read_body
from proxy.errors import BadBody, ModelNotAllowed, ProxyError, UnknownModel, UpstreamTimeout
from proxy.headers import VIA, for_upstream
from proxy.hops import checked_hops
from proxy.keepalive import Keepalive
from proxy.limits import (
    BLIND_FACTOR,
    SMALLEST_PART,
    Learned,
    budget,
    for_others,
    lower,
    published,
    reserved_output,
    told_by,
)
from proxy.observe.metrics import RETRIES, TOKENS_REMOVED, requests
from proxy.output import kept_free, lowered, shared_window
from proxy.overdue import overdue
from proxy.policy_rules import rules_for
from proxy.profiles import Profile
from proxy.service import Service
from proxy.teams import Caller, may_use
from proxy.tokens import has_remote_media
from proxy.upstream.lane import Lane, Outgoing
from proxy.upstream.opening import Opening, opened
from proxy.upstream.overflow import Overflow

log = structlog.get_logger(__name__)

DEADLINE = "The request's deadline has passed. Try again, or have server.deadline raised."

OUTPUT_PART = "output asked for (max_tokens)"

Mode = Literal["enforce", "shadow", "off"]


@dataclass(slots=True)
class Exchange:
    """One request on its way: where it comes from and where it goes. ``deadline`` is in the event loop's time.

    ``unproven`` is a limit guessed from a refusal that named none; it is kept for others once a request got through.
    ``retries`` counts how often the request was sent again so far; ``line`` goes to a client that wants a stream.
    """

    scope: Scope
    caller: Caller
    body: ChatBody
    route: Route
    hops: str
    deadline: float
    unproven: Learned | None = None
    retries: int = 0
    line: Keepalive | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """A request that was answered, and the end of its answer."""

    exchange: Exchange
    outcome: Outcome
    tail: Tail


class ChatCompletions:
    """``POST /v1/chat/completions``."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._calibration = service.calibration

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        known: list[tuple[str, str]] = []
        try:
            raw = await read_body(scope, receive, self._service.settings.server.body_limit)
            async with leaving(receive):
                seen = await self._serve(scope, raw, send, known)
            if seen is not None:
                # The answer is out: whoever leaves now has it all.
                await self._calibrate(seen)
        except ClientLeft:
            requests("client_left").inc()
        except ProxyError as error:
            requests("refused").inc()
            said = [("x-compaction", "none"), *known, ("x-compaction-id", secrets.token_hex(8))]
            await answer_error(send, error, said)

    async def _serve(self, scope: Scope, raw: bytes, send: Send, known: list[tuple[str, str]]) -> Seen | None:
        """Answer one request. What comes back can teach how the upstream counts.

        ``known`` gets the response headers that hold whatever becomes of the request.
        """
        service = self._service
        server = service.settings.server
        now = asyncio.get_running_loop().time()
        hops = checked_hops(scope, service.instance)
        caller = service.teams.identify(header(scope, b"authorization"), header(scope, b"api-key"))
        known.append(("x-compaction-policy", caller.policy.name))
        body = parse(raw)
        exchange = Exchange(scope, caller, body, self._route(body, caller), hops, now + server.deadline)
        if not body.stream:
            return await self._answered(exchange, send)
        line = exchange.line = Keepalive(send, server.keepalive, now, lambda: begun(exchange))
        try:
            return await self._answered(exchange, send)
        except ProxyError as error:
            if not line.begun:
                raise
            requests("refused").inc()
            await line.hush()
            await send_error_event(send, error)
            return None
        finally:
            line.close()

    async def _answered(self, exchange: Exchange, send: Send) -> Seen | None:
        opening, outcome = await self._exchange(exchange)
        requests(outcome.verdict).inc()
        if outcome.verdict == "compacted" and outcome.before and outcome.after:
            TOKENS_REMOVED.inc(outcome.before - outcome.after)
        tail = self._tail(exchange, opening, outcome)
        if exchange.line is not None and exchange.line.begun:
            await exchange.line.hush()
            await send_rest(send, opening, tail)
        else:
            await send_answer(send, opening, report(outcome, exchange.retries, exchange.caller.policy.name), tail)
        return None if tail is None else Seen(exchange, outcome, tail)

    def _tail(self, exchange: Exchange, opening: Opening, outcome: Outcome) -> Tail | None:
        """What keeps the end of an answer, where its usage can be compared with a count of ours."""
        route, sent = exchange.route, sent_tokens(outcome)
        if opening.answer.status != 200 or opening.overflow is not None:
            return None
        if sent is None:
            return Tail() if self._worth_counting(exchange, outcome) else None
        learned = self._service.learned
        wanted = self._calibration.wants(route.upstream, route.model)
        return Tail() if wanted or learned.below(route.upstream, route.model, exchange.caller.tenant, sent) else None

    def _worth_counting(self, exchange: Exchange, outcome: Outcome) -> bool:
        """Whether a request that its length alone proved small is to be counted after all, so that a ratio is known."""
        body, route = exchange.body, exchange.route
        asked = outcome.verdict in ("none", "shadow") and bool(body.messages) and len(body.raw) > LEAST_COUNTED
        return asked and self._calibration.worth_counting(route.upstream, route.model)

    async def _calibrate(self, seen: Seen) -> None:
        exchange, outcome, tail = seen.exchange, seen.outcome, seen.tail
        upstream, model = exchange.route.upstream, exchange.route.model
        counted, reported = sent_tokens(outcome), tail.prompt_tokens()
        if counted is None and reported is not None:
            counted = await self._counted(exchange, outcome)
        # What images and sound cost is an estimate in each request anew.
        if counted is None or has_remote_media(exchange.body.raw):
            return
        factor = self._calibration.factor(upstream, model)
        self._service.learned.prove(upstream, model, exchange.caller.tenant, counted, reported, factor)
        if reported is not None:
            self._calibration.note(upstream, model, counted, reported)

    async def _counted(self, exchange: Exchange, outcome: Outcome) -> int | None:
        """Tokens of a request that was sent as it came; ``None`` where counting failed, which is logged."""
        try:
            case = await self._case(exchange, await self._service.profile(exchange.route))
            return await self._service.compactor.size(case, outcome)
        except Exception as error:  # as in compaction: the fault is ours, and the caller has the answer
            log.exception("counting.failed", error=type(error).__name__)
            return None

    def _route(self, body: ChatBody, caller: Caller) -> Route:
        model = body.model or ""
        route = self._service.settings.route(model)
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

    async def _exchange(self, exchange: Exchange) -> tuple[Opening, Outcome]:
        """Send the request, compacted if need be; after a refusal as too long, again, compacted harder."""
        service, body, route = self._service, exchange.body, exchange.route
        lane = await service.upstreams.lane(route.upstream)
        profile = await service.profile(route)
        await service.recall(route.upstream, route.model, exchange.caller.tenant)
        case = await self._case(exchange, profile)
        outcome = await self._compacted(exchange, case) if body.messages else Outcome(unmeasured(case.mode))
        outcome.output = await self._lowered(exchange, profile, case, outcome)
        while True:
            opening = await self._send(exchange, lane, outcome)
            overflow = opening.overflow
            if overflow is None and opening.answer.status < 400 and exchange.unproven is not None:
                self._learn(exchange, profile, for_others(exchange.unproven))
            if overflow is None or case.mode != "enforce" or outcome.verdict == "failed":
                return opening, outcome
            harder = None
            if exchange.retries < case.policy.overflow_retries:
                harder = await self._harder(exchange, profile, case, outcome, overflow, may_ask=exchange.retries > 0)
            if harder is None:
                parts = await service.compactor.parts(case, outcome)
                output = outcome.output or body.max_output or 0
                return failed_answer(opening, parts | {OUTPUT_PART: output}), outcome
            await opening.answer.close()
            RETRIES.inc()
            exchange.retries += 1
            case, outcome = harder

    async def _compacted(self, exchange: Exchange, case: Case, *, may_ask: bool = True) -> Outcome:
        """The request compacted if need be, within its deadline; a streaming client that waits for it hears comments.

        Raises ``UpstreamTimeout``.
        """
        # Neither needs a timer of its own before the work has taken a while.
        late = overdue()
        try:
            async with asyncio.timeout(None) as limit:

                def taking_long() -> None:
                    limit.reschedule(exchange.deadline)
                    if exchange.line is not None and case.mode == "enforce":
                        exchange.line.watch()

                late.add(limit, taking_long)
                try:
                    return await self._compacted_or_failed(case, may_ask=may_ask)
                finally:
                    late.discard(limit)
                    if exchange.line is not None:
                        exchange.line.unwatch()
        except TimeoutError as error:
            raise UpstreamTimeout(DEADLINE) from error

    async def _compacted_or_failed(self, case: Case, *, may_ask: bool) -> Outcome:
        """The request compacted if need be. A fault in that is ours and is logged; the request goes on as it came."""
        try:
            return await self._service.compactor.compact(case, may_ask=may_ask)
        except ProxyError:
            raise
        except Exception as error:  # whatever it is, the caller must not suffer for it
            log.exception("compaction.failed", error=type(error).__name__)
            return Outcome("failed")

    async def _case(self, exchange: Exchange, profile: Profile) -> Case:
        service, caller, body, route = self._service, exchange.caller, exchange.body, exchange.route
        policy = caller.policy
        room, _ = self._room(exchange, profile)
        return Case(
            body=body,
            counter=service.counter(profile),
            policy=policy,
            mode=mode_of(exchange.scope, caller),
            budget=room,
            tenant=caller.tenant,
            upstream=route.upstream,
            models=lambda tokens: service.summary_models(policy, route, caller, tokens),
            rules=rules_for(policy, window_known=room is not None),
            strict=profile.strict_alternation,
        )

    def _room(self, exchange: Exchange, profile: Profile) -> tuple[int | None, int]:
        """Tokens that the input may have, where that is known, and those that are reserved for the answer."""
        route, caller = exchange.route, exchange.caller
        learned = self._learned(exchange)
        reserved = reserved_output(profile, exchange.body.max_output, caller.policy.reserve_output, learned)
        kept = kept_free(self._shared_window(exchange, profile), reserved)
        return budget(profile, kept, learned, self._calibration.factor(route.upstream, route.model)), reserved

    def _learned(self, exchange: Exchange) -> Learned | None:
        route = exchange.route
        learned = self._service.learned.get(route.upstream, route.model, exchange.caller.tenant)
        return learned if exchange.unproven is None else lower(learned, exchange.unproven)

    def _shared_window(self, exchange: Exchange, profile: Profile) -> int | None:
        factor = self._calibration.factor(exchange.route.upstream, exchange.route.model)
        return shared_window(profile, exchange.body, exchange.caller.policy, self._learned(exchange), factor)

    async def _lowered(self, exchange: Exchange, profile: Profile, case: Case, outcome: Outcome) -> int | None:
        """The output to ask for in place of what the request asks for; ``None`` where that stays."""
        body, window = exchange.body, self._shared_window(exchange, profile)
        asked = body.max_output
        if window is None or asked is None or not body.messages or case.mode != "enforce":
            return None
        if outcome.verdict == "failed":
            return None
        factor = self._calibration.factor(exchange.route.upstream, exchange.route.model)
        sent = sent_tokens(outcome)
        if sent is None:
            if len(body.raw) * profile.token_ratio * factor + asked <= window:
                return None  # a token is at least one byte
            sent = await self._service.compactor.size(case, outcome)
        return lowered(window, asked, int(sent * factor))

    def _learn(self, exchange: Exchange, profile: Profile, told: Learned) -> None:
        route, caller = exchange.route, exchange.caller
        most = published(profile, self._calibration.factor(route.upstream, route.model))
        self._service.learned.learn(route.upstream, route.model, caller.tenant, told, most)

    async def _harder(
        self,
        exchange: Exchange,
        profile: Profile,
        case: Case,
        outcome: Outcome,
        overflow: Overflow,
        *,
        may_ask: bool,
    ) -> tuple[Case, Outcome] | None:
        """The request brought below the limit that a refusal told; ``None`` if that cannot be, or would not help."""
        service = self._service
        sent = await service.compactor.size(case, outcome)
        reserved = outcome.output or self._room(exchange, profile)[1]
        factor = self._calibration.factor(exchange.route.upstream, exchange.route.model)
        told = told_by(overflow, sent, reserved, factor)
        if told.source == "guess":
            exchange.unproven = told
        else:
            self._learn(exchange, profile, told)
        # A reserve that nobody asked for is smaller in the window that has just been told.
        kept = kept_free(self._shared_window(exchange, profile), outcome.output or self._room(exchange, profile)[1])
        if told.total is not None and told.total - kept < told.total // SMALLEST_PART:
            return None  # beside so much output no prompt is small enough
        room, _ = self._room(exchange, profile)
        output = await self._lowered(exchange, profile, case, outcome)
        if output is not None and output < reserved and room is not None and sent <= room:
            return case, replace(outcome, output=output)
        if room is None or room >= (case.budget or room + 1):
            # The refusal says nothing new, so by count the request fitted: the count is what is wrong.
            room = int(min(sent, case.budget or sent) * BLIND_FACTOR)
        case = replace(case, budget=room, rules=rules_for(case.policy, window_known=True, refused=True))
        harder = await self._compacted(exchange, case, may_ask=may_ask)
        if harder.messages is None or harder.after is None or harder.after >= sent:
            return None
        harder.output = await self._lowered(exchange, profile, case, harder)
        return case, harder

    async def _send(self, exchange: Exchange, lane: Lane, outcome: Outcome) -> Opening:
        body, route = exchange.body, exchange.route
        model = route.model if route.model != body.model and body.model is not None else None
        headers = for_upstream(exchange.scope["headers"])
        if body.stream:
            # The beginning of a stream is read here, so it must not come compressed.
            headers = [pair for pair in headers if pair[0] != "accept-encoding"]
        remaining = exchange.deadline - asyncio.get_running_loop().time()
        if remaining <= 0:
            raise UpstreamTimeout(DEADLINE)
        request = Outgoing(
            body=body.rewritten(messages=outcome.messages, model=model, max_output=outcome.output),
            model=route.model,
            stream=body.stream,
            headers=[*headers, (VIA, exchange.hops)],
            credential=exchange.caller.credential,
            timeout=remaining,
        )
        answer = await lane.send(request)
        try:
            async with asyncio.timeout_at(exchange.deadline):
                return await opened(answer)
        except TimeoutError as error:
            await answer.close()
            raise UpstreamTimeout("The upstream began to answer and then said nothing. Try again.") from error
        except BaseException:
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


def sent_tokens(outcome: Outcome) -> int | None:
    """Tokens of the request as it was sent; ``None`` where they were not counted."""
    return outcome.before if outcome.messages is None else outcome.after


def begun(exchange: Exchange) -> list[tuple[str, str]]:
    """The response headers where the response begins before the outcome is known."""
    return report(Outcome("compacted"), exchange.retries, exchange.caller.policy.name)


def unmeasured(mode: Mode) -> Literal["none", "shadow", "off"]:
    """The verdict on a body without messages."""
    return "none" if mode == "enforce" else mode


def report(outcome: Outcome, retries: int, policy: str) -> list[tuple[str, str]]:
    """The response headers that say what was done."""
    headers = [
        ("x-compaction", outcome.verdict),
        ("x-compaction-policy", policy),
        ("x-compaction-retries", str(retries)),
        ("x-compaction-id", secrets.token_hex(8)),
    ]
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
