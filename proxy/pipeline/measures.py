"""Measure requests with the table of models and the tokenizers from LiteLLM's package.

Without them the proxy doesn't start. If they disappear while it runs, requests pass through uncompacted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable

import structlog

from proxy.config import Settings
from proxy.dialects.apis import Dialect
from proxy.dialects.counting import Counter
from proxy.errors import ConfigurationError
from proxy.limits.profiles import Profile, Profiles
from proxy.limits.tables import CORRECTIONS
from proxy.tokens import encoding
from proxy.tokens.text import check

log = structlog.get_logger(__name__)

TABLE = "table"  # The name of the table of models among the unavailable files. The others are named by their tokenizer.
RETRY_SECONDS = 10.0  # Time between two attempts to read a table that is unreadable. An attempt can take 50 ms.


class Measures:
    """Profiles of models, and counters for them. Remembers which files are missing or damaged."""

    def __init__(self, profiles: Profiles) -> None:
        self.profiles = profiles
        self.unavailable: dict[str, str] = {}
        self._counters: dict[Hashable, Counter] = {}
        self._error: ConfigurationError | None = None
        self._again = 0.0

    async def load(self) -> None:
        """Read the table of models in a thread, unless it is loaded. Raises ``ConfigurationError``."""
        if self.profiles.loaded:
            return
        if self._error is not None and time.monotonic() < self._again:
            raise ConfigurationError(self._error.message)
        try:
            await asyncio.to_thread(self.profiles.load)
        except ConfigurationError as error:
            self._error, self._again = error, time.monotonic() + RETRY_SECONDS
            self.fail(TABLE, error)
            raise
        self._error = None
        self._repaired(TABLE)

    def counter(self, profile: Profile, dialect: Dialect) -> Counter:
        """Return the counter for a profile; profiles that count alike share one. Raises ``ConfigurationError``."""
        key = dialect.name, dialect.counters.key_of(profile)
        counter = self._counters.get(key)
        if counter is None:
            counter = self._counters[key] = dialect.counters(profile)
        return counter

    async def usable(self, profile: Profile, dialect: Dialect) -> Counter | None:
        """Return the counter for a profile, or ``None`` if its tokenizer can't be used."""
        try:
            counter = self.counter(profile, dialect)
            if profile.tokenizer in self.unavailable:
                await asyncio.to_thread(encoding, profile.tokenizer)
                self._repaired(profile.tokenizer)
        except ConfigurationError as error:
            self.fail(profile.tokenizer, error)
            return None
        return counter

    def fail(self, name: str, error: ConfigurationError) -> None:
        """Remember that the table or a tokenizer can't be used. Log each error once."""
        if self.unavailable.get(name) != error.message:
            self.unavailable[name] = error.message
            log.error("counting.unavailable", reason=error.message, effect="requests pass through uncompacted")

    def _repaired(self, name: str) -> None:
        if self.unavailable.pop(name, None) is not None:
            log.info("counting.available", of=name)


def require(settings: Settings, profiles: Profiles) -> None:
    """Load the table of models and find the tokenizers that requests may need.

    Raises ``ConfigurationError`` if anything is missing. Tokenizers aren't loaded: that takes up to 0.4 s each.
    """
    profiles.load()
    stated = [route.profile.tokenizer for route in settings.models if route.profile is not None]
    for name in sorted({*(family.tokenizer for family in CORRECTIONS.families), *filter(None, stated)}):
        check(name)
