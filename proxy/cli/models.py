"""The commands `models` and `explain`: the limits of models with their sources, and a request compacted by them."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from proxy.cli.tables import print_table, table_console
from proxy.config import Policy, Route, Settings, load
from proxy.config.document import near
from proxy.constants import UNDECODABLE
from proxy.dialects.apis import DIALECTS, Dialect, recognized
from proxy.dialects.request import Request
from proxy.errors import BadBody, ConfigurationError
from proxy.limits.learned import LearnedLimit
from proxy.limits.prices import below_step
from proxy.limits.profiles import SOURCED, Profile
from proxy.limits.stored import Learned, learned
from proxy.pipeline.budget import bounds_of, rules_for, token_budget
from proxy.pipeline.job import CompactionInput, Explanation
from proxy.pipeline.runtime import Runtime
from proxy.store import StoreFailed, store_file
from proxy.telemetry.record_json import caller_digest, team_of
from proxy.upstream.limit_discovery import reports_limits


def limits(names: Sequence[str], config: Path | None) -> None:
    """Print the limits of models, by the names that clients use, with their sources and the learned limits.

    Without names, print the models in the configuration and those with learned limits. Raises ``ConfigurationError``.
    """
    asyncio.run(_limits(names, load(config, os.environ)))


async def _limits(names: Sequence[str], settings: Settings) -> None:
    try:
        async with aclosing(Runtime(settings)) as service:
            known = await learned(service.stores.store.unguarded)
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
            await service.configuration.limit_discovery.settled()
            profiles = [
                await service.profile(route) if route else service.limits.measures.profiles.find(name)
                for name, route in routes
            ]
    except StoreFailed as error:
        raise ConfigurationError(f"store.url: the store can't be read: {error}") from error
    console = table_console()
    render(profiles, console)
    render_learned(known, places, console)


def _route(settings: Settings, upstream: str, model: str) -> Route:
    """Return the configured route for a model at an upstream, or a route without a profile."""
    route = settings.route(model)
    is_configured = route is not None and (route.upstream, route.model) == (upstream, model)
    return route if route is not None and is_configured else Route(upstream, model, None)


def _named(settings: Settings) -> list[str]:
    return [route.model or route.match for route in settings.models if "*" not in route.match]


def render_learned(known: Learned, wanted: Sequence[tuple[str, str]], console: Console) -> None:
    """Print the learned limits and ratios of some models. ``wanted`` lists upstreams and models."""
    now = time.time()
    columns = ("upstream", "model", "caller", "of the", "upstream's tokens", "tokens", "source", "age", "until")
    limits_table = Table(*columns, title="learned limits, and in tokens counted here")
    for tenant, found in known.limits:
        if (found.upstream, found.model) not in wanted:
            continue
        for scope, figure in (("input", found.input), ("input and output", found.total)):
            if figure is not None and figure.holds(now):
                named = "-" if figure.named is None else f"{figure.named:,}"
                sizes = (scope, named, f"{figure.tokens:,}", figure.source)
                life = (_age(now - figure.since), _when(figure.until))
                limits_table.add_row(found.upstream, found.model, short(tenant), *sizes, *life)
    shared = ("upstream", "model", "caller", "ratio", "source", "age", "until")
    ratios_table = Table(*shared, title="the upstream's tokens for each token counted here")
    for tenant, ratio in known.ratios:
        if (ratio.upstream, ratio.model) in wanted and ratio.until >= now:
            source = f"usage of {len(ratio.ratios)} answers"
            life = (_age(now - (ratio.since or ratio.noted)), _when(ratio.until))
            ratios_table.add_row(ratio.upstream, ratio.model, short(tenant), f"{ratio.factor:.2f}", source, *life)
    for table in (limits_table, ratios_table):
        table.title_justify = "left"
        if table.row_count:
            print_table(table, console)
    if not limits_table.row_count and not ratios_table.row_count:
        console.print("Nothing has been learned of these models.", highlight=False)


def short(tenant: str) -> str:
    """Return a team's name, or the start of another caller's digest, which reveals no key."""
    return team_of(tenant) or caller_digest(tenant)


def _age(seconds: float) -> str:
    minutes = max(int(seconds // 60), 0)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def _when(until: float) -> str:
    return datetime.fromtimestamp(until, UTC).strftime("%Y-%m-%d %H:%M UTC")


def rows(profile: Profile) -> Iterator[tuple[str, str, str]]:
    """Return each field of a profile, its value as text, and its source. Numbers have thousands separators."""
    for field in SOURCED:
        value = getattr(profile, field)
        text = "unknown" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
        yield field, text, profile.sources.get(field, "unknown")


def render(profiles: Iterable[Profile], console: Console) -> None:
    """Print one table per profile, with its note below."""
    for profile in profiles:
        table = Table("field", "value", "source", title=Text(profile.model), title_justify="left")
        for row in rows(profile):
            table.add_row(*map(Text, row))
        console.print(table)
        if profile.note:
            console.print(f"note: {profile.note}", markup=False, highlight=False)


_FIX = 'Fix: {"model": "gpt-4o", "messages": [{"role": "user", "content": "Hi"}]}'


def explained(file: Path, config: Path | None, model: str | None, policy: str | None, api: str | None = None) -> None:
    """Print how the proxy would compact the request in a file. Raises ``ConfigurationError``.

    ``api`` is ``chat``, ``responses``, or ``messages``. Default: the one that the request fits.
    """
    settings = load(config, os.environ)
    raw = file.read_bytes()
    try:
        dialect = recognized(raw) if api is None else DIALECTS[api]
        body = asyncio.run(dialect.request.read(raw))
    except UNDECODABLE as error:
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
    async with aclosing(Runtime(settings)) as service:
        route = service.configuration.route(body.model or "", dialect.name)
        if route is None:
            raise ConfigurationError(
                f"no route of 'models' matches {body.model!r}. Fix: add a route, or use --model NAME"
            )
        await service.profile(route)  # asks the upstream in the background
        await service.configuration.limit_discovery.settled()
        profile = await service.profile(route)
        configured = route.profile is not None and (route.profile.context_window or route.profile.max_input_tokens)
        stated = service.configuration.limit_discovery.window(route.upstream, route.model)
        silent = reports_limits(settings.upstreams[route.upstream]) and stated is None and not configured
        limit, factor, whose = await _strictest(service, route, profile, body, policy)
        most = token_budget(profile, body, policy, limit, factor).input
        step = below_step(service.configuration.price(route, profile))
        case = CompactionInput(
            body=body,
            counter=service.limits.measures.counter(profile, dialect),
            policy=policy,
            mode="shadow",
            budget=most,
            tenant=_TENANT,
            upstream=route.upstream,
            rules=rules_for(policy, window_known=most is not None, bounds=bounds_of(profile), price_step=step),
        )
        found = await service.compactor.explain(case)
    console = Console()
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in [*_facts(found, profile, policy), ("learned limits", whose)]:
        table.add_row(name, value)
    if silent:
        table.add_row("reported limits", f"none; upstream {route.upstream} may accept less than the limits above")
    console.print(table)
    parts = Table("part", "tokens")
    for name, tokens in found.parts.items():
        parts.add_row(name, f"{tokens:,}")
    parts.columns[1].justify = "right"
    console.print(parts)


async def _strictest(
    service: Runtime, route: Route, profile: Profile, body: Request, policy: Policy
) -> tuple[LearnedLimit | None, float, str]:
    """Return the learned limit and the factor that leave the smallest budget, and the callers that they're of."""
    file = store_file(service.settings.store.url)
    if service.settings.store.kind == "memory":
        return None, 1.0, "none in this store"
    if file is not None and not file.exists():
        return None, 1.0, f"none: there is no {file.absolute()}"
    try:
        known = await learned(service.stores.store.unguarded)
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


_TENANT = "explain"  # counts of replayed requests are cached under this name, apart from those of callers


_LIMITS = (("context_window", "window"), ("max_input_tokens", "input"))


def _facts(explanation: Explanation, profile: Profile, policy: Policy) -> list[tuple[str, str]]:
    plan, head = explanation.plan, explanation.head
    limits = [
        f"{what} {size:,} ({profile.sources.get(name, 'unknown')})"
        for name, what in _LIMITS
        if (size := getattr(profile, name)) is not None
    ]
    budget = "unknown" if explanation.budget is None else f"{explanation.budget:,} tokens"
    shown = [
        ("model", profile.model + (f" ({profile.note})" if profile.note else "")),
        ("limits of the model", ", ".join(limits) or "unknown"),
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
