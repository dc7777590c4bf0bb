"""Compute the token budget of a request from its model's limits, learned limits, and reserved output."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
from cachetools import LRUCache

from proxy.config import Policy
from proxy.limits.budget import (
    StatesOutput,
    budget,
    clamp_output,
    known_window,
    may_lower,
    output_reserve,
    reserved_output,
    shared_window,
)
from proxy.limits.learned import (
    BLIND_FACTOR,
    GUESS_SECONDS,
    SMALLEST_PART,
    LearnedLimit,
    for_others,
    limit_from_overflow,
    lower,
    published,
)
from proxy.limits.profiles import Profile
from proxy.overflow import Overflow
from proxy.overflow.silent import Filled, Finished, seems_full, silent_overflow
from proxy.pipeline.context import ConversationContext
from proxy.pipeline.job import CompactionInput, tokens_at_most
from proxy.pipeline.outcome import Outcome
from proxy.pipeline.services import Services
from proxy.store.forgetting import drop

PLACES = 1_000
"""Combinations of upstream, model, and tenant with uncertain responses that are remembered, the latest ones."""

FILLED = 4
"""Responses that seemed to fill their window and are remembered for each of these."""

BUDGETS = 1_000
"""Budgets that are remembered, by the model's profile, the policy, and the output that a request states."""


class TokenBudget(msgspec.Struct, frozen=True):
    """The token limits of one attempt.

    ``window`` is the smaller of the published and the learned window, and ``shared_window`` the same if the proxy may
    lower the requested output. Both are in the upstream's tokens. ``input`` is the tokens that the prompt may use, and
    ``reserved`` those of the response, both as the proxy counts them. ``None`` means unknown. ``factor`` is the
    upstream's tokens per token that the proxy counts. ``largest_input`` is the tokens that the prompt may use if the
    upstream doesn't count the requested output.
    """

    window: int | None
    shared_window: int | None
    input: int | None
    reserved: int
    factor: float
    largest_input: int | None = None


def token_budget(
    profile: Profile, body: StatesOutput, policy: Policy, learned: LearnedLimit | None = None, factor: float = 1.0
) -> TokenBudget:
    """Return the limits of a request. ``learned`` and ``factor`` are those of its upstream, model, and tenant."""
    shared = shared_window(profile, body, policy.output, learned, factor)
    reserved = reserved_output(profile, body.max_output, policy.reserve_output, learned)
    free = output_reserve(shared, reserved, profile.max_output_tokens, body.thinking)
    window = known_window(profile, learned, factor)
    return TokenBudget(
        window=window,
        shared_window=shared,
        input=budget(profile, free, learned, factor),
        reserved=reserved,
        factor=factor,
        largest_input=budget(profile, min(free, output_reserve(window, reserved)), learned, factor),
    )


class TokenBudgets:
    """Compute the token budgets of requests, and learn the limits of upstreams."""

    def __init__(self, services: Services, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` returns seconds."""
        self._services = services
        self._clock = clock
        self._unconfirmed: LRUCache[tuple[object, ...], float] = LRUCache(PLACES)
        self._filled: LRUCache[tuple[str, str, str], tuple[Filled, ...]] = LRUCache(PLACES)
        self._budgets: LRUCache[tuple[object, ...], tuple[Profile, Policy, TokenBudget]] = LRUCache(BUDGETS)

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        """Drop the observations of forgotten tenants, and return those tenants."""
        return drop(self._filled, forgotten, 2) | drop(self._unconfirmed, forgotten, 2)

    def of(self, context: ConversationContext) -> TokenBudget:
        """Return the budget of a request with the limits that are known now."""
        learned, factor = self._learned(context), self.factor(context)
        profile, policy, asked = context.profile, context.caller.policy, context.body.max_output
        fixed = asked is not None and not may_lower(context.body, policy.output)
        key = (id(profile), id(policy), asked, fixed, context.body.thinking, learned, factor)
        known = self._budgets.get(key)
        # An id says which object it is only while the object exists.
        if known is not None and known[0] is profile and known[1] is policy:
            return known[2]
        result = token_budget(profile, context.body, policy, learned, factor)
        self._budgets[key] = profile, policy, result
        return result

    def window(self, context: ConversationContext) -> int | None:
        """Return the window that is known now. Works after the body's release."""
        return known_window(context.profile, self._learned(context), self.factor(context))

    def _learned(self, context: ConversationContext) -> LearnedLimit | None:
        learned = self._services.learned.get(*context.place)
        return learned if context.provisional_limit is None else lower(learned, context.provisional_limit)

    def factor(self, context: ConversationContext) -> float:
        """Return the upstream's tokens for each token that the proxy counts."""
        return self._services.calibration.factor(*context.place)

    async def output(self, budget: TokenBudget, case: CompactionInput, outcome: Outcome) -> int | None:
        """Return the output limit to send in place of the requested one, or ``None`` to keep the requested one."""
        window, asked = budget.shared_window, case.body.max_output
        if window is None or asked is None or not case.body.units:
            return None
        if case.mode != "enforce" or outcome.verdict == "failed":
            return None
        if outcome.after is None and tokens_at_most(case) * budget.factor + asked <= window:
            return None
        sent = await self._services.compactor.size(case, outcome)
        most = case.counter.profile.max_output_tokens
        return clamp_output(window, asked, int(sent * budget.factor), most, case.body.thinking)

    def silent(
        self, context: ConversationContext, window: int | None, answer: Finished, counted: int, asked: int | None
    ) -> Overflow | None:
        """Return the overflow that a finished response indicates, or ``None``.

        ``window`` and ``counted``, the proxy's count of the prompt, are in the upstream's tokens. ``asked`` is the
        requested output. A response that may have filled its window is remembered, because the same total again is the
        second sign.
        """
        filled = self._filled.get(context.place, ())
        found = silent_overflow(answer, counted, window=window, asked=asked, filled=filled)
        if found is None and answer.prompt and seems_full(answer, asked):
            now = Filled(counted, answer.prompt + (answer.output or 0))
            self._filled[context.place] = (*filled, now)[-FILLED:]
        return found

    def learn(self, context: ConversationContext, limit: LearnedLimit) -> None:
        """Store a limit if it's below the known limits."""
        self._services.learned.learn(*context.place, limit, published(context.profile, self.factor(context)))

    def succeeded(self, context: ConversationContext) -> None:
        """Store a provisional limit, because a request that respects it succeeded."""
        limit = context.provisional_limit
        if limit is None:
            return
        if (context.silent_overflow or context.contradicted) and not self._again(context, limit):
            return
        if context.contradicted:
            self._services.learned.outdate(*context.place)
        self.learn(context, for_others(limit) if limit.source == "guess" else limit)

    def _again(self, context: ConversationContext, limit: LearnedLimit) -> bool:
        """Return whether the same limit occurred recently. One empty or odd response may be an accident."""
        key = (*context.place, limit.named)
        before = self._unconfirmed.get(key)
        self._unconfirmed[key] = now = self._clock()
        return before is not None and now - before < GUESS_SECONDS

    def overflowed(self, context: ConversationContext, overflow: Overflow, sent: int, reserved: int) -> LearnedLimit:
        """Return the limit that an overflow indicates. Store it, or use it for this request until it's confirmed.

        ``sent`` is the tokens of the prompt, and ``reserved`` those of the output, as the proxy counts them.
        """
        limit = limit_from_overflow(overflow, sent, reserved, self.factor(context))
        refused = overflow.kind != "silent"
        contradicted = refused and self._services.learned.contradicts(*context.place, limit, sent)
        if limit.source == "guess" or contradicted:
            context.provisional_limit = limit
            context.silent_overflow, context.contradicted = not refused, contradicted
        else:
            self.learn(context, limit)
        return limit


def leaves_no_prompt(context: ConversationContext, limit: LearnedLimit, budget: TokenBudget, output: int) -> bool:
    """Return whether no prompt is small enough for a limit with an output of these tokens."""
    # The default reserve is smaller in the window that the overflow indicates.
    free = output_reserve(budget.shared_window, output, context.profile.max_output_tokens, context.body.thinking)
    return limit.total is not None and limit.total - free < limit.total // SMALLEST_PART


def smaller_input(case: CompactionInput, budget: TokenBudget, sent: int) -> int:
    """Return the input tokens for the next attempt after an overflow of a prompt with ``sent`` tokens."""
    most = min(sent, case.budget or sent)
    if budget.input is None or budget.input >= most:
        # By our count, the request fit the indicated or the known limit, so our count is too low.
        return int(most * BLIND_FACTOR)
    return budget.input
