"""Convert a policy to the rules of ``proxy.compaction``, for any request or for one."""

from __future__ import annotations

from dataclasses import replace

from proxy.compaction import keeps
from proxy.compaction.pressure import UNBOUNDED, Bounds
from proxy.compaction.rules import Pins, Rules
from proxy.compaction.settings import TRIGGER, Clause, IndexRules, Trigger, UserMessageRules, with_step
from proxy.compaction.stages import STAGES
from proxy.compaction.stages.stage import StageRules
from proxy.config import Policy
from proxy.limits.profiles import Profile
from proxy.pipeline.budget import TokenBudget
from proxy.pipeline.costs import price_step
from proxy.pipeline.exchange import Exchange, compacts_itself, shortened_upstream

# With any trigger, the proxy compacts a conversation before it exceeds the budget.
MUST_FIT = Clause(fraction=keeps.FULL)

# The trigger after an overflow if the policy doesn't have one. All other policies keep their trigger, so that the next
# request can reuse the summary.
AFTER_REFUSAL = TRIGGER


# The trigger for clients that compact their own conversations.
LATE: Trigger = (Clause(fraction=0.97),)

# The key is the fingerprint, because hashing a policy is slow. The size is bounded because policy files can change any
# number of times.
_made: dict[tuple[str, bool, bool, Bounds, Trigger | None, int | None], Rules] = {}
_MOST = 10_000


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
            stages = tuple(replace(stage, trigger=only) for stage in rules.stages)
            rules = replace(rules, trigger=only, prepare=(), stages=stages)
        _made[key] = rules
    return rules


def request_rules(exchange: Exchange, budget: TokenBudget, *, refused: bool = False) -> Rules:
    """Return the rules for a request within its budget. ``refused`` is true after an overflow.

    Until then, an upstream that removes content itself decides what fits.
    """
    only = None
    if not refused:
        only = () if shortened_upstream(exchange) else LATE if compacts_itself(exchange) else None
    return rules_for(
        exchange.caller.policy,
        window_known=refused or budget.input is not None,
        refused=refused,
        bounds=bounds_of(exchange.profile),
        only=only,
        price_step=price_step(exchange, budget.factor),
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
        return replace(
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
