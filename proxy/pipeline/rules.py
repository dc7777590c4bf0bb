"""From a team's policy to the rules of the core."""

from __future__ import annotations

from typing import Any

from proxy.compaction.bounds import UNBOUNDED, Bounds
from proxy.compaction.conditions import Clause, Trigger
from proxy.compaction.pins import Pins
from proxy.compaction.planning import FULL
from proxy.compaction.rules import ArgumentRules, DuplicateRules, MediaRules, ResultRules, Rules
from proxy.config import Policy
from proxy.config.policy import Duplicates, EvictResults, Media, TruncateArgs
from proxy.limits.profiles import Profile

# Whatever a policy's trigger says, a conversation is compacted before it is refused.
MUST_FIT = Clause(fraction=FULL)

# How a request is compacted that an upstream has refused, where its policy never would. All other policies compact it
# as they will the next one: what is made for it serves that one, too.
AFTER_REFUSAL: Trigger = (Clause(fraction=0.85),)


# By fingerprint, whose hash is known; that of a policy is made anew each time. Policies come from files alone, but
# these may be edited any number of times.
_made: dict[tuple[str, bool, bool, Bounds], Rules] = {}
_MOST = 10_000


def bounds_of(profile: Profile) -> Bounds:
    """What a request for a model may have besides tokens."""
    return Bounds(profile.max_messages, profile.max_bytes)


def rules_for(policy: Policy, *, window_known: bool, refused: bool = False, bounds: Bounds = UNBOUNDED) -> Rules:
    """The rules of a policy. Where the model's window is unknown the policy's figures for that case apply; after a
    refusal there is always a trigger. ``bounds`` are kept under every policy that compacts at all."""
    key = (policy.fingerprint, window_known, refused, bounds)
    rules = _made.get(key)
    if rules is None:
        if len(_made) >= _MOST:
            _made.clear()
        rules = _made[key] = _rules(policy, window_known=window_known, refused=refused, bounds=bounds)
    return rules


def _rules(policy: Policy, *, window_known: bool, refused: bool, bounds: Bounds) -> Rules:
    trigger, keep = policy.trigger, policy.keep
    if not window_known:
        trigger, keep = policy.unknown_model.trigger, policy.unknown_model.keep
    if trigger and window_known:
        trigger = (*trigger, MUST_FIT)
    elif refused:
        trigger = AFTER_REFUSAL

    def conditions(own: Duplicates | TruncateArgs | EvictResults | Media) -> dict[str, Any]:
        """A stage's trigger and keep: the policy's as they are in force here, where it has none of its own."""
        return {
            "trigger": trigger if own.trigger == policy.trigger else own.trigger,
            "keep": keep if own.keep == policy.keep else own.keep,
        }

    copies, arguments, results = policy.duplicates, policy.truncate_args, policy.evict_results
    return Rules(
        trigger=trigger,
        keep=keep,
        prepare=policy.prepare,
        duplicates=None if copies is None else DuplicateRules(**conditions(copies), min_length=copies.min_length),
        arguments=None
        if arguments is None
        else ArgumentRules(
            **conditions(arguments),
            max_length=arguments.max_length,
            truncation_text=arguments.truncation_text,
            tools=frozenset(arguments.tools),
        ),
        results=None
        if results is None
        else ResultRules(
            **conditions(results),
            max_tokens=results.max_tokens,
            exclude=frozenset(results.exclude),
            per_tool=tuple(sorted(results.max_tokens_per_tool.items())),
        ),
        media=None if policy.media is None else MediaRules(**conditions(policy.media)),
        summary_tokens=policy.summary.max_tokens,
        user_tokens=policy.user_messages.max_tokens,
        index_tokens=policy.index.max_tokens,
        shorten_last_user_message=policy.shorten_last_user_message,
        pins=Pins(policy.pinned),
        archive=policy.archive is not None,
        role=policy.summary.role,
        keep_first=policy.user_messages.keep_first,
        bounds=bounds if trigger else UNBOUNDED,
    )
