"""The prompts that were sent last, to find reasoning that is bound to another prompt than the next one.

A plan says which reasoning became invalid at its last change. Some changes don't follow from the conversation alone:
the fit ladder shortens older messages of one request, a smaller limit was just learned, or a plan saved too little to
be applied until now. They show only in a comparison with the prompt before.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash
from cachetools import LRUCache

from proxy.pipeline.context import ConversationContext
from proxy.pipeline.outcome import Outcome
from proxy.pipeline.response_start import ResponseStart, readable

MOST = 10_000
"""Conversations that are remembered."""

_BOUND_ELSEWHERE = (b"bound to a different conversation", b"Invalid `signature`")
"""Anthropic's wordings for a thinking block whose prefix changed; platform.claude.com, "Preserved thinking"."""


class SentPrompts:
    """What one process last sent for each conversation.

    A prompt is given by the digests of its messages, without reasoning; ``None`` stands for the client's own messages.
    """

    def __init__(self) -> None:
        self._sent: LRUCache[int, tuple[int, bytes | None]] = LRUCache(MOST)
        self._stale: LRUCache[int, int] = LRUCache(MOST)

    def stale(self, conversation: int) -> int:
        """Return the number of the client's first messages whose reasoning is known to be invalid."""
        return self._stale.get(conversation, 0) if self._stale else 0

    def expire(self, conversation: int, messages: int) -> None:
        """Record that the reasoning in the client's messages, of which there are this many, is invalid."""
        self._stale[conversation] = messages

    def continues(self, conversation: int, prompt: Sequence[bytes]) -> bool:
        """Return whether a prompt begins with the one before. True if no earlier one is known."""
        known = self._sent.get(conversation)
        if known is None:
            return True
        length, digest = known
        return digest is not None and length <= len(prompt) and _digest(prompt[:length]) == digest

    def sent(self, conversation: int, prompt: Sequence[bytes] | None) -> None:
        """Record a prompt that was answered."""
        self._sent[conversation] = (0, None) if prompt is None else (len(prompt), _digest(prompt))


async def refuses_reasoning(context: ConversationContext, outcome: Outcome, start: ResponseStart) -> bool:
    """Return whether the upstream refused signed reasoning in a prompt that the proxy changed. True once a request."""
    if start.answer.status != 400 or outcome.messages is None or context.stripped:
        return False
    if context.counter is None or context.counter.format.binds_reasoning == "never":
        return False
    shown = await readable(start.answer, start.first)
    context.stripped = any(wording in shown for wording in _BOUND_ELSEWHERE)
    return context.stripped


def _digest(prompt: Sequence[bytes]) -> bytes:
    return xxhash.xxh3_128_digest(b"".join(prompt))
