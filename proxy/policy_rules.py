"""From a team's policy to the rules of the core."""

from __future__ import annotations

from proxy.compaction.conditions import Clause, Trigger
from proxy.compaction.rules import ArgumentRules, ResultRules, Rules
from proxy.config import Policy

# Whatever a policy's trigger says, a conversation is compacted before it is refused.
MUST_FIT = Clause(fraction=0.95)

# How a request is compacted that an upstream has refused, where its policy never would. All other policies compact it
# as they will the next one: what is made for it serves that one, too.
AFTER_REFUSAL: Trigger = (Clause(fraction=0.85),)


# By fingerprint, whose hash is known; that of a policy is made anew each time. Policies come from the file alone.
_made: dict[tuple[str, bool, bool], Rules] = {}


def rules_for(policy: Policy, *, window_known: bool, refused: bool = False) -> Rules:
    """The rules of a policy. Where the model's window is unknown the policy's figures for that case apply; after a
    refusal there is always a trigger."""
    key = (policy.fingerprint, window_known, refused)
    rules = _made.get(key)
    if rules is None:
        rules = _made[key] = _rules(policy, window_known=window_known, refused=refused)
    return rules


def _rules(policy: Policy, *, window_known: bool, refused: bool) -> Rules:
    trigger, keep = policy.trigger, policy.keep
    if not window_known:
        trigger, keep = policy.unknown_model.trigger, policy.unknown_model.keep
    if trigger and window_known:
        trigger = (*trigger, MUST_FIT)
    elif refused:
        trigger = AFTER_REFUSAL
    arguments, results = policy.truncate_args, policy.evict_results

    def stage_trigger(own: Trigger) -> Trigger:
        return trigger if own == policy.trigger else own

    def stage_keep(own: Clause) -> Clause:
        return keep if own == policy.keep else own

    return Rules(
        trigger=trigger,
        keep=keep,
        prepare=policy.prepare,
        arguments=None
        if arguments is None
        else ArgumentRules(
            stage_trigger(arguments.trigger),
            stage_keep(arguments.keep),
            arguments.max_length,
            arguments.truncation_text or "...(argument truncated)",
            frozenset(arguments.tools),
        ),
        results=None
        if results is None
        else ResultRules(
            stage_trigger(results.trigger), stage_keep(results.keep), results.max_tokens, frozenset(results.exclude)
        ),
        summary_tokens=policy.summary.max_tokens,
        user_tokens=policy.user_messages.max_tokens,
        index_tokens=policy.index.max_tokens,
        shorten_last_user_message=policy.shorten_last_user_message,
    )
