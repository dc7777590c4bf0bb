"""Remember the rounds that a client doesn't see, to put them back when it sends the conversation again.

Without them, the model would read the same messages again, and the provider's prompt cache would end at the first of
these rounds. A request without its hidden rounds is still valid.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from cachetools import LRUCache

from proxy.dialects.rounds import HiddenRound
from proxy.store import Store, StoreFailed
from proxy.store.tenant_cache import Codec, Place, TenantCache

KIND = "recall"

CONVERSATIONS = 2_000  # conversations with hidden rounds that each process remembers
MOST = 200  # hidden rounds of a conversation that are kept, the newest ones
PENDING_BYTES = 16_000_000  # maximum bytes of hidden rounds that wait to be written
Conversation = tuple[str, str]  # a tenant, and the key of one of its conversations


class _Answered(NamedTuple):
    """The messages of the last request that this process answered, and the hidden rounds so far."""

    messages: int
    rounds: list[HiddenRound]


class HiddenRounds(TenantCache[list[HiddenRound]]):
    """The hidden rounds of conversations. The processes on one store share them."""

    def __init__(self, store: Store) -> None:
        self._answered: LRUCache[Place, _Answered] = LRUCache(CONVERSATIONS)
        codec = Codec(_encoded, msgspec.msgpack.Decoder(list[HiddenRound]).decode)
        super().__init__(store, KIND, codec, self._answered, PENDING_BYTES)

    def get(self, *place: str) -> list[HiddenRound] | None:
        answered = self._answered.get(place)
        return self.writes.get(place) if answered is None else answered.rounds

    async def of(self, conversation: Conversation, assistants: Sequence[int]) -> list[HiddenRound]:
        """Return the hidden rounds of a conversation. ``assistants`` are the places of its assistant messages.

        Only if another process may have answered since this one did, the store is read.
        """
        answered = self._answered.get(conversation)
        # One new assistant message is the answer that this process gave. Of more, another process gave some.
        if answered is not None and sum(place >= answered.messages for place in assistants) == 1:
            return answered.rounds
        with contextlib.suppress(StoreFailed):  # the guarded store logs it
            if (rounds := await self.read(*conversation)) is not None:
                return rounds
        return self.get(*conversation) or []

    def answered(self, conversation: Conversation, messages: int, rounds: list[HiddenRound]) -> None:
        """Remember that a request of this many messages was answered, and its hidden rounds so far."""
        self._answered[conversation] = _Answered(messages, rounds)

    async def keep(self, conversation: Conversation, messages: int, rounds: list[HiddenRound], seconds: float) -> None:
        """Store the hidden rounds of a conversation. While the store fails, only this process knows them."""
        kept = rounds[-MOST:]
        self.answered(conversation, messages, kept)
        # The client's next request may reach another process, so the rounds must be stored before the response ends.
        if self.save(conversation, kept, seconds):
            await self.writes.written(conversation)

    def _size(self, value: list[HiddenRound]) -> int:
        return sum(map(_size_of, value))


def _encoded(several: Sequence[list[HiddenRound]]) -> list[bytes]:
    return list(map(msgspec.msgpack.encode, several))


def _size_of(hidden: HiddenRound) -> int:
    parts = (*hidden.before, *(call for _, call in hidden.hidden_calls), *hidden.results, hidden.own or b"")
    return len(hidden.text) + sum(map(len, parts))


def prefixes(digests: Sequence[bytes]) -> list[str]:
    """Return a digest of the messages before each message, and one of all messages."""
    chain = hashlib.sha256()
    found = [chain.hexdigest()]
    for digest in digests:
        chain.update(digest)
        found.append(chain.hexdigest())
    return found
