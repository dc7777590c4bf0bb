"""Store the facts about the messages of large conversations, so that a restarted process or another replica reads them.

A conversation has one entry per counter. It has the facts that ``FactsCache`` keeps in memory, and no text. The keys of
messages are digests with a secret seed of the entry, so clients can't construct collisions.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Annotated

import msgspec
import structlog
import xxhash
from cachetools import LRUCache

from proxy import __version__
from proxy.compaction.turn import NO_LINKS, Call, Facts, Forms, Kind, Links
from proxy.constants import DAY, UNDECODABLE
from proxy.dialects.counting import Counter
from proxy.store import Store, StoreFailed
from proxy.store.interface import UNSTORED_TENANT
from proxy.store.replicated_map import FIRST_READ_SECONDS
from proxy.store.tenant_cache import Codec, Place, TenantCache

log = structlog.get_logger(__name__)

KIND = "facts"

FORMAT = "6"
"""A part of every key. Increase it when facts change, or when messages are read or counted in another way."""

SECONDS = DAY
"""Seconds that an entry is stored after the last write."""

LEAST_BYTES = 65_536
"""Bytes of messages that are worth a read or a write. Counting them takes about 3 ms."""

PARTS = 16
"""An entry is written when this part of a conversation is new."""

LARGEST = 4_000_000
"""Bytes. Larger entries aren't stored."""

MOST = 10_000
"""Conversations whose uncounted bytes one process remembers."""

PENDING_BYTES = 16_000_000
"""Maximum bytes of entries that wait to be written."""

_Size = Annotated[int, msgspec.Meta(ge=0)]
_Digest = Annotated[bytes, msgspec.Meta(max_length=64)]


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    """The facts about a message.

    ``several`` is the number of tokens that the message has as the result of one of several calls, if it was counted.
    """

    key: _Digest
    kind: Kind
    role: str
    tokens: _Size
    digest: _Digest
    calls: tuple[tuple[str, str], ...]
    answers: str | None
    length: _Size
    said: _Digest
    apart: _Size
    media: bool
    estimated: bool
    foreign: bool
    empty: bool
    plan: bool
    wide: bool
    several: _Size | None
    links: tuple[tuple[str, ...], tuple[str, ...], bool]
    effects: tuple[tuple[str, ...], ...]
    opening: str


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    seed: Annotated[int, msgspec.Meta(ge=0)]
    facts: list[_Stored]


class StoredFacts(TenantCache[bytes]):
    """Read and write the entries. A request waits for a read only, for at most ``FIRST_READ_SECONDS``.

    Memory has the bytes of each conversation that were counted since its entry was last written.
    """

    def __init__(self, store: Store) -> None:
        self._uncovered: LRUCache[Place, int] = LRUCache(MOST)
        super().__init__(store, KIND, Codec(list, bytes), self._uncovered, PENDING_BYTES)

    def place(self, raws: Sequence[bytes], counter: Counter, tenant: str, size: int | None = None) -> Place | None:
        """Return the place of a conversation's facts; ``None`` for a small one, or if the tenant has no store.

        ``size`` is the bytes of its messages, if they are known.
        """
        if tenant == UNSTORED_TENANT or (sum(map(len, raws)) if size is None else size) < LEAST_BYTES:
            return None
        # All turns of a conversation begin with the same messages. Agents with one task differ in their first answer.
        kind = repr((FORMAT, __version__, counter.key)).encode()
        return tenant, xxhash.xxh3_128_hexdigest(b"\0".join((kind, *map(bytes, raws[:3]))))

    async def read(self, *place: str) -> bytes | None:
        """Return a conversation's entry, or ``None`` if there is none in time."""
        try:
            async with asyncio.timeout(FIRST_READ_SECONDS):
                return await super().read(*place)
        except (TimeoutError, StoreFailed):  # the guarded store logs a failure
            return None

    def due(self, place: Place, learned: int, size: int, coming: int = 0) -> bool:
        """Add bytes of messages that were just counted. Return whether the entry is worth a write.

        ``size`` is the bytes of all messages. An entry has them all, so long conversations are written less often.
        ``coming`` is the bytes of messages that are to be counted next.
        """
        uncovered = self._uncovered[place] = self._uncovered.get(place, 0) + learned
        return uncovered + coming >= max(LEAST_BYTES, size // PARTS)

    def write(self, place: Place, entry: bytes) -> None:
        """Write an entry in the background. Call this in the event loop."""
        if len(entry) <= LARGEST and self.save(place, entry, SECONDS):
            self._uncovered[place] = 0

    def _size(self, value: bytes) -> int:
        return len(value)


def encoded(raws: Sequence[bytes], facts: Iterable[Facts]) -> bytes:
    """Return the entry of a conversation."""
    seed = secrets.randbits(63)
    keys = map(xxhash.xxh3_128_digest, raws, repeat(seed))
    return msgspec.msgpack.encode(_Entry(seed, list(map(_stored, keys, facts))))


def decoded(entry: bytes, raws: Sequence[bytes]) -> list[Facts | None]:
    """Return the facts about messages from an entry; ``None`` for those that it doesn't have."""
    try:
        known = msgspec.msgpack.decode(entry, type=_Entry)
    except UNDECODABLE as error:
        log.warning("shared.unreadable", kind=KIND, error=type(error).__name__)
        return [None] * len(raws)
    by_key = {stored.key: stored for stored in known.facts}
    found = map(by_key.get, map(xxhash.xxh3_128_digest, raws, repeat(known.seed)))
    return [None if stored is None else _facts(stored) for stored in found]


def _stored(key: bytes, facts: Facts) -> _Stored:
    several = facts.one_of_several
    return _Stored(
        key,
        facts.kind,
        facts.role,
        facts.tokens,
        facts.digest,
        tuple((call.id, call.name) for call in facts.calls),
        facts.answers,
        facts.length,
        facts.said,
        facts.apart,
        facts.media,
        facts.estimated,
        facts.foreign,
        facts.empty,
        facts.plan,
        facts.wide,
        None if several is None else several.tokens,
        (facts.links.names, facts.links.refers, facts.links.unseen),
        facts.effects,
        facts.opening,
    )


def _facts(stored: _Stored) -> Facts:
    facts = Facts(
        stored.kind,
        stored.role,
        stored.tokens,
        stored.digest,
        tuple(Call(*call) for call in stored.calls),
        stored.answers,
        stored.length,
        stored.said,
        apart=stored.apart,
        media=stored.media,
        estimated=stored.estimated,
        foreign=stored.foreign,
        empty=stored.empty,
        plan=stored.plan,
        wide=stored.wide,
        links=Links(*stored.links) if any(stored.links) else NO_LINKS,
        effects=stored.effects,
        opening=stored.opening,
    )
    if stored.several is not None:
        facts.one_of_several = replace(facts, parallel=True, tokens=stored.several, forms=Forms())
    return facts
