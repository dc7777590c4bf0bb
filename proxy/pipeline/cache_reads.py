"""Remember which conversations a provider's prompt cache served lately."""

from __future__ import annotations

import time
from collections.abc import Callable

from cachetools import TTLCache

from proxy.store.forgetting import drop
from proxy.telemetry.record import Usage

CACHE_SECONDS = 300.0
"""Lifetime of an entry in a provider's prompt cache after its last use, at most providers."""

CONVERSATIONS = 20_000
"""Conversations to remember, those with the latest responses."""

Conversation = tuple[str, str]
"""A tenant, and the key of one of its conversations."""


class CacheReads:
    """The conversations whose last response reported tokens from the cache."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` returns seconds."""
        self._served: TTLCache[Conversation, bool] = TTLCache(CONVERSATIONS, CACHE_SECONDS, clock)

    def note(self, conversation: Conversation, usage: Usage) -> None:
        """Record a response's usage."""
        if usage.cache_read:
            self._served[conversation] = True
        else:
            self._served.pop(conversation, None)

    def served(self, conversation: Conversation) -> bool:
        """Return whether the cache served the last request, and probably still has its prompt."""
        return conversation in self._served

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        """Drop the conversations of forgotten tenants, and return those tenants."""
        return drop(self._served, forgotten)
