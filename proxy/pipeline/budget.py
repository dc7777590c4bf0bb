"""Compute the token budget of a request from its model's limits, learned limits, and reserved output."""

from __future__ import annotations

import time
from collections.abc import Callable

from cachetools import LRUCache
from msgspec.structs import replace

from proxy.compaction.rules import Rules
from proxy.config import Policy
from proxy.limits.learned import (
    BLIND_FACTOR,
    GUESS_SECONDS,
    SMALLEST_PART,
    LearnedLimit,
    budget,
    for_others,
    limit_from_overflow,
    lower,
    published,
    reserved_output,
)
from proxy.limits.output import clamp_output, may_lower, output_reserve, shared_window
from proxy.limits.profiles import Profile
from proxy.overflow import Overflow
from proxy.overflow.silent import Filled, Finished, seems_full, silent_overflow
from proxy.pipeline.context import ConversationContext
from proxy.pipeline.job import CompactionInput
from proxy.pipeline.outcome import Outcome
from proxy.pipeline.rules import bounds_of, rules_for
from proxy.pipeline.services import Services

PLACES = 1_000
"""Combinations of upstream, model, and tenant with doubtful answers that are remembered, the latest ones."""

FILLED = 4
"""Answers that seemed to fill their window and are remembered for each of these."""

BUDGETS = 1_000
"""Budgets that are remembered, by the model's profile, the policy, and the output that a request states."""


class TokenBudgets:
    """The token budgets of requests, in tokens as the proxy counts them."""

    def __init__(self, service: Services, clock: Callable[[], float] = time.monotonic) -> None:
        self._service = service
        self._clock = clock
        self._doubts: LRUCache[tuple[object, ...], float] = LRUCache(PLACES)
        self._filled: LRUCache[tuple[str, str, str], tuple[Filled, ...]] = LRUCache(PLACES)
        self._budgets: LRUCache[tuple[object, ...], tuple[Profile, Policy, tuple[int | None, int, Rules]]]
        self._budgets = LRUCache(BUDGETS)

    def factor(self, context: ConversationContext) -> float:
        """Return the upstream's tokens for each token that the proxy counts."""
        return self._service.calibration.factor(*context.place)

    def of(self, context: ConversationContext) -> tuple[int | None, int, Rules]:
        """Return the tokens the input may use (``None``: unknown), those reserved for the answer, and the rules."""
        learned, factor, body = self.known(context), self.factor(context), context.body
        profile, policy, asked = context.profile, context.caller.policy, context.body.max_output
        fixed = asked is not None and not may_lower(body, policy.output)
        key = (id(profile), id(policy), asked, fixed, learned, factor)
        known = self._budgets.get(key)
        # An id says which object it is only while the object exists.
        if known is not None and known[0] is profile and known[1] is policy:
            return known[2]
        reserved = reserved_output(profile, asked, policy.reserve_output, learned)
        window = shared_window(profile, body, policy.output, learned, factor)
        kept = output_reserve(window, reserved, profile.max_output_tokens)
        room = budget(profile, kept, learned, factor)
        result = room, reserved, rules_for(policy, window_known=room is not None, bounds=bounds_of(profile))
        self._budgets[key] = profile, policy, result
        return result

    def known(self, context: ConversationContext) -> LearnedLimit | None:
        """Return the learned limits."""
        learned = self._service.learned.get(*context.place)
        return learned if context.provisional_limit is None else lower(learned, context.provisional_limit)

    def window(self, context: ConversationContext) -> int | None:
        """Return the smaller of the published and the learned window, in the upstream's tokens."""
        learned, window = self.known(context), context.profile.context_window
        told = int(learned.total * self.factor(context)) if learned is not None and learned.total else None
        return min((bound for bound in (window, told) if bound), default=None)

    def _shared(self, context: ConversationContext) -> int | None:
        known, factor = self.known(context), self.factor(context)
        return shared_window(context.profile, context.body, context.caller.policy.output, known, factor)

    async def output(self, context: ConversationContext, case: CompactionInput, outcome: Outcome) -> int | None:
        """Return the output limit to send in place of the requested one, or ``None`` to keep the requested one."""
        body, asked = context.body, context.body.max_output
        if asked is None or not body.messages or case.mode != "enforce" or outcome.verdict == "failed":
            return None
        window = self._shared(context)
        if window is None:
            return None
        factor = self.factor(context)
        sent = outcome.sent
        if sent is None:
            if case.counter.at_most(body.raw) * factor + asked <= window:
                return None
            sent = await self._service.compactor.size(case, outcome)
        return clamp_output(window, asked, int(sent * factor))

    def silent(
        self, context: ConversationContext, answer: Finished, counted: int, asked: int | None
    ) -> Overflow | None:
        """Return the overflow that a finished answer shows; ``None`` if it shows none.

        ``counted`` is our own count of its prompt, in the upstream's tokens; ``asked`` the output that was asked for.
        An answer that may have filled its window is remembered, because the same total again is the second sign.
        """
        filled = self._filled.get(context.place, ())
        found = silent_overflow(answer, counted, window=self.window(context), asked=asked, filled=filled)
        if found is None and answer.prompt and seems_full(answer, asked):
            now = Filled(counted, answer.prompt + (answer.output or 0))
            self._filled[context.place] = (*filled, now)[-FILLED:]
        return found

    def learn(self, context: ConversationContext, told: LearnedLimit) -> None:
        """Store a limit if it's below the known limits."""
        self._service.learned.learn(*context.place, told, published(context.profile, self.factor(context)))

    def proved(self, context: ConversationContext) -> None:
        """Store a provisional limit, because a request that respects it succeeded."""
        told = context.provisional_limit
        if told is None or ((context.silent_overflow or context.contradicted) and not self._again(context, told)):
            return
        if context.contradicted:
            self._service.learned.outdate(*context.place)
        self.learn(context, for_others(told) if told.source == "guess" else told)

    def _again(self, context: ConversationContext, told: LearnedLimit) -> bool:
        """Return whether the same doubtful limit occurred recently. One empty or odd response may be an accident."""
        doubt = (*context.place, told.named)
        before = self._doubts.get(doubt)
        self._doubts[doubt] = now = self._clock()
        return before is not None and now - before < GUESS_SECONDS

    async def after(
        self, context: ConversationContext, case: CompactionInput, outcome: Outcome, overflow: Overflow
    ) -> CompactionInput | Outcome | None:
        """Return the next step after an overflow: an input with a smaller budget, or an outcome with less output.

        Return ``None`` if neither would help. The proxy learns the limit that the overflow indicates.
        """
        sent = await self._service.compactor.size(case, outcome)
        reserved = outcome.output or self.of(context)[1]
        told = limit_from_overflow(overflow, sent, reserved, self.factor(context))
        refused = overflow.kind != "silent"
        contradicted = refused and self._service.learned.contradicts(*context.place, told, sent)
        if told.source == "guess" or contradicted:
            context.provisional_limit = told
            context.silent_overflow, context.contradicted = not refused, contradicted
        else:
            self.learn(context, told)
        # The default reserve is smaller in the window that the overflow indicates.
        most = context.profile.max_output_tokens
        kept = output_reserve(self._shared(context), outcome.output or self.of(context)[1], most)
        if told.total is not None and told.total - kept < told.total // SMALLEST_PART:
            return None  # with this output limit, no prompt is small enough
        room, _, _ = self.of(context)
        output = await self.output(context, case, outcome)
        if output is not None and output < reserved and room is not None and sent <= room:
            return replace(outcome, output=output)
        if room is None or room >= min(sent, case.budget or sent):
            # By our count, the request fit the indicated or the known limit, so our count is too low.
            room = int(min(sent, case.budget or sent) * BLIND_FACTOR)
        bounds = bounds_of(context.profile)
        return replace(case, budget=room, rules=rules_for(case.policy, window_known=True, refused=True, bounds=bounds))
