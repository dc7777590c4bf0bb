"""The command `forget`: remove the stored data of a team or a caller."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import click

from proxy.cli.store import Deployment, opened, require_file
from proxy.config import Settings, load
from proxy.config.document import near
from proxy.constants import DAY
from proxy.errors import ConfigurationError
from proxy.records.model import RECORD_LIMIT, RecordQuery
from proxy.store import StoreFailed, store_file
from proxy.store.forgetting import KEPT
from proxy.store.forgetting import forget as forget_tenant
from proxy.store.sqlite import put_aside


def forget(team: str | None, key_sha256: str | None, config: Path | None, *, dry_run: bool = False) -> None:
    """Remove the stored data of a team, or of a caller by the key's digest, and print the number of entries.

    With ``dry_run``, only count them. Raises ``ConfigurationError``.
    """
    settings = load(config, os.environ)
    path = store_file(settings.store.url)
    if settings.store.kind == "memory":
        raise ConfigurationError("store.url: this store is in the memory of the server: stop it, and it is gone")
    require_file(path, "store.url")
    if (team is None) == (key_sha256 is None):
        raise ConfigurationError("Pass either --team or --key-sha256.")
    counts, unknown = asyncio.run(_forget(settings, team, tenants(settings, team, key_sha256), dry_run=dry_run))
    kinds: Counter[str] = Counter()
    for kind, count in counts.items():
        kinds[kind.partition(".")[0]] += count  # without the format
    for kind, count in sorted(kinds.items()):
        done = "would be removed" if dry_run else "removed"
        click.echo(f"{kind}: {count} {'entry' if count == 1 else 'entries'} {done}")
    if not counts:
        click.echo("Nothing was stored.")
    if unknown:
        click.echo(
            f"{unknown} entries can't be read with the keys of this configuration, so their owners are unknown. "
            "The command didn't remove them.",
            err=True,
        )
    for aside in () if path is None else put_aside(path):
        click.echo(
            f"{aside}: a damaged file that was moved aside. The command doesn't remove it. Fix: delete it", err=True
        )


def tenants(settings: Settings, team: str | None, key_sha256: str | None) -> list[str]:
    """Return the tenants of a team or a key.

    A team's data is stored under its name, and with ``auth.mode: open`` under the digests of its keys.
    """
    if team is None:
        return [f"key:{key_sha256}"]
    keys = settings.teams[team].keys if team in settings.teams else ()
    return [f"team:{team}", *(f"key:{key.hash.removeprefix('sha256:')}" for key in keys)]


async def _forget(
    settings: Settings, team: str | None, names: Sequence[str], *, dry_run: bool
) -> tuple[Counter[str], int]:
    """Return the number of entries by kind, and that of entries under other keys."""
    counts: Counter[str] = Counter()
    unknown = 0
    keys = settings.store.encryption.keys
    try:
        async with aclosing(opened(settings.store.url, keys)) as deployment:
            is_unknown = team is not None and team not in settings.teams
            found = await _stored(deployment, names) if dry_run or is_unknown else counts
            if is_unknown and not found:
                rows = [row for one in deployment.records for row in await one.ledger(0, int(time.time() // DAY) + 1)]
                known = sorted({labels.team for labels, _ in rows if labels.team is not None})
                raise ConfigurationError(
                    f"There is no team '{team}' in the configuration, and nothing is stored of it. The ledger has: "
                    f"{', '.join(known) or 'no team'}. Fix: {near(str(team), {*known, *settings.teams})}"
                )
            if dry_run:
                return found, 0
            for name in names:
                for store in deployment.stores:
                    counts.update(await forget_tenant(store, name))
                for records in deployment.records:
                    counts.update(await records.remove(name))
            for store in deployment.stores:
                unknown += await store.unknown()
            return +counts, unknown
    except StoreFailed as error:
        raise ConfigurationError(
            f"store.url: some entries could not be removed ({error}). Fix: run the command again"
        ) from error


async def _stored(deployment: Deployment, names: Sequence[str]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for store in deployment.stores:
        async for entries in store.pages():
            counts.update(entry.kind for entry in entries if entry.tenant in names and entry.kind not in KEPT)
    for records in deployment.records:
        before: str | None = None
        while page := await records.select(RecordQuery(tenants=tuple(names), before=before, limit=RECORD_LIMIT)):
            before = page[-1].id
            counts["record"] += len(page)
        counts["ledger row"] += len(await records.ledger(0, int(time.time() // DAY) + 1, tuple(names)))
    return +counts
