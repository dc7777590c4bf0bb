"""Report the state of the proxy to a caller, or to an administrator."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from typing import Any

import msgspec
import structlog

from proxy import __version__
from proxy.config import Settings
from proxy.endpoints.queries import Viewer
from proxy.limits.learned import LimitRecord
from proxy.limits.stored import stored_limits
from proxy.pipeline.runtime import Runtime
from proxy.store import StoreFailed
from proxy.store.guarded import READ_SECONDS
from proxy.telemetry.record import shown_model
from proxy.telemetry.record_json import caller_digest, iso_time, team_of

log = structlog.get_logger(__name__)

MOST_LIMITS = 200
"""Learned limits to return, those that hold longest. Clients choose the names of models."""

_STARTED = time.time()


async def status(service: Runtime, viewer: Viewer) -> dict[str, Any]:
    """Return the state of this worker and of the store. A part that the store can't provide is ``None``."""
    settings = service.settings
    return {
        "object": "compaction.status",
        "version": __version__,
        "configuration": await asyncio.to_thread(configuration_hash, settings),
        "started": iso_time(_STARTED),
        "uptime_seconds": int(time.time() - _STARTED),
        "pid": os.getpid(),
        "store": {
            "kind": settings.store.kind,
            "archive": settings.store.kind,
            "failing": service.failing_stores,
        },
        "learned_limits": await _learned(service, viewer),
        "budgets": await service.money.spending.budgets(viewer.tenants),
    }


def configuration_hash(settings: Settings) -> str:
    """Return a short digest of the settings in force. Workers with the same settings have the same digest."""
    plain = msgspec.json.encode(settings.model_dump(warnings=False), enc_hook=str, order="deterministic")
    return hashlib.sha256(plain).hexdigest()[:12]


async def _learned(service: Runtime, viewer: Viewer) -> list[dict[str, Any]] | None:
    try:
        async with asyncio.timeout(READ_SECONDS):
            known = await stored_limits(service.stores.store.unguarded)
    except (StoreFailed, TimeoutError) as failure:
        log.warning("store.read_failed", reason=str(failure) or "timeout")
        return None
    now = time.time()
    seen = [
        (tenant, found)
        for tenant, found in known
        if viewer.sees(tenant) and any(one is not None and one.holds(now) for one in (found.input, found.total))
    ]
    if len(seen) > MOST_LIMITS:
        seen = sorted(seen, key=lambda one: -one[1].until)[:MOST_LIMITS]
    return [
        {
            "caller": caller_digest(tenant),
            "team": team_of(tenant),
            "upstream": found.upstream,
            "model": shown_model(found.model),
            "input": _limit(found.input, now),
            "total": _limit(found.total, now),
        }
        for tenant, found in seen
    ]


def _limit(record: LimitRecord | None, now: float) -> dict[str, Any] | None:
    if record is None or not record.holds(now):
        return None
    since, until = iso_time(record.since), iso_time(record.until)
    return {"tokens": record.tokens, "named": record.named, "source": record.source, "since": since, "until": until}
