"""Answer a conversation: everything that happens between its ``Exchange`` and the start of the client's response.

Read it from top to bottom to know what the proxy does with a request. It's the only module that knows the features.
Each one is a module in ``features`` with its own state, and doesn't know the others.

``Answering.through`` is the loop: a first attempt, then send, judge, and try again while a recovery helps. ``_Run``
turns a request into attempts. ``Answering.watch`` says what learns from the rest of the response.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter

import structlog

from proxy.errors import ConfigurationError, ProxyError, UpstreamTimeout
from proxy.pipeline.attempt import Attempt, Departure, Recovery, Reply, Run
from proxy.pipeline.budget import TokenBudget, TokenBudgets, request_rules
from proxy.pipeline.exchange import Exchange
from proxy.pipeline.features.overflow import Overflows
from proxy.pipeline.features.reasoning import Reasoning
from proxy.pipeline.features.recall import Recall, reserved
from proxy.pipeline.features.server_state import ServerState
from proxy.pipeline.features.traits import CAUSE, EDITS, Traits
from proxy.pipeline.features.usage_feedback import UsageFeedback
from proxy.pipeline.job import CompactionInput, Outcome
from proxy.pipeline.response_start import ResponseStart
from proxy.pipeline.runtime import Runtime
from proxy.pipeline.sending import (
    Costs,
    Tap,
    Watch,
    describe_call,
    milliseconds_since,
    outgoing,
    resend,
    reserve,
    send,
    size,
)
from proxy.pipeline.summary_models import WRITERS, ExchangeModels
from proxy.upstream.transport import Outgoing, Transport

log = structlog.get_logger(__name__)


class Answering:
    """The way to an answer, for the requests of one endpoint. Holds what the features remember."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.budgets = TokenBudgets(runtime)
        self.costs = Costs()
        self.reasoning = Reasoning(runtime.stores.sent_prompts, runtime.compactor, runtime.traits)
        self.traits = Traits(runtime.traits)
        self.recall = Recall(runtime.archive_reader, runtime.stores.hidden_rounds, runtime.compactor)
        self.server_state = ServerState(runtime)
        self.overflows = Overflows(self.budgets, runtime.compactor, self.reasoning.stale_after_overflow)
        self.feedback = UsageFeedback(runtime, self.budgets)
        self.recoveries = (
            # A part that the upstream refused for another reason than the size comes before the size.
            Recovery("reasoning", self.reasoning.recover, most=1),
            Recovery("roles", self.traits.roles, most=1),
            # Of any other refusal, the proxy's own words are the first suspect.
            Recovery(CAUSE, self.traits.recover, most=EDITS),
            Recovery("tool", self.recall.recover),
            # An early end may be an accident. Only the second one counts as an overflow.
            Recovery("empty", self.overflows.early_end, most=1),
            # The size of a request that continues a history at the server says nothing about a limit.
            Recovery("overflow", self.server_state.recover),
            Recovery("overflow", self.overflows.recover),
        )
        # What this endpoint remembers of tenants, so that maintenance can make it forget them.
        self.holders = (self.budgets, self.costs, self.traits, self.recall, self.overflows, self.feedback)

    async def answer(self, exchange: Exchange) -> Reply:
        """Send a request, compacted if needed, and return the response that the client gets."""
        upstreams = exchange.configuration.upstreams
        transport = await upstreams.transport(exchange.route.upstream, exchange.dialect.path, exchange.asker)
        return await self.through(transport, exchange)

    async def through(self, transport: Transport, exchange: Exchange) -> Reply:
        run = _Run(self, exchange)
        try:
            if exchange.configuration.settings.record_count:
                tags = self.runtime.records.tags
                await tags.describe(exchange.record, exchange.caller, exchange.body, exchange.counter)
            attempt = None if exchange.counter is None else await self._first(run)
        except Exception as error:
            if isinstance(error, ProxyError) and not isinstance(error, ConfigurationError):
                raise
            self.failed(exchange, error)
            attempt = None
        if attempt is None:
            return await self._unmeasured(transport, run)
        await reserve(self.runtime, exchange, attempt, attempt.budget.factor)
        request = self._outgoing(exchange, attempt)
        start = await send(exchange, transport, request, attempt.after)
        while True:
            cause, following = await self._recover(run, attempt, start)
            describe_call(exchange, start, cause, attempt.after)
            if cause is None:
                start = await self._final(run, attempt, start, transport, request)
                return Reply(start, attempt, run)
            run.retry(cause, attempt.outcome, following.outcome)
            attempt = following
            try:
                request = self._outgoing(exchange, attempt)
                start = await send(exchange, transport, request, attempt.after)  # closes the answer before
            except UpstreamTimeout:
                if run.refused is None or cause != CAUSE:
                    raise
                return Reply(run.refused, attempt, run)

    async def compacted(self, exchange: Exchange, adapted: Callable[[CompactionInput], CompactionInput]) -> Attempt:
        """Return a first attempt without sending it. Needs a counter. ``adapted`` changes the compaction's input."""
        run = _Run(self, exchange)
        await self.runtime.limits.load(*exchange.place)
        budget = self.budgets.of(exchange)
        return await run.attempt(budget, adapted(run.case(budget)))

    def _outgoing(self, exchange: Exchange, attempt: Attempt) -> Outgoing:
        async def count() -> int | None:
            try:
                counted = attempt.after or await size(self.runtime, exchange)
            except ConfigurationError as error:
                self.failed(exchange, error)
                return None
            return counted and round(counted * attempt.budget.factor)

        request = outgoing(exchange, attempt)
        request.count = count
        return request

    def failed(self, exchange: Exchange, error: Exception) -> None:
        """Report an error of the proxy, after which a request leaves unchanged."""
        if isinstance(error, ConfigurationError):
            self.runtime.limits.measures.fail(exchange.profile.tokenizer, error)
        else:
            log.exception("compaction.failed", error=type(error).__name__)

    async def _unmeasured(self, transport: Transport, run: _Run) -> Reply:
        """Send a request unchanged that the proxy can't count. Nothing is added that an upstream could refuse."""
        exchange = run.exchange
        outcome = Outcome("off" if exchange.mode == "off" else "failed")
        sent = Departure(outcome=outcome)
        await reserve(self.runtime, exchange, sent, self.budgets.factor(exchange))
        start = await send(exchange, transport, outgoing(exchange, sent), None)
        describe_call(exchange, start, None, None)
        return Reply(start, sent, run)

    async def _first(self, run: _Run) -> Attempt:
        """Return the first attempt, with what earlier requests left: limits, items, hidden rounds, summaries."""
        exchange = run.exchange
        await self.runtime.limits.load(*exchange.place)
        await self.server_state.resolve(exchange)
        budget = self.budgets.of(exchange)
        case = run.case(budget)
        run.recall = await self.recall.begin(exchange, case)
        if run.recall is not None:
            case = run.case(budget)  # `begin` may have replaced the body, and the writers need the tool
        if exchange.body.units and not exchange.body.continues:
            attempt = await run.attempt(budget, case)
        else:  # new items alone aren't a conversation: the calls of their results, for example, are at the upstream
            outcome = Outcome("none" if exchange.mode == "enforce" else exchange.mode)
            attempt = await self.server_state.first(run, run.unchanged(budget, outcome))
        before, most = attempt.outcome.before, budget.largest_input
        exchange.record.fits = before is None or most is None or before <= most
        return attempt

    async def _recover(self, run: _Run, attempt: Attempt, start: ResponseStart) -> tuple[str | None, Attempt]:
        """Return the next attempt and its cause; no cause if the client gets this response."""
        if start.written and not start.answer.is_encoded:
            return None, attempt
        try:
            for recovery in self.recoveries:
                if run.retries.count(recovery.cause) < recovery.most:
                    following = await recovery.next(run, attempt, start)
                    if following is not None:
                        return recovery.cause, following
        except ConfigurationError as error:  # the client gets the response, though it can't be judged
            self.runtime.limits.measures.fail(run.exchange.profile.tokenizer, error)
        return None, attempt

    async def _final(
        self, run: _Run, attempt: Attempt, start: ResponseStart, transport: Transport, request: Outgoing
    ) -> ResponseStart:
        """Return the client's response: without the proxy's own tool, or with the explanation of an overflow."""
        exchange = run.exchange
        if start.overflow is not None:
            await self.overflows.explain(run, attempt, start)
            return start
        if start.succeeded:
            if not attempt.changes and exchange.record.never_overflowed:
                exchange.record.fits = True  # whatever the proxy knows of the limit
            self.budgets.succeeded(exchange)
            self.overflows.succeeded(exchange, attempt.case)
            self.reasoning.succeeded(exchange, attempt.outcome, kept=attempt.case.keeps_reasoning)
        refused = self.traits.answered(run, attempt, start)
        if run.refused is not None and run.took_tool and (refused or (run.recall and run.recall.found)):
            self.recall.refuse(exchange, run.refused.answer.status)  # or its rounds, which stay without the tool
        start = self.traits.refusal(run, start)
        if run.recall is None:
            return start
        again = partial(resend, exchange, transport, request)
        return await self.recall.response(exchange, run.recall, attempt, start, request.body, again)

    def watch(self, exchange: Exchange, reply: Reply) -> Watch:
        """Return what learns from the rest of a response. No recovery follows. ``release`` says which bodies stay."""
        start, sent, held = reply.start, reply.sent, 0
        sent.describe(exchange.record)
        room = self.runtime.stores.archive.writes.room if sent.outcome.verdict == "compacted" else None
        reader = self.server_state.item_reader(exchange, start, sent.outcome)
        watch = Watch(exchange, Tap(reader, start.answer, room) if reader or room else None)
        if start.answer.status == 200:
            if reply.run.learns and (feedback := self.feedback.prepare(exchange, start, sent)) is not None:
                held = feedback.size
                watch.lesson = partial(self.feedback.record, feedback)
            self.costs.price(exchange, sent)
            self.server_state.watch(exchange, start, watch)
        watch.release(start, sent, held)
        return watch


class _Run(Run):
    """One request on the way to its answer. Turns it into attempts, with the help of the features."""

    def __init__(self, answering: Answering, exchange: Exchange) -> None:
        super().__init__(exchange)
        self._answering = answering
        answering.traits.begin(exchange)
        self.asks_usage = answering.traits.asks_usage(exchange)
        answering.overflows.apply(exchange)

    def case(self, budget: TokenBudget) -> CompactionInput:
        """See ``Run``. The request must have a counter."""
        exchange, caller, runtime = self.exchange, self.exchange.caller, self._answering.runtime
        assert exchange.counter is not None  # noqa: S101 - requests without a counter are sent unmeasured
        recall, held = self.recall, reserved(exchange)
        tool = lambda: None if recall is None else recall.adding  # noqa: E731 - the run itself must not stay in memory
        models = ExchangeModels(runtime, exchange, tool)
        room, largest = (None if most is None else most - held for most in (budget.input, budget.largest_input))
        return CompactionInput(
            body=exchange.body,
            counter=exchange.counter,
            policy=caller.policy,
            mode=exchange.mode,
            budget=room,
            largest_budget=largest,
            tenant=caller.tenant,
            upstream=exchange.route.upstream,
            writers=tuple(writer(models) for writer in WRITERS[caller.policy.summary.method]),  # in the order to try
            rules=request_rules(exchange, budget),
            strict=exchange.profile.strict_alternation,
            stores_summaries=caller.has_storage,
            allowance=runtime.money.allowances.for_caller(caller),
            stale_reasoning=self._answering.reasoning.stale(exchange),
            keeps_reasoning=self._answering.reasoning.demanded(exchange),
            request=exchange.record.id,
            deadline=exchange.configuration.settings.server.deadline,
            media=self._answering.overflows.media(exchange),
        )

    def unchanged(self, budget: TokenBudget, outcome: Outcome) -> Attempt:
        edits = self.exchange.edits
        return Attempt(budget=budget, case=self.case(budget), outcome=outcome, asks_usage=self.asks_usage, edits=edits)

    async def attempt(self, budget: TokenBudget, case: CompactionInput, *, may_ask: bool = True) -> Attempt:
        """See ``Run``. If the compaction fails, log the error and send the request unchanged."""
        exchange, compactor, record = self.exchange, self._answering.runtime.compactor, self.exchange.record
        output, began = None, perf_counter()
        try:
            outcome = compactor.untouched(case)
            if outcome is None:
                stale, seconds = partial(self._answering.reasoning.newly_stale, exchange), exchange.time.seconds / 2
                work = partial(compactor.compact, case, may_ask=may_ask, seconds=seconds, newly_stale=stale)
                outcome = await exchange.in_time(work, case.mode)
            if self._answering.traits.takes_output(exchange):
                output = await self._answering.budgets.output(budget, case, outcome, outcome.after)
        except UpstreamTimeout:
            raise
        except Exception as error:  # noqa: BLE001 - a client gets its answer even if the compaction has a bug
            self._answering.failed(exchange, error)
            outcome = Outcome("failed")
        finally:
            record.spent("compaction", milliseconds_since(began))
        if outcome.summary.waited:
            record.spent("summary", outcome.summary.waited)
            record.spent("compaction", -outcome.summary.waited)
        tool = None if self.recall is None else self.recall.tool_for(outcome)
        return Attempt(
            budget=budget,
            case=case,
            outcome=outcome,
            output=output,
            tool=tool,
            asks_usage=self.asks_usage,
            edits=tuple(dict.fromkeys((*exchange.edits, *self.tried))),
        )
