"""Tables of the limits and ratios in the store, learned from rejected requests and usage."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from proxy.cli.profile_report import print_table
from proxy.config import Settings, load
from proxy.errors import ConfigurationError
from proxy.limits.learned import Limits
from proxy.limits.stored import Learned, forget_limits
from proxy.store import StoreFailed, open_store
from proxy.telemetry.record_json import caller_digest, team_of


def render(known: Learned, wanted: Sequence[tuple[str, str]], console: Console) -> None:
    """Print the learned limits and ratios of some models. ``wanted`` lists upstreams and models."""
    now = time.time()
    limits_table = Table(
        "upstream",
        "model",
        "caller",
        "of the",
        "upstream's tokens",
        "tokens",
        "source",
        "age",
        "until",
        title="learned limits, and in tokens counted here",
    )
    for tenant, found in known.limits:
        if (found.upstream, found.model) not in wanted:
            continue
        for scope, figure in (("input", found.input), ("input and output", found.total)):
            if figure is not None and figure.holds(now):
                named = "-" if figure.named is None else f"{figure.named:,}"
                size = f"{figure.tokens:,}"
                life = (_age(now - figure.since), _when(figure.until))
                limits_table.add_row(
                    found.upstream, found.model, short(tenant), scope, named, size, figure.source, *life
                )
    columns = ("upstream", "model", "caller", "ratio", "source", "age", "until")
    ratios_table = Table(*columns, title="the upstream's tokens for each token counted here")
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
    store = open_store(settings.store.url, settings.store.encryption.keys)
    try:
        return await forget_limits(store, set(names), time.time())
    except StoreFailed as error:
        raise ConfigurationError(f"store.url: the store can't be written: {error}") from error
    finally:
        await store.aclose()


def short(tenant: str) -> str:
    """Return a team's name, or the start of another caller's digest, which reveals no key."""
    return team_of(tenant) or caller_digest(tenant)


def _age(seconds: float) -> str:
    minutes = max(int(seconds // 60), 0)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def _when(until: float) -> str:
    return datetime.fromtimestamp(until, UTC).strftime("%Y-%m-%d %H:%M UTC")
