"""How much room a request has: its model's limits, what was learned of them, and what its answer needs."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from proxy.compactor import Case, Outcome
from proxy.exchange import Exchange
from proxy.limits import (
    BLIND_FACTOR,
    GUESS_SECONDS,
    SMALLEST_PART,
    Learned,
    budget,
    for_others,
    lower,
    published,
    reserved_output,
    told_by,
)
from proxy.output import kept_free, lowered, shared_window
from proxy.policy_rules import bounds_of, rules_for
from proxy.service import Service
from proxy.upstream.overflow import Overflow

PLACES = 1_000
"""So many upstreams, models and tenants with empty answers are remembered, the latest ones."""


class Room:
    """The room of requests, in tokens as counted here."""

    def __init__(self, service: Service, clock: Callable[[], float] = time.monotonic) -> None:
        self._service = service
        self._clock = clock
        self._emptied: OrderedDict[tuple[str, str, str], float] = OrderedDict()

    def factor(self, exchange: Exchange) -> float:
        """How many of the upstream's tokens one of ours is."""
        return self._service.calibration.factor(*exchange.place)

    def of(self, exchange: Exchange) -> tuple[int | None, int]:
        """Tokens that the input may have, where that is known, and those that are reserved for the answer."""
        learned, factor, asked = self.known(exchange), self.factor(exchange), exchange.body.max_output
        policy = exchange.caller.policy
        reserved = reserved_output(exchange.profile, asked, policy.reserve_output, learned)
        window = shared_window(exchange.profile, exchange.body, policy, learned, factor)
        kept = kept_free(window, reserved, exchange.profile.max_output_tokens)
        return budget(exchange.profile, kept, learned, factor), reserved

    def known(self, exchange: Exchange) -> Learned | None:
        """What was learned of the limits."""
        learned = self._service.learned.get(*exchange.place)
        return learned if exchange.unproven is None else lower(learned, exchange.unproven)

    def window(self, exchange: Exchange) -> int | None:
        """The window that we believe in, in the upstream's tokens."""
        learned, window = self.known(exchange), exchange.profile.context_window
        told = int(learned.total * self.factor(exchange)) if learned is not None and learned.total else None
        return min((bound for bound in (window, told) if bound), default=None)

    def _shared(self, exchange: Exchange) -> int | None:
        known, factor = self.known(exchange), self.factor(exchange)
        return shared_window(exchange.profile, exchange.body, exchange.caller.policy, known, factor)

    async def output(self, exchange: Exchange, case: Case, outcome: Outcome) -> int | None:
        """The output to ask for in place of what the request asks for; ``None`` where that stays."""
        body, asked = exchange.body, exchange.body.max_output
        if asked is None or not body.messages or case.mode != "enforce" or outcome.verdict == "failed":
            return None
        window = self._shared(exchange)
        if window is None:
            return None
        factor = self.factor(exchange)
        sent = outcome.sent
        if sent is None:
            if case.counter.at_most(body.raw) * factor + asked <= window:
                return None
            sent = await self._service.compactor.size(case, outcome)
        return lowered(window, asked, int(sent * factor))

    def learn(self, exchange: Exchange, told: Learned) -> None:
        """Keep a limit, if it is below what is known otherwise."""
        self._service.learned.learn(*exchange.place, told, published(exchange.profile, self.factor(exchange)))

    def proved(self, exchange: Exchange) -> None:
        """The request got through; a guess that brought it there is kept for others."""
        if exchange.unproven is None or (exchange.doubtful and not self._again(exchange)):
            return
        self.learn(exchange, for_others(exchange.unproven))

    def _again(self, exchange: Exchange) -> bool:
        """Whether the same was seen before. Once, an empty answer may be an upstream's mishap."""
        before = self._emptied.get(exchange.place)
        self._emptied[exchange.place] = now = self._clock()
        self._emptied.move_to_end(exchange.place)
        if len(self._emptied) > PLACES:
            self._emptied.popitem(last=False)
        return before is not None and now - before < GUESS_SECONDS

    async def after(
        self, exchange: Exchange, case: Case, outcome: Outcome, overflow: Overflow
    ) -> Case | Outcome | None:
        """What is to be done after a refusal: a case with a smaller budget, or the outcome with less output.

        ``None`` where neither would help. What the refusal told is learned.
        """
        sent = await self._service.compactor.size(case, outcome)
        reserved = outcome.output or self.of(exchange)[1]
        told = told_by(overflow, sent, reserved, self.factor(exchange))
        if told.source == "guess":
            exchange.unproven, exchange.doubtful = told, overflow.kind == "silent"
        else:
            self.learn(exchange, told)
        # A reserve that nobody asked for is smaller in the window that has just been told.
        most = exchange.profile.max_output_tokens
        kept = kept_free(self._shared(exchange), outcome.output or self.of(exchange)[1], most)
        if told.total is not None and told.total - kept < told.total // SMALLEST_PART:
            return None  # beside so much output no prompt is small enough
        room, _ = self.of(exchange)
        output = await self.output(exchange, case, outcome)
        if output is not None and output < reserved and room is not None and sent <= room:
            return replace(outcome, output=output)
        if room is None or room >= min(sent, case.budget or sent):
            # By count the request fitted what was told or was known before: the count is what is wrong.
            room = int(min(sent, case.budget or sent) * BLIND_FACTOR)
        bounds = bounds_of(exchange.profile)
        return replace(case, budget=room, rules=rules_for(case.policy, window_known=True, refused=True, bounds=bounds))
