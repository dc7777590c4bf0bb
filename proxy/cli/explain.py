"""The command `explain`: tables about a recorded request."""

from __future__ import annotations

import asyncio
import math
import os
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from proxy.cli.models import short
from proxy.config import Policy, Route, Settings, load
from proxy.config.issues import near
from proxy.constants import UNDECODABLE
from proxy.dialects.apis import DIALECTS, recognized
from proxy.dialects.dialect import Dialect
from proxy.dialects.request import Request
from proxy.errors import BadBody, ConfigurationError
from proxy.limits.learned import LearnedLimit
from proxy.limits.profiles import Profile
from proxy.limits.stored import learned
from proxy.pipeline.budget import token_budget
from proxy.pipeline.job import Explanation
from proxy.pipeline.replay import facts, replay
from proxy.pipeline.runtime import Runtime
from proxy.store import StoreFailed
from proxy.store.opening import store_file
from proxy.telemetry.record_json import team_of
from proxy.upstream.limit_discovery import reports_limits

_FIX = 'Fix: {"model": "gpt-4o", "messages": [{"role": "user", "content": "Hi"}]}'


def explained(file: Path, config: Path | None, model: str | None, policy: str | None, api: str | None = None) -> None:
    """Print how the proxy would compact the request in a file. Raises ``ConfigurationError``.

    ``api`` is ``chat``, ``responses``, or ``messages``. Default: the one that the request fits.
    """
    settings = load(config, os.environ)
    raw = file.read_bytes()
    try:
        dialect = recognized(raw) if api is None else DIALECTS[api]
        body = asyncio.run(dialect.parse(raw))
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
    service = Runtime(settings)
    try:
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


def _parts(found: Explanation) -> Table:
    table = Table("part", "tokens")
    for name, tokens in found.parts.items():
        table.add_row(name, f"{tokens:,}")
    table.columns[1].justify = "right"
    return table
