"""Copy everything from one store to another. A copy that was interrupted can be repeated."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from proxy.constants import DAY, UNDECODABLE
from proxy.store import archive
from proxy.store.forgetting import KIND as FORGOTTEN
from proxy.store.forgetting import digest, forgotten, remove
from proxy.store.interface import Entry, ManagedStore
from proxy.store.records import RECORD_LIMIT, RecordQuery, RecordStore
from proxy.store.replicated_map import Known
from proxy.store.sealing import SealedStore

SKIPPED = ("making",)
"""Kinds that aren't copied: leases."""

ROWS = 200
"""Rows of the ledger per write."""


@dataclass(frozen=True, slots=True)
class Place:
    """The stores of one deployment. A source with encryption has one store for encrypted entries, and one for others.

    ``archives`` are stores for archived messages alone. The first one gets new entries.
    """

    stores: Sequence[ManagedStore]
    archives: Sequence[ManagedStore]
    records: Sequence[RecordStore]

    @property
    def skipped(self) -> int:
        """Return the number of damaged entries that a migration left out."""
        return sum(store.skipped for store in (*self.stores, *self.archives) if isinstance(store, SealedStore))

    async def aclose(self) -> None:
        """Close all stores."""
        for store in (*self.stores, *self.archives):
            await store.aclose()
        for records in self.records:
            await records.aclose()


@dataclass(slots=True)
class Copied:
    """What a migration did. ``counts`` has the copied entries by kind, and ``present`` those that the target had."""

    counts: Counter[str] = field(default_factory=Counter)
    present: Counter[str] = field(default_factory=Counter)
    forgotten: int = 0


class Migration:
    """One run. ``forms`` has the types of values to merge if both stores have one. Others are only added.

    ``source`` is a name of the source that stays the same when a run is repeated. ``record_seconds`` is the lifetime of
    a record.
    """

    def __init__(
        self,
        source: Place,
        target: Place,
        *,
        name: str,
        forms: Mapping[str, type[Known]],
        record_seconds: float,
        report: Callable[[Copied], None] = lambda copied: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._from = source
        self._to = target
        self._name = name
        self._forms = forms
        self._record_seconds = record_seconds
        self._report = report
        self._clock = clock
        self._marks: set[str] = set()
        self._tenants: set[str] = set()
        self.copied = Copied()

    async def run(self) -> Copied:
        """Copy everything that the target doesn't have. Raises ``StoreFailed``; another run then continues."""
        self._marks = await self._forgotten()
        for store in (*self._from.stores, *self._from.archives):
            async for entries in store.pages():
                for entry in entries:
                    await self._copy(entry)
                self._report(self.copied)
        if self._to.records:
            for records in self._from.records:
                await self._copy_records(records, self._to.records[0])
            await self._copy_ledger(self._to.records[0])
        # Other processes may have forgotten tenants that this run had already copied.
        late = await self._forgotten() - self._marks
        for tenant in self._tenants:
            if digest(tenant) in late:
                for store in (*self._to.stores, *self._to.archives):
                    await remove(store, tenant)
                for records in self._to.records:
                    await records.remove(tenant)
        return self.copied

    async def _forgotten(self) -> set[str]:
        return {one for place in (self._from, self._to) for store in place.stores for one in await forgotten(store)}

    def _is_wanted(self, tenant: str) -> bool:
        if digest(tenant) in self._marks:
            self.copied.forgotten += 1
            return False
        self._tenants.add(tenant)
        return True

    async def _copy(self, entry: Entry) -> None:
        if entry.kind in SKIPPED or not self._is_wanted(entry.tenant):
            return
        archived = entry.kind in (archive.KIND, archive.FIRST_KIND)
        store = self._to.archives[0] if archived and self._to.archives else self._to.stores[0]
        row = (entry.tenant, entry.kind, entry.key)
        found = await store.get(*row)  # a repeated run shouldn't send large entries that are already there
        if found is None:
            found = await store.add(*row, entry.value, entry.seconds)
            if found == entry.value:
                if entry.kind != FORGOTTEN:
                    self.copied.counts[entry.kind] += 1
                return
        form = self._forms.get(entry.kind)
        while form is not None and (merged := _merged(form, entry.value, found)) is not None:
            value, until = merged
            if value == found or await store.replace(*row, found, value, max(until - self._clock(), 1.0)):
                break
            found = await store.add(*row, entry.value, entry.seconds)
        if entry.kind != FORGOTTEN:
            self.copied.present[entry.kind] += 1

    async def _copy_records(self, source: RecordStore, target: RecordStore) -> None:
        before: str | None = None
        while page := await source.select(RecordQuery(before=before, limit=RECORD_LIMIT // 2)):
            before = page[-1].id
            seconds = page[0].time + self._record_seconds - self._clock()
            wanted = [record for record in page if self._is_wanted(record.tenant)]
            if seconds > 0 and wanted:
                await target.write(wanted, seconds, ledger=False)
                self.copied.counts["record"] += len(wanted)
            self._report(self.copied)

    async def _copy_ledger(self, target: RecordStore) -> None:
        """Copy the rows of all sources together, because a repeated run replaces the rows of the source."""
        rows: dict[Any, Any] = {}
        for source in self._from.records:
            for labels, sums in await source.ledger(0, int(self._clock() // DAY) + 1):
                if self._is_wanted(labels.tenant):
                    if labels in rows:
                        rows[labels].add(sums)
                    else:
                        rows[labels] = sums
        several = list(rows.items())
        for start in range(0, len(several), ROWS):
            await target.copy_rows(several[start : start + ROWS], self._name)
        self.copied.counts["ledger row"] += len(several)


def _merged(form: type[Known], ours: bytes, theirs: bytes) -> tuple[bytes, float] | None:
    """Return the merged value and its expiration time, or ``None`` if one of the values is unreadable."""
    try:
        merged = msgspec.json.decode(theirs, type=form).merged(msgspec.json.decode(ours, type=form))
    except UNDECODABLE:
        return None
    return msgspec.json.encode(merged), merged.until


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
