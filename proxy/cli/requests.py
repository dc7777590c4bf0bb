"""The command `requests`: find recorded requests, list a conversation, and follow new ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from proxy.cli.records import check_names, read_records
from proxy.endpoints.presentation import compaction_text, conversation, error_text, figure, milliseconds
from proxy.endpoints.queries import selected
from proxy.pipeline.tags import Tags
from proxy.records.model import RECORD_LIMIT, RecordStore
from proxy.telemetry.record import RequestRecord
from proxy.telemetry.record_json import record_json

WIDTH = 80

POLL_SECONDS = 1.0
"""Seconds between two reads of new records."""

LATE_SECONDS = 3_600
"""Age at which a request that is still in progress is no longer followed. Ids sort by arrival, not by end."""


def listed(config: Path | None, given: Mapping[str, str], limit: int, *, as_json: bool, follow: bool) -> None:
    """Print the requests that the filters select. Raises ``ConfigurationError``."""
    in_turns = "conversation" in given and not (as_json or follow)

    async def read(records: RecordStore, tags: Tags) -> None:
        kind, most = (None, RECORD_LIMIT) if in_turns else ("request", limit)
        found = await selected(records, tags, given, limit=most, kind=kind)
        if not found:
            await check_names(config, records, given)
        if follow:
            await _follow(records, tags, given, as_json=as_json)
        elif in_turns:
            _print_conversation(found)
        else:
            _print(found, as_json=as_json)

    with contextlib.suppress(KeyboardInterrupt):
        read_records(config, read)


async def _follow(records: RecordStore, tags: Tags, given: Mapping[str, str], *, as_json: bool) -> None:
    began, seen = time.time(), set[str]()
    first = True
    while True:
        found = [one for one in await selected(records, tags, given) if one.time > began - LATE_SECONDS]
        if not first:
            _print([one for one in reversed(found) if one.id not in seen], as_json=as_json)
        seen, first = {one.id for one in found}, False
        await asyncio.sleep(POLL_SECONDS)


def _print_conversation(found: Sequence[RequestRecord]) -> None:
    turns, sums = conversation(found)
    _print(turns, as_json=False)
    if turns:
        click.echo(textwrap.fill(sums, WIDTH))
    if len(found) == RECORD_LIMIT:
        click.echo(f"These are the newest {RECORD_LIMIT:,} records. Use --until to see older ones.")


def _print(found: Sequence[RequestRecord], *, as_json: bool) -> None:
    for one in map(record_json, found):
        click.echo(json.dumps(one) if as_json else "\n".join(_lines(one)))
    if not found and not as_json:
        click.echo("No requests match.")


def _lines(one: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines about a request. Each fits a terminal."""
    tokens, caller = one["tokens"], "/".join(filter(None, [one["team"], one["key"]])) or f"caller {one['caller']}"
    sizes = f"{figure(tokens['before'])} to {figure(tokens['sent'])} tokens" if tokens["before"] is not None else ""
    took = f"{milliseconds(one['ms']['total'])} ms"
    yield "  ".join(filter(None, [one["time"][:19].replace("T", " "), str(one["status"]), one["verdict"], sizes, took]))
    named = [f"{name} {one[name]}" for name in ("conversation", "user") if one[name]]
    for parts in (
        [one["id"], caller, one["model"]],
        [one["client"], *named],
        [compaction_text(dict(one))],
        [error_text(dict(one))],
    ):
        if text := ", ".join(filter(None, parts)):
            yield textwrap.fill(text, WIDTH, initial_indent="    ", subsequent_indent="    ")
