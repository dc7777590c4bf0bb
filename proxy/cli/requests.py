"""The command `requests`: find recorded requests, list a conversation, and follow new ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import click

from proxy.cli.records import check_names, read_records
from proxy.endpoints.presentation import compaction_text, conversation, error_text, milliseconds
from proxy.endpoints.queries import selected
from proxy.endpoints.records import DEFAULT_LIMIT
from proxy.pipeline.tags import Tags
from proxy.records.model import RECORD_LIMIT, RecordStore
from proxy.telemetry.record import ID_LENGTH, RequestRecord
from proxy.telemetry.record_json import caller_digest, iso_time, record_json

INDENT = "    "

POLL_SECONDS = 1.0
"""Seconds between two reads of new records."""

LATE_SECONDS = 3_600
"""Age at which a request that is still in progress is no longer followed. Ids sort by arrival, not by end."""


def listed(config: Path | None, given: Mapping[str, str], limit: int | None, *, as_json: bool, follow: bool) -> None:
    """Print the requests that the filters select. Raises ``ConfigurationError``."""
    most = limit or DEFAULT_LIMIT
    in_turns = "conversation" in given and not (as_json or follow)

    async def read(records: RecordStore, tags: Tags) -> None:
        found = await selected(records, tags, given, limit=RECORD_LIMIT + 1, kind=None if in_turns else "request")
        if not found:
            await check_names(config, records, given)
        if follow:
            await _follow(records, tags, given, as_json=as_json)
        elif in_turns:
            _print_conversation(found, limit or RECORD_LIMIT)
        elif not (found or as_json) and (calls := await selected(records, tags, given, limit=1, kind="summary")):
            click.echo(f"Only summary calls match. Their requests list them, such as: show {calls[0].parent}")
        else:
            _print(found[:most], found[:most], as_json=as_json)
            _print_rest(len(found) - most, found, as_json=as_json)

    with contextlib.suppress(KeyboardInterrupt):
        read_records(config, read)


async def _follow(records: RecordStore, tags: Tags, given: Mapping[str, str], *, as_json: bool) -> None:
    began, seen = time.time(), set[str]()
    first = True
    while True:
        found = [one for one in await selected(records, tags, given) if one.time > began - LATE_SECONDS]
        fresh = [one for one in reversed(found) if one.id not in seen]
        if fresh and not first:
            _print(fresh, found, as_json=as_json, live=True)
        seen, first = {one.id for one in found}, False
        await asyncio.sleep(POLL_SECONDS)


def _print_conversation(found: Sequence[RequestRecord], limit: int) -> None:
    turns, sums = conversation(found[:RECORD_LIMIT])
    _print(turns[-limit:], turns, as_json=False)
    if turns:
        click.echo(_filled([sums], indent=""))
    _print_rest(max(len(turns) - limit, len(found) - RECORD_LIMIT), found, as_json=False)


def _print_rest(more: int, found: Sequence[RequestRecord], *, as_json: bool) -> None:
    """Print how many older requests match, if any. JSON stays JSON."""
    if more > 0:
        least = " or more" if len(found) > RECORD_LIMIT else ""
        click.echo(f"{more:,}{least} older requests match. To list them, pass --limit or --until.", err=as_json)


def _print(
    found: Sequence[RequestRecord], among: Sequence[RequestRecord], *, as_json: bool, live: bool = False
) -> None:
    """Print requests. Those ``among`` which they are tell whether a compaction is new."""
    for line in map(json.dumps, map(record_json, found)) if as_json else _lines(found, _compactions(among), live=live):
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


def _lines(found: Sequence[RequestRecord], compactions: set[str], *, live: bool) -> Iterator[str]:
    """Yield a line about each request, and further ones about errors and new compactions."""
    names = [_names(one) for one in found]
    shared = [] if live or len(found) < 2 else [name for name in names[0] if all(name in others for others in names)]
    names = [["" if name in shared else name for name in own] for own in names]
    lines = [", ".join(filter(None, own[:2])) for own in names]
    lines = [f"{figures} {line}".rstrip() for figures, line in zip(_figures(found), lines, strict=True)]
    wide, day, hides_ids = max(map(len, lines), default=0), "", False
    has_ids = wide + 1 + ID_LENGTH <= shutil.get_terminal_size().columns
    for one, line, own in zip(found, lines, names, strict=True):
        if not live and (today := iso_time(one.time)[:10]) != day:
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
    if hides_ids and not live:
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
