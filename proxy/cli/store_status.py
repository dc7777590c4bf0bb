"""The command `store status`: what is stored where."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from proxy.cli.store_migration import location, opened
from proxy.config import Settings, load
from proxy.constants import DAY
from proxy.errors import ConfigurationError
from proxy.records import records_file
from proxy.store import StoreFailed
from proxy.store.interface import Entry
from proxy.store.opening import is_redis, store_file, unreadable

Report = dict[str, Any]


def show(config: Path | None, *, as_json: bool) -> int:
    """Print the state of the store, the archive, and the records. Return the exit status.

    Raises ``ConfigurationError``.
    """
    settings = load(config, os.environ)
    if settings.store.kind == "memory":
        raise ConfigurationError("store.url: this store is in the memory of the server. Fix: use /compaction/status")
    path = store_file(settings.store.url)
    if path is not None and not path.exists():
        raise ConfigurationError(f"store.url: there is no {path}. Fix: pass the server's configuration with --config")
    found = asyncio.run(_report(settings))
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        for name, part in found.items():
            _print(name, part)
    return int(not all(part["reachable"] for part in found.values()))


async def _report(settings: Settings) -> dict[str, Report]:
    url, keys = settings.store.url, settings.store.encryption.keys
    place = opened(url, keys, settings.archive)
    path = store_file(url)
    encrypted = {"encrypted": bool(keys)}

    async def store() -> Report:
        kinds, tenants = await usage([store.pages() for store in place.stores])
        return {
            "bytes": await _size(url, path),
            "unreadable": await unreadable(url, keys) + sum(getattr(store, "skipped", 0) for store in place.stores),
            "tenants": tenants,
            "kinds": {kind: _json(found) for kind, found in kinds.items()},
        }

    async def archive() -> Report:
        kinds, tenants = await usage([store.pages() for store in place.archives])
        unread = sum([await store.unknown() for store in place.archives])
        return {
            "unreadable": unread,
            "tenants": tenants,
            "kinds": {kind: _json(found) for kind, found in kinds.items()},
        }

    async def records() -> Report:
        if path is not None and not records_file(path).exists():
            return {"bytes": 0, "records": 0}
        size = None if path is None else await _size(url, records_file(path))
        return {"bytes": size, "records": await place.records[0].count()}

    backend = "redis" if is_redis(url) else "sqlite"
    held = location(url) if path is None else str(records_file(path).resolve())
    try:
        return {
            "store": {"backend": backend, "address": location(url), **encrypted, **await _reached(store)},
            "archive": {"backend": backend, "address": location(url), "reachable": True}
            if settings.archive.url is None
            else {
                "backend": settings.archive.kind,
                "address": settings.archive.url,
                **encrypted,
                **await _reached(archive),
            },
            "records": {"backend": backend, "address": held, **encrypted, **await _reached(records)},
        }
    finally:
        await place.aclose()


async def _reached(work: Callable[[], Awaitable[Report]]) -> Report:
    try:
        return {"reachable": True, **await work()}
    except StoreFailed as failure:
        return {"reachable": False, "error": str(failure)}


async def _size(url: str, path: Path | None) -> int:
    """Return the bytes of a file and its log, or the memory of the server."""
    if path is not None:
        return sum(each.stat().st_size for each in (path, Path(f"{path}-wal")) if each.exists())
    from proxy.store.redis_client import used_memory

    return await used_memory(url)


def _json(found: Usage) -> Report:
    return {
        "entries": found.entries,
        "bytes": found.bytes,
        "first_expires_seconds": round(found.first),
        "last_expires_seconds": round(found.last),
    }


def _print(name: str, part: Report) -> None:
    click.echo(f"{name}: {part['backend']} {part['address']}")
    for key, value in part.items():
        if key == "kinds":
            for kind, found in value.items():
                days = (found[f"{which}_expires_seconds"] / DAY for which in ("first", "last"))
                lifetimes = " to ".join(f"{each:.1f}" for each in days)
                click.echo(
                    f"  {kind:<20} {found['entries']:>9,} entries {found['bytes']:>15,} bytes, {lifetimes} days left"
                )
        elif key not in ("backend", "address") and value is not None:
            shown = (
                ("no", "yes")[value] if isinstance(value, bool) else f"{value:,}" if isinstance(value, int) else value
            )
            click.echo(f"  {key:<20} {shown}")


@dataclass(slots=True)
class Usage:
    """The entries of one kind: their number, their bytes without names and encryption, and their lifetimes left."""

    entries: int = 0
    bytes: int = 0
    first: float = float("inf")
    last: float = 0.0


async def usage(pages: Sequence[AsyncIterator[list[Entry]]]) -> tuple[dict[str, Usage], int]:
    """Return the entries by kind, and the number of tenants."""
    kinds: dict[str, Usage] = {}
    tenants: set[str] = set()
    for one in pages:
        async for entries in one:
            for entry in entries:
                kind = kinds.setdefault(entry.kind, Usage())
                kind.entries += 1
                kind.bytes += len(entry.value)
                kind.first, kind.last = min(kind.first, entry.seconds), max(kind.last, entry.seconds)
                if entry.tenant:
                    tenants.add(entry.tenant)
    return dict(sorted(kinds.items())), len(tenants)
