"""What a store does. A store that fails never fails a request: callers go on without it."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry as it is stored."""

    tenant: str
    key: str
    value: bytes


class ListingStore(Store, Protocol):
    """A store that can say what it holds, for a person who looks."""

    async def entries(self, kind: str) -> list[Entry]:
        """All entries of a kind that have not expired, by tenant and key. Raises ``StoreFailed``."""
        ...
