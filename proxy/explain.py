"""What would be done to a recorded request, and which limits are in force: tables for a person. Nothing is sent."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from proxy.body import ChatBody, parse
from proxy.compactor import Case, Explanation
from proxy.config import Policy, Route, Settings, load
from proxy.errors import ConfigurationError
from proxy.limits import budget, reserved_output
from proxy.output import kept_free, shared_window
from proxy.policy_rules import rules_for
from proxy.profiles import Profile
from proxy.profiles.report import render
from proxy.service import Service
from proxy.summary.asking import LaneModel


def limits(names: Sequence[str], config: Path | None) -> None:
    """Print the limits of models, by name as a client would give it, and where each comes from.

    Without names: those that the configuration names. Raises ``ConfigurationError``.
    """
    settings = load(config, os.environ)
    service = Service(settings)
    wanted = list(names) or [route.model or route.match for route in settings.models if "*" not in route.match]
    if not wanted:
        raise ConfigurationError("Name the models to show, for example: compaction-proxy models gpt-5.2")
    render(asyncio.run(_profiles(service, wanted)), Console())


async def _profiles(service: Service, names: Sequence[str]) -> list[Profile]:
    """What is known of models once the upstreams have told what they can."""
    try:
        routes = [(name, service.settings.route(name)) for name in names]
        for _, route in routes:
            if route is not None:
                await service.profile(route)
        await service.enquiries.settled()
        return [await service.profile(route) if route else service.profiles.find(name) for name, route in routes]
    finally:
        await service.aclose()


def explained(file: Path, config: Path | None, model: str | None, policy: str | None) -> None:
    """Print what would be done to the request in a file. Raises ``ConfigurationError``."""
    settings = load(config, os.environ)
    body = parse(file.read_bytes())
    if not body.messages:
        raise ConfigurationError(f"{file}: not the JSON body of a chat completion, with a list of messages")
    if model is not None:
        body = replace(body, model=model)
    if policy is not None and policy not in settings.policies:
        raise ConfigurationError(f"policy {policy}: not one of {', '.join(settings.policies)}")
    asyncio.run(_explain(settings, body, settings.policies[policy or "default"]))


async def _explain(settings: Settings, body: ChatBody, policy: Policy) -> None:
    service = Service(settings)
    try:
        route = settings.route(body.model or "")
        if route is None:
            raise ConfigurationError(f"no route matches the model {body.model!r}")
        profile = await service.profile(route)
        explanation = await service.compactor.explain(_case(service, body, policy, route, profile))
    finally:
        await service.aclose()
    console = Console()
    console.print(_facts(explanation, profile, policy))
    console.print(_parts(explanation))


def _case(service: Service, body: ChatBody, policy: Policy, route: Route, profile: Profile) -> Case:
    reserved = reserved_output(profile, body.max_output, policy.reserve_output)
    room = budget(profile, kept_free(shared_window(profile, body, policy, None, 1.0), reserved), None)

    async def none(tokens: int) -> Sequence[LaneModel]:
        return ()  # no summary is made here

    return Case(
        body=body,
        counter=service.counter(profile),
        policy=policy,
        mode="shadow",
        budget=room,
        tenant="explain",
        upstream=route.upstream,
        models=none,
        rules=rules_for(policy, window_known=room is not None),
    )


def _facts(found: Explanation, profile: Profile, policy: Policy) -> Table:
    table = Table("", "", show_header=False)
    plan = found.plan
    table.add_row("model", profile.model + (f" ({profile.note})" if profile.note else ""))
    table.add_row("policy", policy.name)
    table.add_row("budget for the input", "unknown" if found.budget is None else f"{found.budget:,} tokens")
    table.add_row("size as it came", f"{found.before:,} tokens in {found.messages:,} messages")
    table.add_row("compacted", "yes" if found.steps else "no: below every trigger")
    if found.steps:
        table.add_row("size as it would be sent", f"{found.after:,} tokens, the summary counted at its cap")
        table.add_row("stages", ", ".join(found.steps))
    if plan.cut:
        table.add_row(
            "summaries on the way", ", ".join(f"before message {found.head + c + 1}" for c in plan.checkpoints)
        )
        table.add_row("replaced by the summary", f"messages {found.head + 1} to {found.head + plan.cut}")
    if plan.upcoming is not None:
        table.add_row("next summary", f"before message {found.head + plan.upcoming + 1}, made ahead of need")
    return table


def _parts(found: Explanation) -> Table:
    table = Table("part", "tokens")
    for name, tokens in found.parts.items():
        table.add_row(name, f"{tokens:,}")
    table.columns[1].justify = "right"
    return table
