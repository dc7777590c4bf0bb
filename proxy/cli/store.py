"""The commands `store migrate` and `store backup`.

`store migrate` copies everything from a store or a backup to the store of the configuration. A copy that was
interrupted can be repeated. It adds the entries that the target lacks, so it needs no state of its own. A backup is
such a copy in one file.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
import msgspec
from msgspec import structs

from proxy.access.spending import Budget, Spending
from proxy.config import Settings, load
from proxy.constants import DAY, UNDECODABLE
from proxy.errors import ConfigurationError
from proxy.limits import calibration, learned
from proxy.records import open_records
from proxy.records.model import RECORD_LIMIT, LedgerLabels, LedgerSums, RecordQuery, RecordStore
from proxy.records.sqlite import SqliteRecords
from proxy.store import ManagedStore, StoreFailed, accounts, open_store, store_file
from proxy.store.forgetting import KEPT, digest, forgotten, remove
from proxy.store.forgetting import KIND as FORGOTTEN
from proxy.store.interface import Entry
from proxy.store.replicated_map import SharedValue
from proxy.store.sqlite import tables_in

FORMS: dict[str, type[SharedValue]] = {
    **dict.fromkeys(KEPT, accounts.Balance),
    learned.KIND: learned.Limits,
    calibration.KIND: calibration.TokenRatios,
}
"""Values that a migration merges. Replicas merge them in the same way."""

REPORT_SECONDS = 2.0

SKIPPED = ("making",)  # kinds that aren't copied: leases
ROWS = 200  # rows of the ledger per write


def migrated(source: str, config: Path | None, *, add: bool) -> int:
    """Copy the ``source``: an address, a backup, or a configuration's file. Return the exit status.

    Unless ``add``, a backup needs an empty store. Raises ``ConfigurationError``.
    """
    target = load(config, os.environ)
    url, keys = target.store.url, target.store.encryption.keys
    path = Path(source)
    backup = path.is_file() and tables_in(path) >= {"entries", "records", "ledger"}
    if backup:
        url = f"sqlite:///{path.resolve()}"
    elif "://" in source:
        url = source
    elif path.is_dir() or (path.suffix in (".yaml", ".yml") and path.exists()):
        old = load(path, os.environ)
        url, keys = old.store.url, old.store.encryption.keys
    elif path.exists():
        fix = "pass a file that store backup wrote, a configuration (.yaml), or the address of a store"
        raise ConfigurationError(f"{path}: isn't a readable backup. Fix: {fix}")
    else:
        raise ConfigurationError(f"--from: there is no {source}. Fix: pass the address of a store, or a configuration")
    if "sqlite://" in (url, target.store.url):
        raise ConfigurationError("A store in memory can't be copied. Fix: pass the address of a file or of a server")
    require_file(store_file(url), "--from", "pass the address of a store, or a configuration")
    if location(url) == location(target.store.url):
        raise ConfigurationError("--from: this is the store of the configuration. Fix: pass the new one with --config")
    held = opened(target.store.url, target.store.encryption.keys)
    origin = _in_file(path, keys, every=True) if backup else opened(url, keys, every=True)
    again = f"run the command again{' with --add' if backup else ''}, which continues it"
    return asyncio.run(_copied(origin, held, url, target, again, into_empty=backup and not add))


def stored_budgets(settings: Settings, team: str | None = None) -> list[Budget]:
    """Return the budgets of a team, or of all. Their amounts are ``None`` if this machine doesn't have the store."""
    path = store_file(settings.store.url)
    unknown = settings.store.kind == "memory" or (path is not None and not path.exists())

    async def read() -> list[Budget]:
        if unknown:
            return await Spending(None, lambda: settings).budgets(tenants)
        async with contextlib.aclosing(open_store(settings.store.url, settings.store.encryption.keys)) as store:
            return await Spending(store, lambda: settings).budgets(tenants)

    tenants = None if team is None else (f"team:{team}",)
    found = asyncio.run(read())
    return [structs.replace(budget, used=None, left=None) for budget in found] if unknown else found


def require_file(path: Path | None, where: str, fix: str = "pass the server's configuration with --config") -> None:
    """Raise ``ConfigurationError`` if the file of a store doesn't exist."""
    if path is None or path.exists():
        return
    start = ""
    if not path.is_absolute():
        start = " A relative path starts at the current folder."
        fix = "run the command in the server's folder, or write an absolute path"
    raise ConfigurationError(f"{where}: there is no {path.absolute()}.{start} Fix: {fix}")


def location(url: str) -> str:
    """Return an address without credentials and options, with an absolute path."""
    path = store_file(url)
    return f"sqlite:///{path.resolve()}" if path is not None else re.sub(r"//[^/]*@", "//", url).partition("?")[0]


async def _copied(
    source: Deployment, target: Deployment, url: str, settings: Settings, fix: str, *, into_empty: bool = False
) -> int:
    """Copy and close both deployments, and print the numbers. ``url`` is that of the source.

    Raises ``ConfigurationError`` with the ``fix`` if the copy isn't complete, or if the target must be empty and isn't.
    """
    name = hashlib.sha256(location(url).encode()).hexdigest()[:16]
    migration = Migration(source, target, name, settings.record_seconds, report=_progress())
    try:
        if into_empty and not await target.is_empty():
            remedy = "use an empty store, or pass --add unless the backup comes from this one"
            raise ConfigurationError(f"store.url: isn't empty. Fix: {remedy}")
        copied = await migration.run()
        unread = await source.unreadable()
    except StoreFailed as error:
        raise ConfigurationError(f"store.url: the copy isn't complete ({error}). Fix: {fix}") from error
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
            "Fix: use a configuration with these keys",
            err=True,
        )
    return int(bool(unread))


def backed_up(path: Path, config: Path | None) -> int:
    """Copy the store and the records to a new file. Return the exit status.

    Raises ``ConfigurationError``.
    """
    settings = _stored(config)
    url, keys = settings.store.url, settings.store.encryption.keys
    require_file(store_file(url), "store.url")
    if path.exists():
        raise ConfigurationError(f"{path}: exists already. Fix: choose another name, or remove the file")
    source, fix = opened(url, keys, every=True), f"remove {path}, and run the command again"
    return asyncio.run(_copied(source, _in_file(path, keys), url, settings, fix))


def _stored(config: Path | None) -> Settings:
    """Return the settings. Raises ``ConfigurationError`` if the store is in memory."""
    settings = load(config, os.environ)
    if settings.store.kind == "memory":
        raise ConfigurationError("store.url: a store in memory has no backup. Fix: set it to a file or a server")
    return settings


def _in_file(path: Path, keys: Sequence[bytes], *, every: bool = False) -> Deployment:
    """Return the stores of a backup. See ``opened`` for ``every``."""
    several = [keys, ()] if every and keys else [keys]
    url = f"sqlite:///{path.resolve()}"
    return Deployment([open_store(url, own) for own in several], [SqliteRecords(path, own) for own in several])


def opened(url: str, keys: Sequence[bytes], *, every: bool = False) -> Deployment:
    """Return the stores of a deployment. If ``every`` is true and there are keys, also read unencrypted entries."""
    several = [keys, ()] if every and keys else [keys]
    return Deployment(
        [open_store(url, own) for own in several],
        [open_records(url, own) for own in several],
    )


def _progress() -> Callable[[Copied], None]:
    """Return a function that prints a line to the standard error every ``REPORT_SECONDS``."""
    due = time.monotonic() + REPORT_SECONDS

    def report(copied: Copied) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + REPORT_SECONDS
            click.echo(f"{copied.counts.total():,} copied, {copied.present.total():,} already there", err=True)

    return report


@dataclass(frozen=True, slots=True)
class Deployment:
    """The stores of one deployment. A source with encryption has one store for encrypted entries, and another."""

    stores: Sequence[ManagedStore]
    records: Sequence[RecordStore]

    async def unreadable(self) -> int:
        """Return the number of entries that are encrypted with other keys, or were damaged and left out."""
        readable, counts = {"", *self.stores[0].codecs}, await self.stores[0].counts()
        others = sum(count for codec, count in counts.items() if codec not in readable)
        return others + sum(store.skipped for store in self.stores)

    async def is_empty(self) -> bool:
        for store in self.stores:
            async for entries in store.pages():
                if entries:
                    return False
        return not any([await records.select(RecordQuery(limit=1)) for records in self.records])

    async def aclose(self) -> None:
        for store in self.stores:
            await store.aclose()
        for records in self.records:
            await records.aclose()


@dataclass(slots=True)
class Copied:
    """The result of a migration: ``counts`` are the copied entries by kind, ``present`` those that the target had."""

    counts: Counter[str] = field(default_factory=Counter)
    present: Counter[str] = field(default_factory=Counter)
    forgotten: int = 0


@dataclass
class Migration:
    """One run. It merges the ``FORMS`` if both stores have a value. Others are only added.

    ``name`` is that of the source, and stays the same when a run is repeated. ``record_seconds`` is the lifetime of a
    record.
    """

    source: Deployment
    target: Deployment
    name: str
    record_seconds: float
    report: Callable[[Copied], None] = lambda copied: None
    copied: Copied = field(default_factory=Copied)
    _marks: set[str] = field(default_factory=set)
    _tenants: set[str] = field(default_factory=set)

    async def run(self) -> Copied:
        """Copy everything that the target doesn't have. Raises ``StoreFailed``; another run then continues."""
        self._marks = await self._forgotten()
        for store in self.source.stores:
            async for entries in store.pages():
                for entry in entries:
                    await self._copy(entry)
                self.report(self.copied)
        if self.target.records:
            for records in self.source.records:
                await self._copy_records(records, self.target.records[0])
            await self._copy_ledger(self.target.records[0])
        # Other processes may have forgotten tenants that this run had already copied.
        late = await self._forgotten() - self._marks
        for tenant in self._tenants:
            if digest(tenant) in late:
                for store in self.target.stores:
                    await remove(store, tenant)
                for records in self.target.records:
                    await records.remove(tenant)
        return self.copied

    async def _forgotten(self) -> set[str]:
        stores = (*self.source.stores, *self.target.stores)
        return {one for store in stores for one in await forgotten(store)}

    def _is_wanted(self, tenant: str) -> bool:
        if digest(tenant) in self._marks:
            self.copied.forgotten += 1
            return False
        self._tenants.add(tenant)
        return True

    async def _copy(self, entry: Entry) -> None:
        if entry.kind in SKIPPED or not (entry.kind in KEPT or self._is_wanted(entry.tenant)):
            return
        store = self.target.stores[0]
        row, form, ours = (entry.tenant, entry.kind, entry.key), FORMS.get(entry.kind), entry.value
        if form is accounts.Balance:
            with contextlib.suppress(*UNDECODABLE):
                ours = msgspec.json.encode(msgspec.json.decode(ours, type=accounts.Balance).copy_from(self.name))
        found = await store.get(*row)  # a repeated run shouldn't send large entries that are already there
        if found is None:
            found = await store.add(*row, ours, entry.seconds)
            if found == ours:
                if entry.kind != FORGOTTEN:
                    self.copied.counts[entry.kind] += 1
                return
        while form is not None:
            try:
                merged = msgspec.json.decode(found, type=form).merged(msgspec.json.decode(ours, type=form))
            except UNDECODABLE:  # one of the values is unreadable
                break
            value = msgspec.json.encode(merged)
            if value == found or await store.replace(*row, found, value, max(merged.until - time.time(), 1.0)):
                break
            found = await store.add(*row, ours, entry.seconds)
        if entry.kind != FORGOTTEN:
            self.copied.present[entry.kind] += 1

    async def _copy_records(self, source: RecordStore, target: RecordStore) -> None:
        before: str | None = None
        while page := await source.select(RecordQuery(before=before, limit=RECORD_LIMIT // 2)):
            before = page[-1].id
            seconds = page[0].time + self.record_seconds - time.time()
            wanted = [record for record in page if self._is_wanted(record.tenant)]
            if seconds > 0 and wanted:
                await target.write(wanted, seconds, ledger=False)
                self.copied.counts["record"] += len(wanted)
            self.report(self.copied)

    async def _copy_ledger(self, target: RecordStore) -> None:
        """Copy the rows of all sources together, because a repeated run replaces the rows of the source."""
        rows: dict[LedgerLabels, LedgerSums] = {}
        for source in self.source.records:
            for labels, sums in await source.ledger(0, int(time.time() // DAY) + 1):
                if self._is_wanted(labels.tenant):
                    rows.setdefault(labels, LedgerSums()).add(sums)
        several = list(rows.items())
        for start in range(0, len(several), ROWS):
            await target.copy_rows(several[start : start + ROWS], self.name)
        self.copied.counts["ledger row"] += len(several)
