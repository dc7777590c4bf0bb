"""Tag records with the conversation and the end user, by keyed digests.

The turns of a conversation share their first messages, so a digest of these names it. The key is random, and all
processes on a store share it. Without it, nobody can test a guess of a name or of a message against a tag.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec
import structlog

from proxy.constants import DAY
from proxy.store import Store, StoreFailed
from proxy.store.replicated_map import FIRST_READ_SECONDS

if TYPE_CHECKING:  # the runtime has the tags, and an exchange refers to it
    from proxy.pipeline.exchange import Exchange

log = structlog.get_logger(__name__)

KIND = "record-tags"

KEY_SECONDS = 400.0 * DAY
"""Lifetime of the key. Records live for days, so a new key divides few conversations."""

STARTING_SECONDS = 2.0
"""Seconds that a start waits for the key at most."""

RETRY_SECONDS = 60.0
"""Seconds between two attempts to read the key."""

OPENING = 8
"""Units before the model's first one that name a conversation. Further ones don't count."""

LARGE = 65_536
"""Bytes of a unit whose bytes count instead of its text, because decoding takes longer."""

BEGINNING = 2_000
"""Characters of a text that count, in addition to its length. Digests of long system messages would take longest."""

TAG = re.compile(r"[0-9a-f]{16}")


class Tags:
    """Makes the tags of one store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._key: bytes | None = None
        self._reading: asyncio.Task[None] | None = None
        self._began = 0.0

    async def prepare(self) -> None:
        """Read the key before the first request."""
        await self._soon(STARTING_SECONDS)

    async def describe(self, exchange: Exchange) -> None:
        """Add the tags to a request's record. Without a key or a stored identity, it gets none."""
        tenant, record, (user, session) = exchange.caller.tenant, exchange.record, exchange.body.sender
        if not exchange.configuration.settings.record_count or not exchange.caller.has_storage:
            return
        key = self._key or await self._soon()
        if key is None:
            return
        record.user = _tag(key, "user", user) if user else None
        opening = _opening(exchange)
        if opening:
            record.conversation = _tag(key, "conversation", tenant, user, session, *opening)

    async def of_user(self, name: str) -> str | None:
        """Return the tag of an end user's name, or a tag as it is. ``None`` if there is no key yet."""
        if TAG.fullmatch(name):
            return name
        key = self._key or await self._store.get("", KIND, "key")
        return None if key is None else _tag(key, "user", name)

    async def _soon(self, seconds: float = FIRST_READ_SECONDS) -> bytes | None:
        """Return the key. Requests wait for it only briefly, so that a failing store delays none."""
        now = time.monotonic()
        if self._reading is None or (self._reading.done() and now > self._began + RETRY_SECONDS):
            self._began, self._reading = now, asyncio.create_task(self._read())
        if not self._reading.done() and (left := self._began + seconds - now) > 0:
            await asyncio.wait([self._reading], timeout=left)
        return self._key

    async def _read(self) -> None:
        try:
            self._key = await self._store.add("", KIND, "key", secrets.token_bytes(32), KEY_SECONDS)
        except StoreFailed as failure:
            log.warning("records.no_tags", reason=str(failure))


def _opening(exchange: Exchange) -> list[str]:
    """Return the texts before the model's first unit. They stay the same when clients move cache breakpoints."""
    texts: list[str] = []
    if exchange.counter is None or exchange.body.continues:
        return texts
    for raw in exchange.body.units[:OPENING]:
        text = exchange.counter.format.clients_text(raw) if len(raw) <= LARGE else bytes(raw).hex()
        if text is None:
            break
        texts.append(text)
    return texts


def _tag(key: bytes, *parts: str) -> str:
    short = [part if len(part) <= BEGINNING else f"{len(part)} {part[:BEGINNING]}" for part in parts]
    try:
        data = msgspec.msgpack.encode(short)
    except UnicodeEncodeError:  # half of a surrogate pair
        data = ascii(short).encode()
    # A stored key that somebody damaged may be longer.
    return blake2b(data, key=key[: blake2b.MAX_KEY_SIZE], digest_size=8).hexdigest()
