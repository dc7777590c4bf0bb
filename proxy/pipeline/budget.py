"""Compute what bounds a request: its token budget, and the rules of ``proxy.compaction`` by its policy.

A budget follows from the model's limits, learned limits, and reserved output.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import msgspec
from cachetools import LRUCache, TTLCache
from msgspec.structs import replace

from proxy.compaction import keeps
from proxy.compaction.rules import Pins, Rules
from proxy.compaction.settings import (
    TRIGGER,
    UNBOUNDED,
    Bounds,
    Clause,
    IndexRules,
    Trigger,
    UserMessageRules,
    with_step,
)
from proxy.compaction.stages import STAGES
from proxy.compaction.stages.stage import StageRules
from proxy.config import Policy
from proxy.constants import DAY
from proxy.dialects.request import Request
from proxy.limits.budget import (
    CAUTION_PART,
    budget,
    clamp_output,
    known_window,
    may_lower,
    output_reserve,
    reserved_output,
)
from proxy.limits.learned import GUESS_SECONDS, LearnedLimit, for_others, limit_from_overflow, lower, published
from proxy.limits.prices import below_step
from proxy.limits.profiles import Profile
from proxy.overflow import Overflow
from proxy.overflow.silent import Filled, Finished, seems_full, silent_overflow
from proxy.pipeline.exchange import Exchange, Provisional, compacts_itself, shortened_upstream
from proxy.pipeline.job import CompactionInput, Outcome, tokens_at_most
from proxy.pipeline.runtime import Runtime
from proxy.store.forgetting import drop

PLACES = 1_000  # upstreams with a model and tenant whose uncertain responses are remembered
UNKNOWN_OUTPUT = 4_096  # tokens of output to state in place of an upstream's default if its refusal names no window
FILLED = 4  # responses that seemed to fill their window and are remembered for each of these
BUDGETS = 1_000  # budgets that are remembered, by the model's profile, the policy, and the output that a request states


class TokenBudget(msgspec.Struct, frozen=True):
    """The token limits of one attempt. ``None`` means unknown."""

    window: int | None  # the smaller of the published and the learned one, in the upstream's tokens
    shared_window: int | None  # the same, if the proxy may lower the requested output
    input: int | None  # tokens that the prompt may use, as the proxy counts them
    reserved: int  # tokens of the response, as the proxy counts them
    factor: float  # the upstream's tokens per token that the proxy counts
    largest_input: int | None = None  # as `input`, if the upstream doesn't count the requested output
    free: int = 0  # tokens that `input` leaves free for the response
    default: int | None = None  # the output that the upstream was found to add to a request without one


def token_budget(
    profile: Profile, body: Request, policy: Policy, learned: LearnedLimit | None = None, factor: float = 1.0
) -> TokenBudget:
    """Return the limits of a request. ``learned`` and ``factor`` are those of its upstream, model, and tenant."""
    window = known_window(profile, learned, factor)
    shared = window if may_lower(body.max_output, policy.output) else None
    reserved = reserved_output(profile, body.max_output, policy.reserve_output, learned)
    fixed = body.fixed_thinking if shared else 0
    free = output_reserve(shared, reserved, profile.max_output_tokens, body.thinking, fixed)
    return TokenBudget(
        window=window,
        shared_window=shared,
        input=budget(profile, free, learned, factor),
        reserved=reserved,
        factor=factor,
        largest_input=budget(profile, min(free, output_reserve(window, reserved)), learned, factor),
        free=free if window else 0,
    )


class TokenBudgets:
    """Compute the token budgets of requests, and learn the limits of upstreams."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._unconfirmed: LRUCache[tuple[object, ...], float] = LRUCache(PLACES)
        self._filled: LRUCache[tuple[str, str, str], tuple[Filled, ...]] = LRUCache(PLACES)
        self._defaults: TTLCache[tuple[str, str, str], int] = TTLCache(PLACES, DAY)
        self._budgets: LRUCache[tuple[object, ...], tuple[Profile, Policy, TokenBudget]] = LRUCache(BUDGETS)

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        return (
            drop(self._filled, forgotten, 2)
            | drop(self._unconfirmed, forgotten, 2)
            | drop(self._defaults, forgotten, 2)
        )

    def of(self, exchange: Exchange) -> TokenBudget:
        learned, factor = self._learned(exchange), self.factor(exchange)
        profile, policy, asked = exchange.profile, exchange.caller.policy, exchange.body.max_output
        fixed = exchange.body.fixed_thinking if may_lower(exchange.body.max_output, policy.output) else 0
        default = None
        if asked is None and policy.output != "keep" and (place := exchange.place) in self._defaults:
            default = self._defaults.get(place)
        key = (id(profile), id(policy), asked, fixed, exchange.body.thinking, learned, factor, default)
        known = self._budgets.get(key)
        # An id says which object it is only while the object exists.
        if known is not None and known[0] is profile and known[1] is policy:
            return known[2]
        result = replace(token_budget(profile, exchange.body, policy, learned, factor), default=default)
        self._budgets[key] = profile, policy, result
        return result

    def window(self, exchange: Exchange) -> int | None:
        """Return the window that is known now. Works after the body's release."""
        return known_window(exchange.profile, self._learned(exchange), self.factor(exchange))

    def _learned(self, exchange: Exchange) -> LearnedLimit | None:
        learned = self._runtime.limits.learned.get(*exchange.place)
        return learned if exchange.provisional is None else lower(learned, exchange.provisional.limit)

    def factor(self, exchange: Exchange) -> float:
        """Return the upstream's tokens for each token that the proxy counts."""
        return self._runtime.limits.calibration.factor(*exchange.place)

    async def output(
        self, budget: TokenBudget, case: CompactionInput, outcome: Outcome, after: int | None
    ) -> int | None:
        """Return the output limit to send in place of the requested one, or ``None`` to keep the requested one.

        ``after`` is the tokens to send, ``None`` if the request is unchanged and wasn't counted.
        """
        window, asked = budget.shared_window, case.body.max_output
        if asked is None:
            window, asked = budget.window, budget.default
        if window is None or asked is None or not case.body.units:
            return None
        if case.mode != "enforce" or outcome.verdict == "failed":
            return None
        if after is None and tokens_at_most(case) * budget.factor + asked <= window:
            return None
        sent = after
        if sent is None:
            sent = await self._runtime.compactor.size(case.body, case.counter, case.tenant)
        most = case.counter.profile.max_output_tokens
        thinking, fixed = case.body.thinking, case.body.fixed_thinking
        return clamp_output(window, asked, int(sent * budget.factor), most, thinking, fixed)

    def without_default(self, exchange: Exchange, overflow: Overflow, prompt: int, window: int | None) -> int | None:
        """Return the output to state in a request without one, because the upstream's default doesn't fit.

        ``prompt`` and ``window``, ``None`` if unknown, are in the upstream's tokens. ``None``: the prompt is too long.
        """
        if overflow.kind != "input_plus_output" or exchange.caller.policy.output == "keep":
            return None
        usable = output_reserve(window or prompt, 0, exchange.profile.max_output_tokens, exchange.body.thinking)
        margin = 0 if overflow.counted else prompt // CAUTION_PART
        left = UNKNOWN_OUTPUT if window is None else window - prompt - margin
        if window is not None and left < usable:
            return None
        if overflow.limit is None:
            left = min(left, UNKNOWN_OUTPUT)
        self._defaults[exchange.place] = overflow.output or window or left
        return min(left, exchange.profile.max_output_tokens or left)

    def silent(
        self, exchange: Exchange, window: int | None, answer: Finished, counted: int, asked: int | None
    ) -> Overflow | None:
        """Return the overflow that a finished response indicates, or ``None``.

        ``window`` and ``counted``, the proxy's count of the prompt, are in the upstream's tokens. ``asked`` is the
        requested output. A response that may have filled its window is remembered, because the same total again is the
        second sign.
        """
        filled = self._filled.get(exchange.place, ())
        found = silent_overflow(answer, counted, window=window, asked=asked, filled=filled)
        if found is None and answer.prompt and seems_full(answer, asked):
            now = Filled(counted, answer.prompt + (answer.output or 0))
            self._filled[exchange.place] = (*filled, now)[-FILLED:]
        return found

    def learn(self, exchange: Exchange, limit: LearnedLimit) -> None:
        self._runtime.limits.learned.learn(*exchange.place, limit, published(exchange.profile, self.factor(exchange)))

    def succeeded(self, exchange: Exchange) -> None:
        """Store a provisional limit, because a request within it succeeded. A doubtful one must occur twice."""
        provisional = exchange.provisional
        if provisional is None:
            return
        limit, silent, contradicted = provisional
        if silent or contradicted:  # one empty or odd response may be an accident
            key = (*exchange.place, limit.named)
            before = self._unconfirmed.get(key)
            self._unconfirmed[key] = now = time.monotonic()
            if before is None or now - before >= GUESS_SECONDS:
                return
        if contradicted:
            self._runtime.limits.learned.outdate(*exchange.place)
        self.learn(exchange, for_others(limit) if limit.source == "guess" else limit)

    def overflowed(self, exchange: Exchange, overflow: Overflow, sent: int, reserved: int) -> LearnedLimit:
        """Return the limit that an overflow indicates. Store it, or use it for this request until it's confirmed.

        ``sent`` is the tokens of the prompt, and ``reserved`` those of the output, as the proxy counts them.
        """
        limit = limit_from_overflow(overflow, sent, reserved, self.factor(exchange))
        refused = overflow.kind != "silent"
        contradicted = refused and self._runtime.limits.learned.contradicts(*exchange.place, limit, sent)
        if limit.source == "guess" or contradicted:
            exchange.provisional = Provisional(limit, not refused, contradicted)
        else:
            self.learn(exchange, limit)
        return limit


MUST_FIT = Clause(fraction=keeps.FULL)  # with any trigger, a conversation is compacted before it exceeds the budget
AFTER_REFUSAL = TRIGGER  # If a policy has no trigger. Others keep theirs, so that the next request reuses the summary.
LATE: Trigger = (Clause(fraction=0.97),)  # for clients that compact their own conversations

# The key is the fingerprint, because hashing a policy is slow.
_made: dict[tuple[str, bool, bool, Bounds, Trigger | None, int | None], Rules] = {}
_MOST = 10_000  # rules to remember, because policy files can change any number of times


def bounds_of(profile: Profile) -> Bounds:
    """Return the bounds on a request's messages and bytes for a model."""
    return Bounds(profile.max_messages, profile.max_bytes)


def rules_for(
    policy: Policy,
    *,
    window_known: bool,
    refused: bool = False,
    bounds: Bounds = UNBOUNDED,
    only: Trigger | None = None,
    price_step: int | None = None,
) -> Rules:
    """Return the rules of a policy. ``window_known`` false selects the policy's ``unknown_model`` settings.

    With ``refused``, the upstream reported an overflow, so there is always a trigger. ``bounds`` apply if the policy
    has a trigger, which ``only`` replaces, also those of stages. ``price_step`` is the tokens at which
    ``price_step: true`` compacts, ``None`` if the model's price has no step.
    """
    key = (policy.fingerprint, window_known, refused, bounds, only, price_step)
    rules = _made.get(key)
    if rules is None:
        if len(_made) >= _MOST:
            _made.clear()
        rules = _rules(policy, window_known=window_known, refused=refused, bounds=bounds, price_step=price_step)
        if only is not None and rules.trigger:
            stages = tuple(dataclasses.replace(stage, trigger=only) for stage in rules.stages)
            rules = dataclasses.replace(rules, trigger=only, prepare=(), stages=stages)
        _made[key] = rules
    return rules


def request_rules(exchange: Exchange, budget: TokenBudget, *, refused: bool = False) -> Rules:
    """Return the rules for a request within its budget. ``refused`` is true after an overflow.

    Until then, an upstream that removes content itself decides what fits.
    """
    only = None
    if not refused:
        only = () if shortened_upstream(exchange) else LATE if compacts_itself(exchange) else None
    price = exchange.configuration.price(exchange.route, exchange.profile)
    return rules_for(
        exchange.caller.policy,
        window_known=refused or budget.input is not None,
        refused=refused,
        bounds=bounds_of(exchange.profile),
        only=only,
        price_step=below_step(price, budget.factor),
    )


def _rules(policy: Policy, *, window_known: bool, refused: bool, bounds: Bounds, price_step: int | None) -> Rules:
    stated, keep = policy.trigger, policy.keep
    if not window_known:  # a fraction has no meaning
        unknown = policy.unknown_model
        stated = (*[clause for clause in stated if clause.fraction is None], *unknown.trigger)
        keep = keep if keep.fraction is None else unknown.keep
    trigger = with_step(stated, price_step)
    if stated and window_known:
        trigger = (*trigger, MUST_FIT)
    elif refused:
        trigger = AFTER_REFUSAL

    def with_conditions(own: StageRules) -> StageRules:
        """Return a stage with its own trigger and keep, or with the policy's in this case."""
        return dataclasses.replace(
            own,
            trigger=trigger if own.trigger == policy.trigger else with_step(own.trigger, price_step),
            keep=keep if own.keep == policy.keep else own.keep,
        )

    summary = policy.summary
    sections = ((kind, getattr(policy, kind.SECTION)) for kind in STAGES)
    stages = (kind(**dict(section)) for kind, section in sections if section is not None)
    return Rules(
        trigger=trigger,
        keep=keep,
        prepare=with_step(policy.prepare, None if price_step is None else price_step * 15 // 17),
        stages=tuple(with_conditions(stage) for stage in stages),
        summary_tokens=summary.max_tokens,
        user_messages=UserMessageRules(**dict(policy.user_messages)),
        index=IndexRules(**dict(policy.index)),
        shorten_last_user_message=policy.shorten_last_user_message,
        pins=Pins(policy.pinned),
        keep_newest=frozenset(policy.keep_newest),
        archive=policy.archive is not None,
        role=summary.role,
        bounds=bounds if trigger else UNBOUNDED,
    )
