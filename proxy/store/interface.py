"""What a store does. A store that fails never fails a request: callers go on without it."""

from __future__ import annotations

from typing import Protocol


class StoreFailed(Exception):
    """The store cannot be read or written now."""


class Store(Protocol):
    """Entries by tenant, kind and key. Values are bytes; ``seconds`` is how long an entry lives."""

    async def get(self, tenant: str, kind: str, key: str) -> bytes | None:
        """The entry, or ``None`` where there is none or it has expired. Raises ``StoreFailed``."""
        ...

    async def put(self, tenant: str, kind: str, key: str, value: bytes, seconds: float) -> None:
        """Keep an entry, in place of an older one. Raises ``StoreFailed``."""
        ...

    async def aclose(self) -> None:
        """Close the store."""
        ...
