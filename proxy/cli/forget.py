"""The command `forget`: removes the stored data of a team or a caller."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from pathlib import Path

import click

from proxy.config import Settings, load
from proxy.config.issues import near
from proxy.errors import ConfigurationError
from proxy.records import open_records
from proxy.store import StoreFailed, open_store
from proxy.store.forgetting import forget as forget_tenant
from proxy.store.forgetting import remove
from proxy.store.opening import open_archive, store_file
from proxy.store.sqlite_worker import put_aside


def forget(team: str | None, key_sha256: str | None, config: Path | None) -> None:
    """Remove the stored data of a team, or of a caller by the key's digest, and print the number of entries.

    Raises ``ConfigurationError``.
    """
    settings = load(config, os.environ)
    path = store_file(settings.store.url)
    if settings.store.kind == "memory" and settings.archive.url is None:
        raise ConfigurationError("store.url: this store is in the memory of the server: stop it, and it is gone")
    if path is not None and not path.exists():
        raise ConfigurationError(f"store.url: there is no {path}. Fix: pass the server's configuration with --config")
    if (team is None) == (key_sha256 is None):
        raise ConfigurationError("Pass either --team or --key-sha256.")
    counts, unknown = asyncio.run(_forget(settings, tenants(settings, team, key_sha256)))
    kinds: Counter[str] = Counter()
    for kind, count in counts.items():
        kinds[kind.partition(".")[0]] += count  # without the format
    for kind, count in sorted(kinds.items()):
        click.echo(f"{kind}: {count} {'entry' if count == 1 else 'entries'} removed")
    if not counts and team is not None and team not in settings.teams and not unknown:
        raise ConfigurationError(
            f"Nothing is stored of a team '{team}', and the configuration has none. Fix: {near(team, settings.teams)}"
        )
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


async def _forget(settings: Settings, names: list[str]) -> tuple[Counter[str], int]:
    store = open_store(settings.store.url, settings.store.encryption.keys)
    records = open_records(settings.store.url, settings.store.encryption.keys)
    archive = open_archive(settings.archive.url, settings.archive.options, settings.store.encryption.keys)
    counts: Counter[str] = Counter()
    section = "store.url"
    try:
        for name in names:
            counts.update(await forget_tenant(store, name))
            counts.update(await records.remove(name))
        unknown = await store.unknown()
        if archive is not None:
            section = "archive.url"
            for name in names:
                counts.update(await remove(archive, name))
            unknown += await archive.unknown()
        return +counts, unknown
    except StoreFailed as error:
        raise ConfigurationError(
            f"{section}: some entries could not be removed ({error}). Fix: run the command again"
        ) from error
    finally:
        await store.aclose()
        await records.aclose()
        if archive is not None:
            await archive.aclose()
