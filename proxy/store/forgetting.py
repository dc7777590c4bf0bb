"""Remove everything that a store has of a tenant, and tell the other processes that use the store."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol, TypeVar

from proxy.constants import DAY
from proxy.store.interface import ManagedStore, StoreFailed
from proxy.store.sqlite import is_lasting

T = TypeVar("T")

KIND = "forgotten"
"""The kind of entry that tells other processes about a forgotten tenant. These entries don't belong to a tenant."""

SPENDING, ALLOWANCE = "spending.2", "spent.2"  # the kinds of entries with accounts of teams

KEPT = (SPENDING, ALLOWANCE)
"""Kinds of entries that stay. Otherwise, forgetting a team's conversations would give it a new budget."""

MARK_SECONDS = DAY

PATIENCE = 60.0  # seconds to retry each step of a removal while other processes use the store


class Holder(Protocol):
    """Something that remembers entries of tenants."""

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        """Drop the entries of forgotten tenants. Return these tenants."""
        ...


async def forget(store: ManagedStore, tenant: str, patience: float = PATIENCE) -> Counter[str]:
    """Remove every entry of a tenant except ``KEPT``, all of its bytes, and list the tenant in ``forgotten``.

    Return the number of removed entries by kind. Raises ``StoreFailed`` after a partial removal; calling it again is
    safe.
    """
    counts = await _remove_entries(store, tenant, patience)
    mark = repr(time.time()).encode()
    await _retry(lambda: store.put("", KIND, digest(tenant), mark, MARK_SECONDS), patience)
    await _retry(store.rebuild, patience)
    await _retry(store.erase, patience)
    return counts


async def remove(store: ManagedStore, tenant: str, patience: float = PATIENCE) -> Counter[str]:
    """Remove every entry of a tenant like ``forget``, but don't list the tenant, and leave names to be overwritten."""
    counts = await _remove_entries(store, tenant, patience)
    await _retry(store.erase, patience)
    return counts


async def forgotten(store: ManagedStore) -> dict[str, float]:
    """Return the tenants forgotten in the last day: their digests, and the time in seconds since 1970.

    Raises ``StoreFailed``.
    """
    marks = {}
    for entry in await store.entries(KIND):
        try:
            marks[entry.key] = float(entry.value)
        except ValueError:
            continue
    return marks


def digest(tenant: str) -> str:
    return hashlib.sha256(tenant.encode()).hexdigest()


def drop(cache: MutableMapping[Any, Any], forgotten: Callable[[str], bool], place: int = 0) -> set[str]:
    """Drop the entries of forgotten tenants from a cache, and return those tenants.

    ``place`` is the position of the tenant in the cache's keys.
    """
    tenants = {tenant for tenant in {key[place] for key in cache} if forgotten(tenant)}
    for key in [key for key in cache if key[place] in tenants]:
        cache.pop(key, None)
    return tenants


async def _remove_entries(store: ManagedStore, tenant: str, patience: float) -> Counter[str]:
    counts: Counter[str] = Counter()
    kept = [entry for kind in KEPT for entry in await _retry(lambda: store.entries(kind), patience)]  # noqa: B023
    kept = [entry for entry in kept if entry.tenant == tenant]
    while removed := await _retry(lambda: store.remove(tenant), patience):
        counts.update(removed)
    for entry in kept:
        # A process that has written the entry meanwhile has included what it had read of it.
        row = entry.tenant, entry.kind, entry.key, entry.value, entry.seconds
        await _retry(lambda: store.add(*row), patience)  # noqa: B023
        counts[entry.kind if entry.kind in counts else "encrypted"] -= 1
    return +counts


async def _retry(work: Callable[[], Awaitable[T]], patience: float) -> T:
    """Retry work until it succeeds. Raises ``StoreFailed`` after ``patience`` seconds, or if no retry can help."""
    deadline = time.monotonic() + patience
    while True:
        try:
            return await work()
        except StoreFailed as error:
            if time.monotonic() > deadline or is_lasting(error.__cause__):
                raise
        await asyncio.sleep(0.1)
