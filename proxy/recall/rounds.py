"""Remember the rounds that a client doesn't see, to put them back when it sends the conversation again.

Without them, the model would read the same messages again, and the provider's prompt cache would end at the first of
these rounds. A request without its hidden rounds is still valid.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import msgspec
import structlog
from cachetools import LRUCache

from proxy.dialects.rounds import HiddenRound
from proxy.store import Store, StoreFailed

log = structlog.get_logger(__name__)

KIND = "recall"

CONVERSATIONS = 2_000
"""Conversations with hidden rounds that each process remembers."""

MOST = 200
"""Hidden rounds of a conversation that are kept, the newest ones."""

Conversation = tuple[str, str]
"""A tenant, and the key of one of its conversations."""


class _Known:
    __slots__ = ("messages", "rounds")

    def __init__(self, messages: int, rounds: list[HiddenRound]) -> None:
        self.messages = messages
        self.rounds = rounds


class HiddenRounds:
    """The hidden rounds of conversations. The processes on one store share them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: LRUCache[Conversation, _Known] = LRUCache(CONVERSATIONS)

    async def of(self, conversation: Conversation, assistants: Sequence[int]) -> list[HiddenRound]:
        """Return the hidden rounds of a conversation. ``assistants`` are the places of its assistant messages.

        Only if another process may have answered since this one did, the store is read.
        """
        known = self._known.get(conversation)
        if known is not None and sum(place >= known.messages for place in assistants) == 1:
            return known.rounds
        try:
            raw = await self._store.get(conversation[0], KIND, conversation[1])
        except StoreFailed:  # the guarded store logs it
            return [] if known is None else known.rounds
        if raw is None:
            return [] if known is None else known.rounds
        try:
            return msgspec.msgpack.decode(raw, type=list[HiddenRound])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            log.warning("shared.unreadable", kind=KIND, error=type(error).__name__)
            return []

    def answered(self, conversation: Conversation, messages: int, rounds: list[HiddenRound]) -> None:
        """Remember that a request of this many messages was answered, and its hidden rounds so far."""
        self._known[conversation] = _Known(messages, rounds)

    async def keep(self, conversation: Conversation, messages: int, rounds: list[HiddenRound], seconds: float) -> None:
        """Store the hidden rounds of a conversation. If that fails, only this process knows them."""
        kept = rounds[-MOST:]
        self.answered(conversation, messages, kept)
        try:
            await self._store.put(conversation[0], KIND, conversation[1], msgspec.msgpack.encode(kept), seconds)
        except StoreFailed as error:
            log.warning("shared.not_written", kind=KIND, error=str(error))

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        """Drop the rounds of forgotten tenants, and return those tenants."""
        tenants = {tenant for tenant, _ in self._known if forgotten(tenant)}
        for key in [key for key in self._known if key[0] in tenants]:
            del self._known[key]
        return tenants


def prefixes(digests: Sequence[bytes]) -> list[str]:
    """Return a digest of the messages before each message, and one of all messages."""
    chain = hashlib.sha256()
    found = [chain.hexdigest()]
    for digest in digests:
        chain.update(digest)
        found.append(chain.hexdigest())
    return found
