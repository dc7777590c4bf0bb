"""The commands `requests`, `show`, and `report`: recorded requests, and the ledger, from the store's file."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Literal, TypeVar

import click
import msgspec
from rich.table import Table

from proxy.cli.store import require_file, stored_budgets
from proxy.cli.tables import print_table, table_console
from proxy.config import load
from proxy.config.document import near
from proxy.endpoints.presentation import (
    compaction_text,
    conversation,
    error_text,
    left_prompt,
    milliseconds,
    policy_of,
    request_facts,
    text_lines,
    why_unknown,
)
from proxy.endpoints.queries import days_of, labels, selected, summary_calls
from proxy.endpoints.records import DEFAULT_LIMIT, of_team, request_json
from proxy.errors import ConfigurationError, RequestError
from proxy.pipeline.changes import ChangedPrompt, read_prompt
from proxy.pipeline.recorder import Tags
from proxy.records import open_records, records_file
from proxy.records.model import RECORD_LIMIT, LedgerLabels, LedgerSums, RecordStore
from proxy.records.report import BY, csv_text, day_of, in_shadow, money
from proxy.records.report import report as summed
from proxy.store import StoreFailed, open_store, store_file
from proxy.store.archive import Archive
from proxy.telemetry.record import ID_LENGTH, RequestRecord
from proxy.telemetry.record_json import caller_digest, iso_time, record_json

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

    async def read(
        records: RecordStore, tags: Tags
    ) -> tuple[RequestRecord, dict[str, Any], ChangedPrompt | None] | None:
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
        first, last = days_of(since, until, now, "--since", "--until")
        names = labels("--by", by, BY)
    except RequestError as error:
        raise ConfigurationError(error.message) from error

    rows = of_team(read_records(config, lambda records, tags: records.ledger(first, last)), team)
    if team is not None and not rows:
        read_records(config, lambda records, tags: check_names(config, records, {"team": team}))
    budgets = stored_budgets(load(config, os.environ), team)
    found = {**summed(rows, names, first, last), "budgets": budgets}
    if form == "json":
        click.echo(msgspec.json.format(msgspec.json.encode(found)).decode())
    elif form == "csv":
        click.echo(csv_text(found), nl=False)
    else:
        _print(found, in_shadow(rows))
        for budget in budgets:
            table_console().print(f"Budget of {budget.team}: {budget.text}.", markup=False, highlight=False)


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


INDENT = "    "


def listed(config: Path | None, given: Mapping[str, str], limit: int | None, *, as_json: bool) -> None:
    """Print the requests that the filters select. Raises ``ConfigurationError``."""
    most = limit or DEFAULT_LIMIT
    in_turns = "conversation" in given and not as_json

    async def read(records: RecordStore, tags: Tags) -> None:
        found = await selected(records, tags, given, limit=RECORD_LIMIT + 1, kind=None if in_turns else "request")
        if not found:
            await check_names(config, records, given)
        if in_turns:
            _print_conversation(found, limit or RECORD_LIMIT)
        elif not (found or as_json) and (calls := await selected(records, tags, given, limit=1, kind="summary")):
            click.echo(f"Only summary calls match. Their requests list them, such as: show {calls[0].parent}")
        else:
            _print_requests(found[:most], found[:most], as_json=as_json)
            _print_rest(len(found) - most, found, as_json=as_json)

    read_records(config, read)


def _print_conversation(found: Sequence[RequestRecord], limit: int) -> None:
    turns, sums = conversation(found[:RECORD_LIMIT])
    _print_requests(turns[-limit:], turns, as_json=False)
    if turns:
        click.echo(_filled([sums], indent=""))
    _print_rest(max(len(turns) - limit, len(found) - RECORD_LIMIT), found, as_json=False)


def _print_rest(more: int, found: Sequence[RequestRecord], *, as_json: bool) -> None:
    """Print how many older requests match, if any. JSON stays JSON."""
    if more > 0:
        least = " or more" if len(found) > RECORD_LIMIT else ""
        click.echo(f"{more:,}{least} older requests match. To list them, pass --limit or --until.", err=as_json)


def _print_requests(found: Sequence[RequestRecord], among: Sequence[RequestRecord], *, as_json: bool) -> None:
    """Print requests. Those ``among`` which they are tell whether a compaction is new."""
    for line in map(json.dumps, map(record_json, found)) if as_json else _lines(found, _compactions(among)):
        click.echo(line)
    if not found and not as_json:
        click.echo("No requests match.")


def _compactions(found: Sequence[RequestRecord]) -> set[str]:
    """Return the ids of compacted requests that have other summaries than the one before in their conversation."""
    states: dict[str, tuple[str, int, bool]] = {}
    new = set()
    for one in sorted(found, key=lambda one: one.time):
        state, talk = (one.verdict, one.checkpoints, one.summary == "digest"), one.conversation or one.id
        if one.verdict == "compacted" and states.get(talk) != state:
            new.add(one.id)
        states[talk] = state
    return new


def _lines(found: Sequence[RequestRecord], compactions: set[str]) -> Iterator[str]:
    """Yield a line about each request, and further ones about errors and new compactions."""
    names = [_names(one) for one in found]
    shared = [] if len(found) < 2 else [name for name in names[0] if all(name in others for others in names)]
    names = [["" if name in shared else name for name in own] for own in names]
    lines = [", ".join(filter(None, own[:2])) for own in names]
    lines = [f"{figures} {line}".rstrip() for figures, line in zip(_figures(found), lines, strict=True)]
    wide, day, hides_ids = max(map(len, lines), default=0), "", False
    has_ids = wide + 1 + ID_LENGTH <= shutil.get_terminal_size().columns
    for one, line, own in zip(found, lines, names, strict=True):
        if (today := iso_time(one.time)[:10]) != day:
            yield _filled([f"{today} (UTC)", *([] if day else shared)], indent="")
            day = today
        whole = f"{line:<{wide}} {one.id}" if has_ids else _filled([line], indent="")
        yield click.style(whole, bold=one.id in compactions)
        if len(found) == 1 or one.id in compactions or one.status >= 400 or one.error or one.verdict == "failed":
            record = record_json(one)
            notes = [["" if has_ids else one.id, *own[2:]], [compaction_text(record)], [error_text(record)]]
            yield from filter(None, map(_filled, notes))
        else:
            hides_ids = not has_ids
    if hides_ids:
        yield "For the other ids, pass --json, or more filters."


def _figures(found: Sequence[RequestRecord]) -> list[str]:
    rows = [
        (
            iso_time(one.time)[11:19],
            str(one.status),
            f"{one.verdict:<9}",
            "" if one.before is None else f"{one.before:,}",
            "" if one.sent is None or one.sent == one.before else f"→ {one.sent:,}",
            f"{milliseconds(one.phases.get('total'))} ms",
        )
        for one in found
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [" ".join(map(str.rjust, row, widths)) for row in rows]


def _names(one: RequestRecord) -> list[str]:
    """Return the model, the caller, the client, the conversation, and the user; empty if unknown."""
    caller = "/".join(filter(None, [one.team, one.key])) or f"caller {caller_digest(one.tenant)}"
    tags = [f"{kind} {tag}" if tag else "" for kind, tag in (("conversation", one.conversation), ("user", one.user))]
    return [one.model or "", caller, one.client or "", *tags]


def _filled(parts: Iterable[str], indent: str = INDENT) -> str:
    text, width = ", ".join(filter(None, parts)), shutil.get_terminal_size().columns
    return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=INDENT, break_on_hyphens=False)
