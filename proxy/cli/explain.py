"""The commands `explain` and `models`: tables about a recorded request, and about limits in force."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from proxy.cli.learned_report import render as render_learned
from proxy.cli.learned_report import short
from proxy.cli.profile_report import print_table, render, wide_console
from proxy.cli.table_differences import differences
from proxy.config import Policy, Route, Settings, load
from proxy.config.issues import near
from proxy.dialects.apis import DIALECTS, recognized
from proxy.dialects.dialect import Dialect
from proxy.dialects.request import Request
from proxy.errors import BadBody, ConfigurationError
from proxy.limits.learned import LearnedLimit
from proxy.limits.profiles import Profile
from proxy.limits.stored import learned
from proxy.pipeline.budget import token_budget
from proxy.pipeline.outcome import Explanation
from proxy.pipeline.replay import facts, replay
from proxy.server.runtime import Runtime
from proxy.store import StoreFailed
from proxy.store.opening import store_file
from proxy.store.replicated_map import UNREADABLE
from proxy.telemetry.record_json import team_of
from proxy.upstream.limit_discovery import reports_limits

_FIX = 'Fix: {"model": "gpt-4o", "messages": [{"role": "user", "content": "Hi"}]}'


def limits(names: Sequence[str], config: Path | None) -> None:
    """Print the limits of models, by the names that clients use, with their sources and the learned limits.

    Without names, print the models in the configuration and those with learned limits. Raises ``ConfigurationError``.
    """
    asyncio.run(_limits(names, load(config, os.environ)))


async def _limits(names: Sequence[str], settings: Settings) -> None:
    service = Runtime(settings)
    try:
        known = await learned(service.store.unguarded)
        wanted = list(names) or _named(settings)
        routes = [(name, settings.route(name)) for name in wanted]
        places = [(route.upstream, route.model) for _, route in routes if route is not None]
        if not names:
            others = [place for place in known.models if place not in places and place[0] in settings.upstreams]
            places += others
            routes += [(model, _route(settings, upstream, model)) for upstream, model in others]
        if not routes:
            raise ConfigurationError("Name the models to show. Fix: compaction-proxy models gpt-5.2")
        for _, route in routes:
            if route is not None:
                await service.profile(route)  # asks the upstream in the background
        await service.limit_discovery.settled()
        profiles = [
            await service.profile(route) if route else service.measures.profiles.find(name) for name, route in routes
        ]
    except StoreFailed as error:
        raise ConfigurationError(f"store.url: the store can't be read: {error}") from error
    finally:
        await service.aclose()
    console = wide_console()
    render(profiles, console)
    render_learned(known, places, console)


def checked(names: Sequence[str], config: Path | None) -> None:
    """Print differences between LiteLLM's table and the corrections, for all models or for ``names``.

    Raises ``ConfigurationError``.
    """
    settings = load(config, os.environ)
    routes = [settings.route(name) for name in names]
    wanted = {*names, *(route.model for route in routes if route is not None)}
    table = Table("model", "field", "LiteLLM", "ours", "in force", "rule")
    table.columns[0].overflow = "fold"
    for column in table.columns[1:5]:
        column.no_wrap = True
    reasons = {}
    for found in differences(wanted):
        figures = ["-" if figure is None else f"{figure:,}" for figure in (found.theirs, found.ours, found.holds)]
        table.add_row(found.model, found.field, *figures, found.rule)
        reasons[found.rule] = found.reason
    console = wide_console()
    if not reasons:
        console.print("LiteLLM's table and ours say the same.", highlight=False)
        return
    print_table(table, console)
    for rule, reason in reasons.items():
        console.print(f"{rule}: {reason}.", markup=False, highlight=False, soft_wrap=True)
    console.print(
        "If both have a figure, the smaller one is in force, because an upstream may offer less.", highlight=False
    )


def _route(settings: Settings, upstream: str, model: str) -> Route:
    """Return the configured route for a model at an upstream, or a route without a profile."""
    route = settings.route(model)
    return (
        route
        if route is not None and (route.upstream, route.model) == (upstream, model)
        else Route(upstream, model, None)
    )


def _named(settings: Settings) -> list[str]:
    """Return the models in the routes, except patterns with ``*``."""
    return [route.model or route.match for route in settings.models if "*" not in route.match]


def explained(file: Path, config: Path | None, model: str | None, policy: str | None, api: str | None = None) -> None:
    """Print how the proxy would compact the request in a file. Raises ``ConfigurationError``.

    ``api`` is ``chat``, ``responses``, or ``messages``. Default: the one that the request fits.
    """
    settings = load(config, os.environ)
    raw = file.read_bytes()
    try:
        dialect = recognized(raw) if api is None else DIALECTS[api]
        body = asyncio.run(dialect.parse(raw))
    except UNREADABLE as error:
        raise ConfigurationError(f"{file}: not JSON ({error}). {_FIX}") from error
    except BadBody as error:
        raise ConfigurationError(f"{file}: {error.message}") from error
    if not body.units:
        raise ConfigurationError(f"{file}: no messages, so there is nothing to explain. {_FIX}")
    if model is not None:
        body = body.named(model)
    if policy is not None and policy not in settings.policies:
        raise ConfigurationError(f"there is no policy '{policy}'. Fix: {near(policy, settings.policies)}")
    chosen = settings.policies[policy or "default"].for_model(body.model or "")
    asyncio.run(_explain(settings, dialect, body, chosen))


async def _explain(settings: Settings, dialect: Dialect, body: Request, policy: Policy) -> None:
    service = Runtime(settings)
    try:
        route = service.configuration.route(body.model or "", dialect.name)
        if route is None:
            raise ConfigurationError(
                f"no route of 'models' matches {body.model!r}. Fix: add a route, or use --model NAME"
            )
        await service.profile(route)  # asks the upstream in the background
        await service.limit_discovery.settled()
        profile = await service.profile(route)
        configured = route.profile is not None and (route.profile.context_window or route.profile.max_input_tokens)
        stated = service.limit_discovery.window(route.upstream, route.model)
        silent = reports_limits(settings.upstreams[route.upstream]) and stated is None and not configured
        limit, factor, whose = await _strictest(service, route, profile, body, policy)
        found = await replay(service, dialect, body, policy, route, limit, factor)
    finally:
        await service.aclose()
    console = Console()
    table = Table("", "", show_header=False)
    for name, value in [*facts(found, policy), ("learned limits", whose)]:
        table.add_row(name, value)
    if silent:
        table.add_row("reported limits", f"none; upstream {route.upstream} may accept less than the limits above")
    console.print(table)
    console.print(_parts(found.explanation))


async def _strictest(
    service: Runtime, route: Route, profile: Profile, body: Request, policy: Policy
) -> tuple[LearnedLimit | None, float, str]:
    """Return the learned limit and the factor that leave the smallest budget, and the callers that they're of."""
    file = store_file(service.settings.store.url)
    if service.settings.store.kind == "memory" or (file is not None and not file.exists()):
        return None, 1.0, "none in this store"
    try:
        known = await learned(service.store.unguarded)
    except StoreFailed as error:
        return None, 1.0, f"unknown, because the store can't be read ({error})"
    places = known.by_tenant(route.upstream, route.model, time.time())
    if not places:
        return None, 1.0, "none"

    def budget(tenant: str) -> float:
        return token_budget(profile, body, policy, *places[tenant]).input or math.inf

    tenant = min(places, key=budget)
    limit, factor = places[tenant]
    which = (
        ("team " if team_of(tenant) else "caller ")
        + short(tenant)
        + (f", the strictest of {len(places)}" if len(places) > 1 else "")
    )
    sizes = () if limit is None else ((limit.input, "input"), (limit.total, "input and output"))
    stated = [f"{tokens:,} tokens of {what}" for tokens, what in sizes if tokens is not None]
    counted = [f"{factor:.2f} tokens upstream for each one counted here"] if factor != 1 else []
    return limit, factor, f"{', '.join([*stated, *counted]) or 'no change'} ({which})"


def _parts(found: Explanation) -> Table:
    table = Table("part", "tokens")
    for name, tokens in found.parts.items():
        table.add_row(name, f"{tokens:,}")
    table.columns[1].justify = "right"
    return table
