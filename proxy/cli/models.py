"""The command `models`: the limits of models, their sources, and the limits learned from upstreams."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from proxy.cli.tables import print_table, table_console
from proxy.config import Route, Settings, load
from proxy.errors import ConfigurationError
from proxy.limits.learned import Limits
from proxy.limits.profiles import SOURCED, Profile
from proxy.limits.stored import Learned, forget_limits, learned
from proxy.pipeline.runtime import Runtime
from proxy.store import StoreFailed, open_store
from proxy.telemetry.record_json import caller_digest, team_of


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


def forget_learned(names: Sequence[str], config: Path | None) -> None:
    """Forget the learned limits of models, by the upstreams' names. Raises ``ConfigurationError``."""
    forgotten = asyncio.run(_forgotten(names, load(config, os.environ)))
    for tenant, found in forgotten:
        click.echo(f"Forgot the limits of {found.model} at {found.upstream} for caller {short(tenant)}.")
    if not forgotten:
        click.echo("Nothing has been learned of the limits of these models.")


async def _forgotten(names: Sequence[str], settings: Settings) -> list[tuple[str, Limits]]:
    try:
        async with aclosing(open_store(settings.store.url, settings.store.encryption.keys)) as store:
            return await forget_limits(store, set(names), time.time())
    except StoreFailed as error:
        raise ConfigurationError(f"store.url: the store can't be written: {error}") from error


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
