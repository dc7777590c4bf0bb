"""The commands `show`, `report`, and `explain`: recorded requests, and the ledger, from the store's file."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any, Literal, TypeVar

import click
import msgspec
from rich.console import Console
from rich.table import Table

from proxy.cli.models import short
from proxy.cli.store import require_file, stored_budgets
from proxy.cli.tables import print_table, table_console
from proxy.config import Policy, Route, Settings, load
from proxy.config.document import near
from proxy.constants import UNDECODABLE
from proxy.dialects.apis import DIALECTS, Dialect, recognized
from proxy.dialects.request import Request
from proxy.endpoints.presentation import left_prompt, policy_of, request_facts, text_lines, why_unknown
from proxy.endpoints.queries import labels, period, summary_calls
from proxy.endpoints.records import of_team, request_json
from proxy.errors import BadBody, ConfigurationError, RequestError
from proxy.limits.learned import LearnedLimit
from proxy.limits.profiles import Profile
from proxy.limits.profiles.prices import below_step
from proxy.limits.stored import learned
from proxy.pipeline.budget import token_budget
from proxy.pipeline.changes import Prompt, read_prompt
from proxy.pipeline.costs import price_for
from proxy.pipeline.job import CompactionInput, Explanation
from proxy.pipeline.rules import bounds_of, rules_for
from proxy.pipeline.runtime import Runtime
from proxy.pipeline.tags import Tags
from proxy.records import open_records, records_file
from proxy.records.model import LedgerLabels, LedgerSums, RecordStore
from proxy.records.report import BY, PART_TITLES, csv_text, day_of, in_shadow, latency, money, seconds, slice_titles
from proxy.records.report import report as summed
from proxy.store import StoreFailed, open_store, store_file
from proxy.store.archive import Archive
from proxy.telemetry.record import RequestRecord
from proxy.telemetry.record_json import team_of
from proxy.upstream.limit_discovery import reports_limits

T = TypeVar("T")

Rows = list[tuple[LedgerLabels, LedgerSums]]

COLUMNS = {
    "requests": "requests",
    "cost": "cost",
    "summary_cost": "summary\ncost",
    "savings": "savings",
    "compacted": "compacted",
    "avoided": "rescued",
    "errors": "errors",
    "received": "tokens\nreceived",
    "sent": "tokens\nsent",
    "input": "input\nreported",
    "output": "output\nreported",
}
"""The columns of the table for people, first those that a narrow one has room for. CSV and JSON have all."""

SHADOW_COLUMNS = {
    "would_compact": "would\ncompact",
    "would_avoid": "would have\nrescued",
    "shadow_savings": "would\nsave",
}
"""Further columns if there are requests in shadow mode."""

MONEY = ("cost", "summary_cost", "savings", "shadow_savings")


def show(id: str, config: Path | None, *, messages: bool, as_json: bool) -> None:
    """Print the record of a request. Raises ``ConfigurationError``."""
    settings = load(config, os.environ)

    async def read(records: RecordStore, tags: Tags) -> tuple[RequestRecord, dict[str, Any], Prompt | None] | None:
        found = await records.get(id)
        if found is None:
            return None
        calls = await summary_calls(records, found)
        async with aclosing(open_store(settings.store.url, settings.store.encryption.keys)) as entries:
            return found, request_json(found, calls), await read_prompt(Archive(entries), found)

    shown = read_records(config, read)
    if shown is None:
        raise ConfigurationError(f"There is no record {id!r}. Fix: pass an id from the header x-compaction-id")
    record, found, prompt = shown
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    for sentence in found["explanation"]:
        _say(sentence)
    for call in found["summary_calls"]:
        before = "" if call["parent"] == id else f", which request {call['parent']} began"
        _say(f"Summary call {call['id']} to {call['model']}{before}: {' '.join(call['explanation'][1:])}")
    click.echo()
    policy = policy_of(record, settings)
    for sentence in [why_unknown(record, policy)] if prompt is None else left_prompt(prompt, record, policy):
        _say(sentence)
    for line in text_lines(found["window"], prompt, texts=messages):
        click.echo(line)
    if prompt is not None and not messages:
        _say("With --messages, this command prints the summary and the stored messages.")
    click.echo()
    for name, value in request_facts(record, found):
        _say(f"{name:<24} {value}", " " * 25)


def _say(text: str, indent: str = "") -> None:
    """Print a sentence. A terminal gets whole words on each line, and ``indent`` before all lines but the first."""
    if sys.stdout.isatty():
        wide = shutil.get_terminal_size().columns
        text = textwrap.fill(text, wide, subsequent_indent=indent, break_on_hyphens=False)
    click.echo(text)


def report(
    config: Path | None, team: str | None, since: str, until: str | None, by: str, form: Literal["text", "csv", "json"]
) -> None:
    """Print the sums of the ledger. Raises ``ConfigurationError``."""
    now = time.time()
    try:
        begin, end = period(since, until, now, "--since", "--until")
        first, last, names = day_of(begin), day_of(end), labels("--by", by, BY)
    except RequestError as error:
        raise ConfigurationError(error.message) from error

    async def read(records: RecordStore, tags: Tags) -> tuple[Rows, dict[str, Any]]:
        return await records.ledger(first, last), await latency(records, begin, end, None, team)

    read_rows, times = read_records(config, read)
    rows = of_team(read_rows, team)
    if team is not None and not rows:
        read_records(config, lambda records, tags: check_names(config, records, {"team": team}))
    budgets = stored_budgets(load(config, os.environ), team)
    found = {**summed(rows, names, first, last), "latency": times, "budgets": budgets}
    if form == "json":
        click.echo(msgspec.json.format(msgspec.json.encode(found)).decode())
    elif form == "csv":
        click.echo(csv_text(found), nl=False)
    else:
        _print(found, in_shadow(rows))
        console = table_console()
        _print_latency(times, console)
        for budget in budgets:
            console.print(f"Budget of {budget.team}: {budget.text}.", markup=False, highlight=False)


async def check_names(config: Path | None, records: RecordStore, given: Mapping[str, str]) -> None:
    """Raise ``ConfigurationError`` for a team, key, or policy that neither the configuration nor the ledger has."""
    settings, rows = load(config, os.environ), await records.ledger(0, day_of(time.time()))
    configured = {
        "team": settings.teams,
        "key": [key.shown for team in settings.teams.values() for key in team.keys],
        "policy": settings.policies,
    }
    for kind, names in configured.items():
        known = {*names, *(getattr(labels, kind) for labels, _ in rows)} - {None}
        if kind in given and given[kind] not in known:
            raise ConfigurationError(f"There is no {kind} '{given[kind]}'. Fix: {near(given[kind], known)}")


def _print(found: dict[str, Any], shadow: list[str]) -> None:
    console = table_console()
    columns = COLUMNS | (SHADOW_COLUMNS if shadow else {})
    table = Table(title=f"{found['since']} to {found['until']} (UTC), money in US dollars", title_justify="left")
    for name in found["by"]:
        table.add_column(name)
    for title in columns.values():
        table.add_column(title, justify="right")
    total = {**dict.fromkeys(found["by"]), found["by"][0]: "total", **found["total"]}
    for row in (*found["rows"], total):
        if row is total:
            table.add_section()
        table.add_row(*(row[name] or "-" for name in found["by"]), *(_shown(row, name) for name in columns))
    print_table(table, console)
    if shadow:
        saved = _shown(found["total"], "shadow_savings")
        console.print(f"Requests in shadow mode: {', '.join(shadow)}.", highlight=False)
        console.print(f"With enforce, they would save {saved} more (estimated).", highlight=False)
    if found["total"]["unpriced"]:
        console.print(f"{found['total']['unpriced']} requests or summaries have no known price.", highlight=False)


def _print_latency(found: Mapping[str, Any], console: Console) -> None:
    """Print the figures of each team and part: the whole period, then its slices."""
    if not found["rows"]:
        return
    since, until = (found[end][:16].replace("T", " ") for end in ("since", "until"))
    table = Table(title=f"Seconds from {since} to {until} (UTC): median, then 95th percentile", title_justify="left")
    for name in ("team", "part"):
        table.add_column(name)
    for title in ("requests", "whole", *(one.replace(" ", "\n") for one in slice_titles(found))):
        table.add_column(title, justify="right")
    for row in found["rows"]:
        times = (f"{seconds(one['p50'])}\n{seconds(one['p95'])}" for one in (row, *row["slices"]))
        table.add_row(row["team"] or "-", PART_TITLES[row["part"]], f"{row['requests']:,}", *times)
    print_table(table, console)
    if found["sampled"]:
        console.print("Some columns count only their newest 1,000 requests. --team and a shorter period count more.")


def _shown(row: Mapping[str, Any], name: str) -> str:
    if name not in MONEY:
        return f"{row[name]:,}"
    amount = money(row, name)
    return amount if amount == "unknown" else f"{float(amount):.4f}"


def read_records(config: Path | None, work: Callable[[RecordStore, Tags], Awaitable[T]]) -> T:
    """Return the result of ``work`` on the records of a configuration's store. Raises ``ConfigurationError``."""
    store = load(config, os.environ).store
    path = store_file(store.url)
    if store.kind == "memory":
        raise ConfigurationError("store.url: the records are in the server's memory. Fix: use GET /compaction/requests")
    require_file(None if path is None else records_file(path), "store.url")

    async def run() -> T:
        keys = store.encryption.keys
        async with (
            aclosing(open_records(store.url, keys)) as records,
            aclosing(open_store(store.url, keys)) as entries,
        ):
            return await work(records, Tags(entries))

    try:
        return asyncio.run(run())
    except RequestError as error:
        raise ConfigurationError(f"--{error.message}") from error
    except StoreFailed as error:
        raise ConfigurationError(
            f"store.url: the records can't be read ({error}). Fix: run the command again"
        ) from error


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
        found = await _replay(service, dialect, body, policy, route, limit, factor)
    console = Console()
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in [*_facts(found, policy), ("learned limits", whose)]:
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


def _parts(found: Explanation) -> Table:
    table = Table("part", "tokens")
    for name, tokens in found.parts.items():
        table.add_row(name, f"{tokens:,}")
    table.columns[1].justify = "right"
    return table


_TENANT = "explain"
"""Counts of replayed requests are cached under this name, apart from those of callers."""


class _Replay(msgspec.Struct, eq=False, frozen=True):
    """The effect of compaction on a request, under the profile of its model."""

    explanation: Explanation
    profile: Profile


async def _replay(
    runtime: Runtime,
    dialect: Dialect,
    body: Request,
    policy: Policy,
    route: Route,
    learned: LearnedLimit | None = None,
    factor: float = 1.0,
) -> _Replay:
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
        tenant=_TENANT,
        upstream=route.upstream,
        rules=rules_for(policy, window_known=most is not None, bounds=bounds_of(profile), price_step=step),
    )
    return _Replay(await runtime.compactor.explain(case), profile)


def _facts(found: _Replay, policy: Policy) -> list[tuple[str, str]]:
    explanation, profile = found.explanation, found.profile
    plan, head = explanation.plan, explanation.head
    budget = "unknown" if explanation.budget is None else f"{explanation.budget:,} tokens"
    shown = [
        ("model", profile.model + (f" ({profile.note})" if profile.note else "")),
        ("limits of the model", ", ".join(_profile_limits(profile)) or "unknown"),
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


def _profile_limits(profile: Profile) -> Iterator[str]:
    """Yield each limit on tokens with its source."""
    for name, what in (("context_window", "window"), ("max_input_tokens", "input")):
        if (tokens := getattr(profile, name)) is not None:
            yield f"{what} {tokens:,} ({profile.sources.get(name, 'unknown')})"
