"""The prompts that were sent last, to find reasoning that is bound to another prompt than the next one.

A plan says which reasoning became invalid at its last change. Some changes don't follow from the conversation alone:
the fit ladder shortens older messages of one request, a smaller limit was just learned, or a plan saved too little to
be applied until now. They show only in a comparison with the prompt before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import xxhash
from cachetools import LRUCache

from proxy.constants import DAY
from proxy.pipeline.job import PromptDigests
from proxy.store import Store, StoreFailed
from proxy.store.interface import UNSTORED_TENANT
from proxy.store.tenant_cache import Codec, Place, TenantCache

KIND = "prompt"

MOST = 10_000  # conversations that one process remembers
SECONDS = DAY  # Seconds that a prompt is stored. Clients rarely continue a conversation later.
PENDING_BYTES = 16_000_000  # maximum bytes of prompts that wait to be written
SIZE = 500  # approximate bytes of a prompt in memory
Conversation = tuple[str, str]  # a tenant, and the key of one of its conversations


class SentPrompt(msgspec.Struct, frozen=True):
    """A prompt that was answered."""

    messages: int  # the number of the client's
    length: int = 0  # of the messages sent, if they were measured
    digest: str | None = None  # of the messages sent
    changed: bool = False  # the messages sent weren't the client's own
    stale: int = 0  # the client's first messages whose reasoning is invalid
    marked: int = 0
    mark: str = ""  # that after the first `marked` messages: two conversations can share a key. See `Exchange.mark`.


CODEC = Codec(lambda prompts: list(map(msgspec.json.encode, prompts)), msgspec.json.Decoder(SentPrompt).decode)


class SentPrompts(TenantCache[SentPrompt]):
    """Remember the last prompt of each conversation. The processes on one store share it."""

    def __init__(self, store: Store) -> None:
        self._prompts: LRUCache[Place, SentPrompt] = LRUCache(MOST)
        super().__init__(store, KIND, CODEC, self._prompts, PENDING_BYTES)

    def stale(self, conversation: Conversation) -> int:
        """Return the number of the client's first messages whose reasoning is known to be invalid."""
        last = self._prompts.get(conversation)
        return 0 if last is None else last.stale

    def verify(self, conversation: Conversation, mark: Callable[[int], str]) -> None:
        """Forget the prompt before if it's of another conversation with the same key. ``mark`` is ``Exchange.mark``."""
        last = self._prompts.get(conversation)
        if last is not None and mark(last.marked) != last.mark:
            del self._prompts[conversation]

    def expire(self, conversation: Conversation, messages: int, mark: str) -> None:
        """Record that the reasoning in the client's messages, of which there are this many, is invalid."""
        last = self._prompts.get(conversation)
        # An unknown prompt gets no messages, so that it never counts as the one before.
        self._prompts[conversation] = msgspec.structs.replace(
            last or SentPrompt(-1), stale=messages, marked=messages, mark=mark
        )

    def changed(self, conversation: Conversation) -> bool:
        """Return whether the proxy changed the prompt that it last sent."""
        last = self._prompts.get(conversation)
        return last is not None and last.changed

    async def find(self, conversation: Conversation, prompt: PromptDigests | None = None) -> None:
        """Read what another process sent, unless this one sent the prompt before."""
        last = self._prompts.get(conversation)
        if conversation[0] == UNSTORED_TENANT or (last is not None and prompt is not None and _follows(last, prompt)):
            return
        try:
            stored = await self.read(*conversation)
        except StoreFailed:  # the guarded store logs it
            return
        if stored is not None and (last is None or stored.messages > last.messages):
            self._prompts[conversation] = stored

    def continues(self, conversation: Conversation, prompt: PromptDigests) -> bool:
        """Return whether a prompt begins with the one before. True if the one before isn't known."""
        last = self._prompts.get(conversation)
        if last is None or not _follows(last, prompt):
            return True
        first = prompt.digests[: last.length]
        return last.digest is not None and len(first) == last.length and _digest(first) == last.digest

    def sent(
        self, conversation: Conversation, messages: int, mark: str, prompt: PromptDigests | None, *, changed: bool
    ) -> None:
        """Record a prompt that was answered. ``messages`` is the number of the client's messages, ``mark`` their mark.

        ``prompt`` is ``None`` for a short conversation that wasn't measured. Call this in the event loop.
        """
        before = self._prompts.get(conversation) or SentPrompt(-1)
        digests = () if prompt is None else prompt.digests
        digest = _digest(digests) if digests else None
        sent = SentPrompt(messages, len(digests), digest, changed, before.stale, messages, mark)
        self._prompts[conversation] = sent
        if conversation[0] != UNSTORED_TENANT and (changed or before.changed):
            self.save(conversation, sent, SECONDS)

    def _size(self, value: SentPrompt) -> int:
        return SIZE


def _follows(last: SentPrompt, prompt: PromptDigests) -> bool:
    """Return whether a request has exactly one answer more than a prompt that was sent."""
    return last.messages >= 0 and sum(place >= last.messages for place in prompt.answers) == 1


def _digest(prompt: Sequence[bytes]) -> str:
    return xxhash.xxh3_128_hexdigest(b"".join(prompt))
