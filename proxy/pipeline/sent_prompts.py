"""The prompts that were sent last, to find reasoning that is bound to another prompt than the next one.

A plan says which reasoning became invalid at its last change. Some changes don't follow from the conversation alone:
the fit ladder shortens older messages of one request, a smaller limit was just learned, or a plan saved too little to
be applied until now. They show only in a comparison with the prompt before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import structlog
import xxhash
from cachetools import LRUCache

from proxy.pipeline.job import Prompt
from proxy.store import Store, StoreFailed
from proxy.store.background import WriteBehind
from proxy.store.replicated_map import UNREADABLE
from proxy.store.tenants import UNSTORED_TENANT

log = structlog.get_logger(__name__)

KIND = "prompt"

MOST = 10_000
"""Conversations that one process remembers."""

SECONDS = 86_400.0
"""Seconds that a prompt is stored. Clients rarely continue a conversation later."""

PENDING_BYTES = 16_000_000
"""Maximum bytes of prompts that wait to be written."""

SIZE = 500
"""Approximate bytes of a prompt in memory."""

Conversation = tuple[str, str]
"""A tenant, and the key of one of its conversations."""


class SentPrompt(msgspec.Struct, frozen=True):
    """A prompt that was answered.

    ``messages`` is the number of the client's messages. ``length`` and ``digest`` are those of the messages sent, if
    they were measured. ``changed`` is true if they weren't the client's own. The reasoning in the client's first
    ``stale`` messages is invalid. ``mark`` is the conversation's after its first ``marked`` messages, because two
    conversations can have the same key. See ``Exchange.mark``.
    """

    messages: int
    length: int = 0
    digest: str | None = None
    changed: bool = False
    stale: int = 0
    marked: int = 0
    mark: str = ""


class SentPrompts:
    """Remember the last prompt of each conversation. The processes on one store share it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: LRUCache[Conversation, SentPrompt] = LRUCache(MOST)
        self._writes: WriteBehind[SentPrompt] = WriteBehind(store, KIND, _packed, PENDING_BYTES, failed=_report)

    def stale(self, conversation: Conversation) -> int:
        """Return the number of the client's first messages whose reasoning is known to be invalid."""
        known = self._known.get(conversation)
        return 0 if known is None else known.stale

    def verify(self, conversation: Conversation, mark: Callable[[int], str]) -> None:
        """Forget the prompt before if it's of another conversation with the same key.

        ``mark`` returns the mark of the conversation after this many of its messages.
        """
        known = self._known.get(conversation)
        if known is not None and mark(known.marked) != known.mark:
            del self._known[conversation]

    def expire(self, conversation: Conversation, messages: int, mark: str) -> None:
        """Record that the reasoning in the client's messages, of which there are this many, is invalid."""
        known = self._known.get(conversation)
        # An unknown prompt gets no messages, so that it never counts as the one before.
        self._known[conversation] = msgspec.structs.replace(
            known or SentPrompt(-1), stale=messages, marked=messages, mark=mark
        )

    def changed(self, conversation: Conversation) -> bool:
        """Return whether the proxy changed the prompt that it last sent."""
        known = self._known.get(conversation)
        return known is not None and known.changed

    async def recall(self, conversation: Conversation, prompt: Prompt | None = None) -> None:
        """Read what another process sent, unless this one sent the prompt before."""
        known = self._known.get(conversation)
        if conversation[0] == UNSTORED_TENANT or (known is not None and prompt is not None and _follows(known, prompt)):
            return
        try:
            raw = await self._store.get(conversation[0], KIND, conversation[1])
            stored = None if raw is None else msgspec.json.decode(raw, type=SentPrompt)
        except StoreFailed:  # the guarded store logs it
            return
        except UNREADABLE as error:  # written by another version, or damaged
            log.warning("shared.unreadable", kind=KIND, error=type(error).__name__)
            return
        if stored is not None and (known is None or stored.messages > known.messages):
            self._known[conversation] = stored

    def continues(self, conversation: Conversation, prompt: Prompt) -> bool:
        """Return whether a prompt begins with the one before. True if the one before isn't known.

        The provider's own summary counts as the messages that it replaces.
        """
        known = self._known.get(conversation)
        if known is None or not _follows(known, prompt):
            return True
        firsts = [form[: known.length] for form in prompt.forms]
        same = any(len(first) == known.length and _digest(first) == known.digest for first in firsts)
        return known.digest is not None and same

    def sent(
        self, conversation: Conversation, messages: int, mark: str, prompt: Prompt | None, *, changed: bool
    ) -> None:
        """Record a prompt that was answered. ``messages`` is the number of the client's messages, ``mark`` their mark.

        ``prompt`` is ``None`` for a short conversation that wasn't measured. Call this in the event loop.
        """
        before = self._known.get(conversation) or SentPrompt(-1)
        digests = () if prompt is None else prompt.digests
        digest = _digest(digests) if digests else None
        sent = SentPrompt(messages, len(digests), digest, changed, before.stale, messages, mark)
        self._known[conversation] = sent
        if conversation[0] != UNSTORED_TENANT and (changed or before.changed):
            self._writes.put(conversation, sent, SIZE, SECONDS)

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        """Drop the prompts of forgotten tenants, and return those tenants."""
        tenants = {tenant for tenant, _ in self._known if forgotten(tenant)}
        for key in [key for key in self._known if key[0] in tenants]:
            del self._known[key]
        return tenants | self._writes.forget(forgotten)

    async def settled(self) -> None:
        """Wait until the write in progress has ended."""
        await self._writes.settled()

    async def aclose(self) -> None:
        """Finish pending writes."""
        await self._writes.aclose()


def _report(entries: int, reason: str) -> None:
    log.warning("shared.not_written", kind=KIND, error=reason, entries=entries)


def _packed(prompts: Sequence[SentPrompt]) -> list[bytes]:
    return [msgspec.json.encode(prompt) for prompt in prompts]


def _follows(known: SentPrompt, prompt: Prompt) -> bool:
    """Return whether a request has exactly one answer more than a prompt that was sent."""
    return known.messages >= 0 and sum(place >= known.messages for place in prompt.answers) == 1


def _digest(prompt: Sequence[bytes]) -> str:
    return xxhash.xxh3_128_hexdigest(b"".join(prompt))
