"""Show how a policy would compact a request, without sending anything."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from proxy.config import Policy, Route
from proxy.dialects.dialect import Dialect
from proxy.dialects.request import Request
from proxy.limits.learned import LearnedLimit
from proxy.limits.profiles import Profile
from proxy.limits.profiles.prices import below_step
from proxy.pipeline.budget import token_budget
from proxy.pipeline.costs import price_for
from proxy.pipeline.job import CompactionInput, Explanation
from proxy.pipeline.rules import bounds_of, rules_for
from proxy.pipeline.runtime import Runtime

TENANT = "explain"
"""Counts of replayed requests are cached under this name, apart from those of callers."""


class Replay(msgspec.Struct, eq=False, frozen=True):
    """The effect of compaction on a request, under the profile of its model."""

    explanation: Explanation
    profile: Profile


async def replay(
    runtime: Runtime,
    dialect: Dialect,
    body: Request,
    policy: Policy,
    route: Route,
    learned: LearnedLimit | None = None,
    factor: float = 1.0,
) -> Replay:
    """Return how a policy would compact a request. ``learned`` and ``factor`` are as in ``token_budget``.

    Raises ``ConfigurationError`` if its tokens can't be counted.
    """
    profile = await runtime.profile(route)
    most = token_budget(profile, body, policy, learned, factor).input
    step = below_step(price_for(runtime.configuration, route, profile))
    case = CompactionInput(
        body=body,
        counter=runtime.limits.measures.counter(profile, dialect),
        policy=policy,
        mode="shadow",
        budget=most,
        tenant=TENANT,
        upstream=route.upstream,
        rules=rules_for(policy, window_known=most is not None, bounds=bounds_of(profile), price_step=step),
    )
    return Replay(await runtime.compactor.explain(case), profile)


def facts(found: Replay, policy: Policy) -> list[tuple[str, str]]:
    explanation, profile = found.explanation, found.profile
    plan, head = explanation.plan, explanation.head
    budget = "unknown" if explanation.budget is None else f"{explanation.budget:,} tokens"
    shown = [
        ("model", profile.model + (f" ({profile.note})" if profile.note else "")),
        ("limits of the model", ", ".join(_limits(profile)) or "unknown"),
        ("policy", policy.name),
        ("budget for the input", budget),
    ]
    if profile.max_messages is not None:
        shown.append(("messages of a request", f"{profile.max_messages:,} at most"))
    if profile.max_bytes is not None:
        shown.append(("bytes of a request", f"{profile.max_bytes:,} at most"))
    shown.append(("size as it came", f"{explanation.before:,} tokens in {explanation.messages:,} messages"))
    shown.append(("compacted", "yes" if explanation.steps else "no: below every trigger"))
    if explanation.steps:
        expected = "the summary expected at half of its maximum"
        shown.append(("size as it would be sent", f"{explanation.after:,} tokens, {expected}"))
        shown.append(("stages", ", ".join(explanation.steps)))
    if plan.cut:
        shown.append(("summaries on the way", ", ".join(f"before message {head + c + 1}" for c in plan.checkpoints)))
        shown.append(("replaced by the summary", f"messages {head + 1} to {head + plan.cut}"))
    if plan.upcoming is not None:
        shown.append(("next summary", f"before message {head + plan.upcoming + 1}, made ahead of need"))
    return shown


def _limits(profile: Profile) -> Iterator[str]:
    """Yield each limit on tokens with its source."""
    for name, what in (("context_window", "window"), ("max_input_tokens", "input")):
        if (tokens := getattr(profile, name)) is not None:
            yield f"{what} {tokens:,} ({profile.sources.get(name, 'unknown')})"
