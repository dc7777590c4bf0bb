"""Send a request until the upstream answers it: compact it, send it, judge the response, and retry if that can help."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter

import structlog
from cachetools import LRUCache
from msgspec.structs import replace

from proxy.dialects.responses.state import ResponsesSettings
from proxy.errors import BadBody, ConfigurationError, UpstreamTimeout
from proxy.overflow import Overflow
from proxy.overflow.silent import empty_stream
from proxy.pipeline.budget import TokenBudget, TokenBudgets, leaves_no_prompt, smaller_input
from proxy.pipeline.context import ConversationContext, conversation_key, mark
from proxy.pipeline.costs import price_step
from proxy.pipeline.decision import (
    ACCEPT,
    Attempt,
    Decision,
    Reject,
    Retry,
    ended_early,
    may_retry,
    result_of,
)
from proxy.pipeline.description import describe_call
from proxy.pipeline.item_references import resolve_references
from proxy.pipeline.job import CompactionInput
from proxy.pipeline.outcome import Outcome
from proxy.pipeline.recall import Recall, reserved
from proxy.pipeline.refusal import add_sizes, refuses_compaction, refuses_reasoning
from proxy.pipeline.refusal import advice as advice_on
from proxy.pipeline.request_mode import compacts_itself, mode_of
from proxy.pipeline.response_start import ResponseStart
from proxy.pipeline.rules import bounds_of, rules_for
from proxy.pipeline.sending import DEADLINE, UsageRequests, outgoing, resend, reserve, send
from proxy.pipeline.services import Services
from proxy.pipeline.state_recovery import NotCompacted, advice, recovered, trigger_reached
from proxy.pipeline.summary_models import own_model, provider_compaction, summary_models
from proxy.recall.tool import RecallSettings
from proxy.store.forgetting import drop
from proxy.summary.settings import SummarySettings
from proxy.telemetry.record import Reason

log = structlog.get_logger(__name__)

STATE_STEP = "server_state"
"""The step of a request whose history was compacted by the upstream that keeps it."""

REFUSED = 10_000
"""Conversations whose upstream refused a compaction of its own, the most recently used ones."""

OUTPUT_PART = "output asked for (max_tokens)"


class Attempts:
    """The attempts to get an answer to a request."""

    def __init__(self, services: Services, budgets: TokenBudgets) -> None:
        self._services = services
        self._budgets = budgets
        self._sent_prompts = services.sent_prompts
        self._refused: LRUCache[tuple[str, str], tuple[int, str]] = LRUCache(REFUSED)
        self._recall = Recall(services.archive_reader, services.hidden_rounds)
        self.usage_requests = UsageRequests()

    async def counted(self, context: ConversationContext) -> int | None:
        """Return the proxy's count of a request that wasn't counted and has its body; ``None`` if it can't count."""
        if context.counter is None or not context.body.raw:
            return None
        case = self.compaction_input(context, self._budgets.of(context))
        return await self._services.compactor.size(case, Outcome("none"))

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        """Drop the conversations and models of forgotten tenants, and return those tenants."""
        return drop(self._refused, forgotten) | self.usage_requests.forget(forgotten)

    async def run(self, context: ConversationContext) -> tuple[ResponseStart, Outcome]:
        """Send a request, compacted if needed. After an overflow, compact it to a smaller budget and retry.

        Return the response that the client gets, and the outcome of the attempt that it answers.
        """
        transport = await context.configuration.upstreams.transport(
            context.route.upstream, context.dialect.path, context.asker
        )
        if context.counter is None:
            outcome = Outcome("off" if mode_of(context.scope, context.caller) == "off" else "failed")
            await reserve(self._services, context, outcome, self._budgets.factor(context))
            began = perf_counter()
            start = await send(context, transport, outgoing(context, outcome), outcome)
            describe_call(context, start, began, result_of(ACCEPT, start), None)
            return start, outcome
        await self._services.recall(*context.place)
        await resolve_references(self._services, context)
        if context.caller.policy.section(SummarySettings).native:
            messages, known = self._refused.get(conversation_key(context), (0, None))
            context.own_summaries = known is not None and mark(context, messages) == known
        budget = self._budgets.of(context)
        case = self.compaction_input(context, budget)
        if await self._may_recall(context, case):
            case = self.compaction_input(context, budget)
        if context.body.units and not context.body.continues:
            attempt = await self.prepare(context, budget, case)
        else:  # new items alone aren't a conversation: the calls of their results, for example, are at the upstream
            attempt = Attempt(budget, case, Outcome("none" if case.mode == "enforce" else case.mode))
            if (reason := await trigger_reached(self._services, context, case, budget.factor)) is not None:
                attempt = await self._continued(context, attempt, reason) or attempt
        before = attempt.outcome.before
        context.record.fits = before is None or budget.input is None or before <= budget.input
        await reserve(self._services, context, attempt.outcome, budget.factor)
        while True:
            began = perf_counter()
            request = outgoing(context, attempt.outcome)
            start = await send(context, transport, request, attempt.outcome)
            try:
                decision = await self.decide(context, attempt, start)
                if decision is ACCEPT and self.usage_requests.refused(context, start):
                    decision = Retry(attempt, "usage")
                describe_call(context, start, began, result_of(decision, start), attempt.outcome.after)
                if decision is ACCEPT:
                    again = partial(resend, context, transport, request)
                    start = await self._recall.response(context, start, attempt, request.body, again)
                    return start, attempt.outcome
                if isinstance(decision, Reject):
                    if context.dialect.errors == "anthropic":  # clients match Anthropic's own wording
                        context.advice = advice_on(decision.parts)
                    else:
                        await add_sizes(start, decision.parts)
            except ConfigurationError as error:  # the client gets the response, though it can't be judged
                self._services.measures.fail(context.profile.tokenizer, error)
                return start, attempt.outcome
            if not isinstance(decision, Retry):
                return start, attempt.outcome
            context.retries.append(decision.cause)
            reason = context.record.reason or attempt.outcome.reason
            if reason is None or attempt.outcome.verdict != "compacted":  # otherwise the first trigger stays
                reason = Reason(decision.cause, context.record.calls[-1].limit, decision.attempt.outcome.before)
            context.record.reason, attempt = reason, decision.attempt

    async def decide(self, context: ConversationContext, attempt: Attempt, start: ResponseStart) -> Decision:
        """Decide whether to forward a response or to retry, and learn limits from it."""
        decision = ACCEPT if start.written else await self._judge(context, attempt, start)
        if decision is ACCEPT and self._recall.refused(context, attempt.outcome, start):
            return Retry(self._without_tool(context, attempt), "tool")
        if decision is ACCEPT and start.succeeded:
            self._succeeded(context, attempt.outcome)
        return decision

    async def _judge(self, context: ConversationContext, attempt: Attempt, start: ResponseStart) -> Decision:
        """Decide about a response that may be an error, or empty."""
        case, outcome = attempt.case, attempt.outcome
        overflow = start.overflow or await self._silent_overflow(context, attempt, start)
        if await refuses_reasoning(context, start) and await self._changed_prompt(context, outcome):
            return Retry(await self._without_reasoning(context, attempt), "reasoning")
        if outcome.native and await refuses_compaction(start):
            return Retry(await self._without_native(context, attempt), "compaction")
        if ended_early(context, case, start, overflow):
            return Retry(attempt, "empty")
        if overflow is None or case.mode != "enforce" or outcome.verdict == "failed":
            return ACCEPT
        if context.body.continues:  # its size says nothing about a limit
            again = None if start.overflow is None else await self._continued(context, attempt)
            return ACCEPT if again is None else Retry(again, "overflow")
        if may_retry(context, overflow):
            smaller = await self._smaller(context, attempt, overflow)
            if smaller is not None:
                return Retry(smaller, "overflow")
        if start.overflow is None:  # the upstream refused nothing
            return ACCEPT
        parts = await self._services.compactor.parts(case, outcome)
        return Reject(parts | {OUTPUT_PART: outcome.output or context.body.max_output or 0})

    def _succeeded(self, context: ConversationContext, outcome: Outcome) -> None:
        self._budgets.succeeded(context)
        if context.counter is not None and context.counter.format.binds_reasoning == "always":
            key, messages, changed = conversation_key(context), len(context.body.units), outcome.messages is not None
            self._sent_prompts.sent(key, messages, mark(context, messages), outcome.prompt, changed=changed)

    async def _changed_prompt(self, context: ConversationContext, outcome: Outcome) -> bool:
        """Return whether the proxy changed this prompt, or the one before. Otherwise the client caused a refusal."""
        if outcome.messages is None:
            await self._sent_prompts.recall(conversation_key(context))
            self._sent_prompts.verify(conversation_key(context), partial(mark, context))
        return outcome.messages is not None or self._sent_prompts.changed(conversation_key(context))

    def _without_tool(self, context: ConversationContext, attempt: Attempt) -> Attempt:
        """Return an attempt without the tool that an upstream refused. Later attempts don't get it either."""
        outcome, recall = attempt.outcome, context.recall
        after = outcome.after
        if recall is not None:
            recall.refused = True
            after = None if after is None else after - recall.tokens
        return replace(attempt, outcome=replace(outcome, tool=False, after=after))

    async def _without_reasoning(self, context: ConversationContext, attempt: Attempt) -> Attempt:
        """Return an attempt without the reasoning that an upstream refused."""
        self._expire(context)
        case = replace(attempt.case, stale_reasoning=len(context.body.units), attempt=len(context.retries) + 1)
        stripped = await self.prepare(context, attempt.budget, case, may_ask=False)
        if stripped.outcome.messages is None:
            stripped = replace(stripped, outcome=await self._services.compactor.without_reasoning(case))
        return stripped

    async def _without_native(self, context: ConversationContext, attempt: Attempt) -> Attempt:
        """Return an attempt with a summary of the proxy in place of the provider's, which the upstream refused."""
        messages = len(context.body.units)
        self._refused[conversation_key(context)] = messages, mark(context, messages)
        context.own_summaries = True
        case = replace(attempt.case, native=None, attempt=len(context.retries) + 1)
        return await self.prepare(context, attempt.budget, case)

    async def _continued(
        self, context: ConversationContext, attempt: Attempt, reason: Reason | None = None
    ) -> Attempt | None:
        """Return an attempt with a history that the upstream has compacted; ``None`` if it can't.

        ``reason`` is the trigger that the conversation meets, ``None`` after an overflow. Then the client gets advice.
        """
        if attempt.case.policy.section(ResponsesSettings).state == "off":
            context.advice = advice(context)
            return None
        transport = await context.configuration.upstreams.native(
            context.route.upstream, context.dialect.path, context.asker
        )
        try:
            if transport is None:
                raise NotCompacted("the upstream has no /v1/responses")
            body = await context.dialect.parse(await recovered(context, transport))
        except (NotCompacted, BadBody) as error:
            if reason is None:
                context.advice = advice(context, str(error) if isinstance(error, NotCompacted) else "too many items")
            return None
        context.recovered, context.body = True, body
        await resolve_references(self._services, context)
        case = replace(attempt.case, body=context.body, attempt=len(context.retries) + (reason is None))
        again = await self.prepare(context, attempt.budget, case, may_ask=reason is not None)
        changed = replace(again.outcome, verdict="compacted", steps=(STATE_STEP, *again.outcome.steps))
        return replace(again, outcome=replace(changed, reason=reason or changed.reason))

    async def _silent_overflow(
        self, context: ConversationContext, attempt: Attempt, start: ResponseStart
    ) -> Overflow | None:
        """Return the overflow that an empty response indicates, or ``None``."""
        budget, case, outcome = attempt.budget, attempt.case, attempt.outcome
        if not start.empty or not context.body.units or case.mode != "enforce" or outcome.verdict == "failed":
            return None
        counted = int(await self._services.compactor.size(case, outcome) * budget.factor)
        if start.silence:
            return empty_stream(counted, window=budget.window)
        asked = outcome.output or context.body.max_output
        return self._budgets.silent(context, budget.window, start.usage, counted, asked)

    async def prepare(
        self, context: ConversationContext, budget: TokenBudget, case: CompactionInput, *, may_ask: bool = True
    ) -> Attempt:
        """Compact a request if needed. If the compaction fails, log the error and send the request unchanged.

        With ``may_ask`` false, a digest replaces a summary that isn't stored yet. Raises ``UpstreamTimeout`` when the
        deadline passes. No other error of the compaction reaches the client.
        """
        try:
            untouched = self._services.compactor.untouched(case)
            outcome = untouched or await self._in_time(context, case, may_ask=may_ask)
            if outcome.messages is not None and (stale := await self._newly_stale(context, case, outcome)):
                outcome = await self._in_time(context, replace(case, stale_reasoning=stale), may_ask=may_ask)
            output = await self._budgets.output(budget, case, outcome)
            outcome = outcome if output is None else replace(outcome, output=output)
        except UpstreamTimeout:
            raise
        except ConfigurationError as error:
            self._services.measures.fail(context.profile.tokenizer, error)
            outcome = Outcome("failed")
        except Exception as error:  # a client gets its answer even if the compaction has a bug
            log.exception("compaction.failed", error=type(error).__name__)
            outcome = Outcome("failed")
        recall = context.recall
        if recall is not None and recall.tool and not recall.refused and outcome.messages and outcome.checkpoints:
            after = None if outcome.after is None else outcome.after + recall.tokens
            outcome = replace(outcome, tool=True, after=after)
        return Attempt(budget, case, outcome)

    async def _may_recall(self, context: ConversationContext, case: CompactionInput) -> bool:
        """Put back a request's hidden rounds. Return whether it has any, or may get the tool that reads the archive."""
        compactor = self._services.compactor
        if (
            case.policy.section(RecallSettings).tool == "off"
            or case.mode != "enforce"
            or compactor.untouched(case) is not None
        ):
            return False
        await self._recall.prepare(context, partial(compactor.turns, case))
        return context.recall is not None

    async def _in_time(self, context: ConversationContext, case: CompactionInput, *, may_ask: bool) -> Outcome:
        """Compact a request within its deadline. Meanwhile, the proxy sends heartbeats to a streaming client.

        Raises ``UpstreamTimeout``.
        """
        heartbeat = context.heartbeat
        late = heartbeat.start_after_delay if heartbeat is not None and case.mode == "enforce" else None
        limit = context.clock.until(context.deadline, late)
        try:
            with limit:
                return await self._services.compactor.compact(case, may_ask=may_ask)
        except TimeoutError as error:
            if not limit.expired:
                raise
            raise UpstreamTimeout(DEADLINE) from error
        finally:
            if heartbeat is not None:
                heartbeat.cancel_start()

    def compaction_input(self, context: ConversationContext, budget: TokenBudget) -> CompactionInput:
        """Return the input of a request's compaction. The request must have a counter."""
        assert context.counter is not None  # noqa: S101 - requests without a counter are sent unmeasured
        services, caller, route = self._services, context.caller, context.route
        known = budget.input is not None
        held = reserved(context)
        room, largest = (None if most is None else most - held for most in (budget.input, budget.largest_input))
        return CompactionInput(
            body=context.body,
            counter=context.counter,
            policy=caller.policy,
            mode=mode_of(context.scope, caller),
            budget=room,
            largest_budget=largest,
            tenant=caller.tenant,
            upstream=route.upstream,
            models=partial(summary_models, services, context),
            own_model=own_model(services, context),
            native=provider_compaction(services, context),
            rules=rules_for(
                caller.policy,
                window_known=known,
                bounds=bounds_of(context.profile),
                late=compacts_itself(context),
                price_step=price_step(context, budget.factor),
            ),
            strict=context.profile.strict_alternation,
            kept=caller.kept,
            allowance=services.budgets.of(caller),
            stale_reasoning=self._stale(context),
            request=context.record.id,
        )

    async def _smaller(self, context: ConversationContext, attempt: Attempt, overflow: Overflow) -> Attempt | None:
        """Return an attempt with less output or fewer messages, within the limit that an overflow indicates.

        Return ``None`` if neither would help. Summary models are asked only after the first overflow.
        """
        case, outcome = attempt.case, attempt.outcome
        sent = await self._services.compactor.size(case, outcome)
        reserved = outcome.output or attempt.budget.reserved
        limit = self._budgets.overflowed(context, overflow, sent, reserved)
        budget = self._budgets.of(context)
        if leaves_no_prompt(context, limit, budget, outcome.output or budget.reserved):
            return None
        output = await self._budgets.output(budget, case, outcome)
        if output is not None and output < reserved and budget.input is not None and sent <= budget.input:
            return Attempt(budget, case, replace(outcome, output=output))
        step = price_step(context, budget.factor)
        bounds = bounds_of(context.profile)
        rules = rules_for(case.policy, window_known=True, refused=True, bounds=bounds, price_step=step)
        smaller = replace(
            case,
            budget=smaller_input(case, budget, sent),
            largest_budget=budget.largest_input,
            rules=rules,
            stale_reasoning=self._stale_after(context, case),
            attempt=len(context.retries) + 1,
        )
        attempt = await self.prepare(context, budget, smaller, may_ask="overflow" in context.retries)
        after = attempt.outcome.after
        return None if attempt.outcome.messages is None or after is None or after >= sent else attempt

    async def _newly_stale(self, context: ConversationContext, case: CompactionInput, outcome: Outcome) -> int:
        """Return the number of messages whose reasoning is invalid, because the prompt before them changed.

        0 if the outcome has none of it.
        """
        if outcome.prompt is None:
            return 0
        key = conversation_key(context)
        await self._sent_prompts.recall(key, outcome.prompt)
        self._sent_prompts.verify(key, partial(mark, context))
        if not self._sent_prompts.continues(key, outcome.prompt):
            self._expire(context)
        stale = self._sent_prompts.stale(key)
        return stale if stale > case.stale_reasoning else 0

    def _stale(self, context: ConversationContext) -> int:
        """Return the number of messages whose reasoning is known to be invalid."""
        if context.counter is None or context.counter.format.binds_reasoning == "never":
            return 0
        key = conversation_key(context)
        self._sent_prompts.verify(key, partial(mark, context))
        return self._sent_prompts.stale(key)

    def _expire(self, context: ConversationContext) -> None:
        """Remember that the reasoning in all messages of a conversation is invalid."""
        messages = len(context.body.units)
        self._sent_prompts.expire(conversation_key(context), messages, mark(context, messages))

    def _stale_after(self, context: ConversationContext, case: CompactionInput) -> int:
        """Return the units whose reasoning is invalid after a change that the conversation alone doesn't explain."""
        if case.counter.format.binds_reasoning != "always":
            return case.stale_reasoning
        self._expire(context)
        return len(context.body.units)
