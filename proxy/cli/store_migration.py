"""The command `store migrate`: copy a store to that of the configuration."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from proxy.access import spending
from proxy.config import Settings, load
from proxy.config.store import ArchiveStoreSettings
from proxy.errors import ConfigurationError
from proxy.limits import calibration, learned
from proxy.store import StoreFailed, accounts, open_store
from proxy.store.migration import Copied, Migration, Place
from proxy.store.opening import open_archive, open_records, store_file, unreadable
from proxy.store.replicated_map import Known
from proxy.summary import budget

FORMS: dict[str, type[Known]] = {
    budget.KIND: accounts.Entry,
    spending.KIND: accounts.Entry,
    learned.KIND: learned.Limits,
    calibration.KIND: calibration.TokenRatios,
}
"""Values that a migration merges. Replicas merge them in the same way."""

REPORT_SECONDS = 2.0


def migrated(source: str, config: Path | None) -> int:
    """Copy the ``source``, an address or a configuration's file. Return the exit status.

    Raises ``ConfigurationError``.
    """
    target = load(config, os.environ)
    url, keys, archive = target.store.url, target.store.encryption.keys, None
    if "://" in source:
        url = source
    elif Path(source).exists():
        old = load(Path(source), os.environ)
        url, keys, archive = old.store.url, old.store.encryption.keys, old.archive
    else:
        raise ConfigurationError(f"--from: there is no {source}. Fix: pass the address of a store, or a configuration")
    if "sqlite://" in (url, target.store.url):
        raise ConfigurationError("A store in memory can't be copied. Fix: pass the address of a file or of a server")
    path = store_file(url)
    if path is not None and not path.exists():
        raise ConfigurationError(f"--from: there is no {path}. Fix: pass the address of a store, or a configuration")
    former = None if archive is None else archive.url
    # With another archive.url and the same store, only the archive moves.
    if location(url) == location(target.store.url) and target.archive.url == former:
        raise ConfigurationError("--from: this is the store of the configuration. Fix: pass the new one with --config")
    return asyncio.run(_migrate(url, keys, archive if former != target.archive.url else None, target))


def location(url: str) -> str:
    """Return an address without credentials and options, with an absolute path."""
    path = store_file(url)
    return f"sqlite:///{path.resolve()}" if path is not None else re.sub(r"//[^/]*@", "//", url).partition("?")[0]


async def _migrate(url: str, keys: Sequence[bytes], archive: ArchiveStoreSettings | None, settings: Settings) -> int:
    source, target = (
        opened(url, keys, archive, every=True),
        opened(settings.store.url, settings.store.encryption.keys, settings.archive),
    )
    if location(url) == location(settings.store.url):
        # The records are already there.
        for own in source.records:
            await own.aclose()
        source = replace(source, records=[])
    migration = Migration(
        source,
        target,
        name=hashlib.sha256(location(url).encode()).hexdigest()[:16],
        forms=FORMS,
        record_seconds=settings.record_seconds,
        report=_Progress(),
    )
    try:
        copied = await migration.run()
        unread = await unreadable(url, keys) + source.skipped
    except StoreFailed as error:
        raise ConfigurationError(
            f"store.url: the migration isn't complete ({error}). Fix: run the command again, which continues it"
        ) from error
    finally:
        await source.aclose()
        await target.aclose()
    for kind in sorted({*+copied.counts, *+copied.present}):
        click.echo(f"{kind}: {copied.counts[kind]:,} copied, {copied.present[kind]:,} already there")
    if copied.forgotten:
        click.echo(f"{copied.forgotten:,} entries of forgotten teams or callers weren't copied.")
    if unread:
        click.echo(
            f"{unread:,} entries can't be read with the keys of the source, so they weren't copied. "
            "Fix: pass the configuration with these keys as --from",
            err=True,
        )
    return int(bool(unread))


def opened(url: str, keys: Sequence[bytes], archive: ArchiveStoreSettings | None, *, every: bool = False) -> Place:
    """Return the stores of a deployment. If ``every`` is true and there are keys, also read unencrypted entries."""
    several = [keys, ()] if every and keys else [keys]
    objects = None if archive is None else archive.url
    return Place(
        [open_store(url, own) for own in several],
        [
            found
            for own in several
            if (found := open_archive(objects, None if archive is None else archive.options, own)) is not None
        ],
        [open_records(url, own) for own in several],
    )


class _Progress:
    """Print a line to the standard error every ``REPORT_SECONDS``."""

    def __init__(self) -> None:
        self._next = time.monotonic() + REPORT_SECONDS

    def __call__(self, copied: Copied) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + REPORT_SECONDS
            click.echo(f"{copied.counts.total():,} copied, {copied.present.total():,} already there", err=True)
