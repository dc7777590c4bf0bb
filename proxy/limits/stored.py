"""Read the limits and ratios in a store, learned from rejected requests and usage."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import msgspec

from proxy.constants import UNDECODABLE
from proxy.limits import calibration
from proxy.limits import learned as limits
from proxy.limits.calibration import TokenRatios
from proxy.limits.learned import LearnedLimit, Limits
from proxy.store import ManagedStore
from proxy.store.replicated_map import SharedValue

V = TypeVar("V", bound=SharedValue)


class Learned(NamedTuple):
    """The contents of a store. Each limit and ratio comes with its tenant."""

    limits: Sequence[tuple[str, Limits]]
    ratios: Sequence[tuple[str, TokenRatios]]

    @property
    def models(self) -> list[tuple[str, str]]:
        """Return the upstreams and models with a learned limit or ratio."""
        known = {(found.upstream, found.model) for _, found in self.limits}
        return sorted(known | {(found.upstream, found.model) for _, found in self.ratios})

    def by_tenant(self, upstream: str, model: str, now: float) -> dict[str, tuple[LearnedLimit | None, float]]:
        """Return the valid limits of a model and its factor, by tenant. ``now`` is in seconds since 1970."""
        place = (upstream, model)
        ratios = [(tenant, one) for tenant, one in self.ratios if (one.upstream, one.model) == place]
        factors = {tenant: one.factor for tenant, one in ratios if one.until >= now}
        valid = {tenant: one.valid(now) for tenant, one in self.limits if (one.upstream, one.model) == place}
        tenants = factors.keys() | {tenant for tenant, limit in valid.items() if limit is not None}
        return {tenant: (valid.get(tenant), factors.get(tenant, 1.0)) for tenant in sorted(tenants)}


async def learned(store: ManagedStore) -> Learned:
    """Return the limits and ratios in the store, by tenant. Raises ``StoreFailed``."""
    return Learned(await stored_limits(store), await _entries(store, calibration.KIND, TokenRatios))


async def stored_limits(store: ManagedStore) -> list[tuple[str, Limits]]:
    """Return the limits in the store, by tenant. Raises ``StoreFailed``."""
    return await _entries(store, limits.KIND, Limits)


async def _entries(store: ManagedStore, kind: str, form: type[V]) -> list[tuple[str, V]]:
    """Return the entries of a kind, with their tenants. Skip unreadable entries, as servers do."""
    entries = await store.entries(kind)

    def decoded() -> list[tuple[str, V]]:
        found = []
        for entry in entries:
            with contextlib.suppress(*UNDECODABLE):
                found.append((entry.tenant, msgspec.json.decode(entry.value, type=form)))
        return found

    return await asyncio.to_thread(decoded)
