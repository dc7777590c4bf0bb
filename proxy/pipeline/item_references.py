"""Remember the output items that pass, and resolve references to them in later requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from proxy.dialects.answers import ItemReader
from proxy.dialects.request import Request
from proxy.errors import RequestError
from proxy.http.decompression import unpack
from proxy.pipeline.context import ConversationContext
from proxy.pipeline.outcome import Outcome
from proxy.pipeline.response_start import ResponseStart, header, is_encoded
from proxy.pipeline.services import Services
from proxy.upstream.bridge.response_events import is_unique

DAY = 86_400.0

LARGEST = 4_000_000
"""Bytes of a decompressed answer whose items are remembered."""

PAUSES = (0.1, 0.2, 0.4)
"""Seconds between reads of items that another process may be writing."""

INLINE_BYTES = 32_768
"""Compressed bytes that are decompressed on the event loop. More are decompressed in a thread."""


async def resolve_references(services: Services, context: ConversationContext) -> None:
    """Put the items that a request refers to in its units, and the reported sizes of unknown ones."""
    body, tenant, archive = context.body, context.caller.tenant, context.caller.policy.archive
    if not body.references:
        return
    items = {} if archive is None else await _awaited(services, tenant, body, archive.days * DAY)
    unknown = [id for id in body.references if id not in items]
    size = body.size
    body.resolve(items, services.items.sizes(tenant, unknown) if context.caller.kept else {})
    await context.memory.more(body.size - size)


async def _awaited(services: Services, tenant: str, body: Request, seconds: float) -> dict[str, bytes]:
    """Return the known items that a request refers to, by id.

    Another process may be writing the items of the answer before, so wait briefly for ids that were never missed.
    """
    items = await _remembered(services, tenant, body, seconds)
    for pause in PAUSES:
        missing = [id for id in body.references if id not in items]
        if not missing or not services.items.may_come(tenant, missing):
            break
        await asyncio.sleep(pause)
        items = await _remembered(services, tenant, body, seconds)
    services.items.missed(tenant, [id for id in body.references if id not in items])
    return items


async def _remembered(services: Services, tenant: str, body: Request, seconds: float) -> dict[str, bytes]:
    """Return the known items that a request refers to, by id.

    An id that stands for several items is unknown, as the upstream couldn't know either which one is meant.
    """
    keys: dict[str, set[str]] = {}
    for id, place in body.places():
        keys.setdefault(id, set()).add(_key(id, place))
    certain = {next(iter(several)): id for id, several in keys.items() if len(several) == 1}
    found = await services.items.recall(tenant, list(certain), seconds)
    return {certain[key]: item for key, item in found.items()}


def _key(id: str, place: str) -> str:
    """Return the key of an item. An upstream may use an id again, so its items are known by their places, too."""
    return id if is_unique(id) else f"{id} {place}"


def item_reader(
    services: Services, context: ConversationContext, start: ResponseStart, outcome: Outcome
) -> ItemReader | None:
    """Return a reader that remembers the items of an answer; ``None`` if no later request can refer to them.

    The proxy remembers items only if the policy keeps an archive.
    """
    archive = context.caller.policy.archive
    if archive is None or outcome.verdict == "off" or start.answer.status != 200 or not context.body.may_refer:
        return None
    keep = partial(services.items.keep, context.caller.tenant, seconds=archive.days * DAY)
    place = context.body.place()
    reader = context.dialect.item_reader(lambda id, item: keep(_key(id, place), item))
    if reader is None or not is_encoded(start.answer):
        return reader
    return _Packed(reader, header(start.answer, "content-encoding"))


class Tap:
    """Receives the bytes of an answer before the client does."""

    def __init__(self, reader: ItemReader | None, room: Callable[[], Awaitable[None]] | None = None) -> None:
        """``room`` waits while too many removed messages wait to be archived."""
        self._reader = reader
        self._room = room

    async def begin(self, first: bytes) -> None:
        """Add the first bytes. If the archive is behind, let the client wait for it, so that little can be lost."""
        if self._room is not None:
            await self._room()
        self.add(first)

    def add(self, chunk: bytes) -> None:
        """Add a chunk."""
        if self._reader is not None:
            self._reader.add(chunk)

    async def finish(self) -> None:
        """Read the items that weren't known before the end."""
        if isinstance(self._reader, _Packed):
            await self._reader.unpack()
        elif self._reader is not None:
            self._reader.finish()


class _Packed(ItemReader):
    """Collects a compressed answer, and reads its items at the end."""

    def __init__(self, reader: ItemReader, encoding: str) -> None:
        self._reader = reader
        self._encoding = encoding
        self._body: bytearray | None = bytearray()

    def add(self, chunk: bytes) -> None:
        if self._body is not None:
            self._body += chunk
            if len(self._body) > LARGEST:
                self._body = None

    def finish(self) -> None:
        """Do nothing: ``unpack`` reads the answer."""

    async def unpack(self) -> None:
        if self._body is None:
            return
        body = bytes(self._body)
        try:
            if len(body) <= INLINE_BYTES:
                plain = unpack(body, self._encoding, LARGEST)
            else:
                plain = await asyncio.to_thread(unpack, body, self._encoding, LARGEST)
        except RequestError:  # the client's parser judges it
            return
        self._reader.add(plain)
        self._reader.finish()
