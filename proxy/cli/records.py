"""The commands `show` and `report`: the records of requests and the ledger, from the store's file."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

import click
from rich.table import Table

from proxy.cli.tables import print_table, table_console
from proxy.config import load
from proxy.config.issues import near
from proxy.endpoints.queries import labels, time_in
from proxy.endpoints.records import of_team, request_json
from proxy.errors import ConfigurationError, RequestError
from proxy.records import open_records, records_file
from proxy.records.model import RECORD_LIMIT, RecordQuery, RecordStore
from proxy.records.report import BY, csv_text, day_of, in_shadow
from proxy.records.report import report as summed
from proxy.store import StoreFailed
from proxy.store.opening import store_file

T = TypeVar("T")

COLUMNS = {
    "requests": "requests",
    "compacted": "compacted",
    "errors": "errors",
    "received": "tokens received",
    "sent": "tokens sent",
    "cost": "cost",
    "summary_cost": "summaries",
    "savings": "savings",
}
"""The columns of the table for people. CSV and JSON have all."""

SHADOW_COLUMNS = {
    "would_compact": "would compact",
    "would_avoid": "of these, too large",
    "shadow_savings": "would save",
}
"""Further columns if there are requests in shadow mode."""

MONEY = ("cost", "summary_cost", "savings", "shadow_savings")


def show(id: str, config: Path | None, *, as_json: bool) -> None:
    """Print the record of a request. Raises ``ConfigurationError``."""

    async def read(records: RecordStore) -> dict[str, Any] | None:
        found = await records.get(id)
        if found is None:
            return None
        return request_json(found, await records.select(RecordQuery(parent=id, limit=RECORD_LIMIT)))

    found = _read(config, read)
    if found is None:
        raise ConfigurationError(f"There is no record {id!r}. Fix: pass an id from the header x-compaction-id")
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    for sentence in found["explanation"]:
        click.echo(sentence)
    for call in found["summary_calls"]:
        click.echo(f"Summary call {call['id']} to {call['model']}: {' '.join(call['explanation'][1:])}")
    click.echo()
    for name, value in _flat({name: found[name] for name in found if name not in ("explanation", "summary_calls")}):
        click.echo(f"{name:<24} {value}")


def report(config: Path | None, team: str | None, since: str, by: str, form: Literal["text", "csv", "json"]) -> None:
    """Print the sums of the ledger. Raises ``ConfigurationError``."""
    now = time.time()
    try:
        first, names = day_of(time_in("--since", since, now)), labels("--by", by, BY)
    except RequestError as error:
        raise ConfigurationError(error.message) from error
    last = day_of(now)
    rows = of_team(_read(config, lambda records: records.ledger(first, last)), team)
    if team is not None and not rows:
        _check_team(config, team, last)
    found = summed(rows, names, first, last)
    if form == "json":
        click.echo(json.dumps(found, indent=2))
    elif form == "csv":
        click.echo(csv_text(found), nl=False)
    else:
        _print(found, in_shadow(rows))


def _check_team(config: Path | None, team: str, last: int) -> None:
    """Raise ``ConfigurationError`` if neither the configuration nor the whole ledger has a team."""
    teams = {*load(config, os.environ).teams}
    teams |= {labels.team for labels, _ in _read(config, lambda records: records.ledger(0, last)) if labels.team}
    if team not in teams:
        raise ConfigurationError(f"There is no team '{team}'. Fix: {near(team, teams)}")


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
        table.add_row(*(row[name] or "-" for name in found["by"]), *(_shown(name, row[name]) for name in columns))
    print_table(table, console)
    if shadow:
        saved = _shown("shadow_savings", found["total"]["shadow_savings"])
        teams = ", ".join(shadow)
        console.print(
            f"In shadow mode: {teams}. With enforce, they would save {saved} more (estimated).", highlight=False
        )
    if found["total"]["unpriced"]:
        console.print(f"{found['total']['unpriced']} requests or summaries have no known price.", highlight=False)


def _shown(name: str, value: str | int) -> str:
    return f"{float(value):.4f}" if name in MONEY else f"{value:,}"


def _flat(value: dict[str, Any], above: str = "") -> Iterator[tuple[str, object]]:
    """Yield the values of a record with their names, without those that are missing or empty."""
    for name, inner in value.items():
        if isinstance(inner, dict):
            yield from _flat(inner, f"{above}{name}.")
        elif isinstance(inner, list) and inner and isinstance(inner[0], dict):
            for number, part in enumerate(inner, 1):
                yield from _flat(part, f"{above}{name}.{number}.")
        elif inner not in (None, []):
            yield f"{above}{name}", ", ".join(inner) if isinstance(inner, list) else inner


def _read(config: Path | None, work: Callable[[RecordStore], Awaitable[T]]) -> T:
    """Return the result of ``work`` on the records of a configuration's store. Raises ``ConfigurationError``."""
    store = load(config, os.environ).store
    path = store_file(store.url)
    if store.kind == "memory":
        raise ConfigurationError("store.url: the records are in the server's memory. Fix: use GET /compaction/requests")
    if path is not None and not records_file(path).exists():
        raise ConfigurationError(
            f"store.url: there is no {records_file(path)}. Fix: pass the server's configuration with --config"
        )

    async def run() -> T:
        records = open_records(store.url, store.encryption.keys)
        try:
            return await work(records)
        finally:
            await records.aclose()

    try:
        return asyncio.run(run())
    except StoreFailed as error:
        raise ConfigurationError(
            f"store.url: the records can't be read ({error}). Fix: run the command again"
        ) from error
