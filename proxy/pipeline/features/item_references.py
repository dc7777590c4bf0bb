"""Remember the output items that pass, and resolve references to them in later requests."""

from __future__ import annotations

import asyncio
from functools import partial

from proxy.constants import DAY
from proxy.dialects.answers import ItemReader
from proxy.dialects.request import Request
from proxy.pipeline.exchange import Exchange
from proxy.pipeline.job import Outcome
from proxy.pipeline.response_start import ResponseStart
from proxy.pipeline.runtime import Runtime
from proxy.upstream.bridge.returned import is_unique

PAUSES = (0.1, 0.2, 0.4)
"""Seconds between reads of items that another process may be writing."""


async def resolve(runtime: Runtime, exchange: Exchange) -> None:
    """Put the items that a request refers to in its units, and the reported sizes of unknown ones."""
    body, tenant, archive = exchange.body, exchange.caller.tenant, exchange.caller.policy.archive
    if not body.references:
        return
    items = {} if archive is None else await _awaited(runtime, tenant, body, archive.days * DAY)
    unknown = [id for id in body.references if id not in items]
    size = body.size
    body.resolve(items, runtime.stores.items.sizes(tenant, unknown) if exchange.caller.has_storage else {})
    await exchange.memory.more(body.size - size)


async def _awaited(runtime: Runtime, tenant: str, body: Request, seconds: float) -> dict[str, bytes]:
    """Return the known items that a request refers to, by id.

    Another process may be writing the items of the answer before, so wait briefly for ids that were never missed.
    """
    items = await _remembered(runtime, tenant, body, seconds)
    for pause in PAUSES:
        missing = [id for id in body.references if id not in items]
        if not missing or not runtime.stores.items.may_come(tenant, missing):
            break
        await asyncio.sleep(pause)
        items = await _remembered(runtime, tenant, body, seconds)
    runtime.stores.items.missed(tenant, [id for id in body.references if id not in items])
    return items


async def _remembered(runtime: Runtime, tenant: str, body: Request, seconds: float) -> dict[str, bytes]:
    """Return the known items that a request refers to, by id.

    An id that stands for several items is unknown, as the upstream couldn't know either which one is meant.
    """
    keys: dict[str, set[str]] = {}
    for id, place in body.places():
        keys.setdefault(id, set()).add(_key(id, place))
    certain = {next(iter(several)): id for id, several in keys.items() if len(several) == 1}
    found = await runtime.stores.items.find(tenant, list(certain), seconds)
    return {certain[key]: item for key, item in found.items()}


def _key(id: str, place: str) -> str:
    """Return the key of an item. An upstream may use an id again, so its items are known by their places, too."""
    return id if is_unique(id) else f"{id} {place}"


def item_reader(runtime: Runtime, exchange: Exchange, start: ResponseStart, outcome: Outcome) -> ItemReader | None:
    """Return a reader that remembers the items of an answer; ``None`` if no later request can refer to them.

    The proxy remembers items only if the policy keeps an archive.
    """
    archive = exchange.caller.policy.archive
    if archive is None or outcome.verdict == "off" or start.answer.status != 200 or not exchange.body.may_refer:
        return None
    keep = partial(runtime.stores.items.keep, exchange.caller.tenant, seconds=archive.days * DAY)
    place = exchange.body.place()
    return exchange.dialect.item_reader(lambda id, item: keep(_key(id, place), item))
