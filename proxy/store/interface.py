"""What a store does. A store that fails never fails a request: callers go on without it."""

from __future__ import annotations

from collections.abc import Mapping
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

    async def add(self, tenant: str, kind: str, key: str, value: bytes, seconds: float) -> bytes:
        """Keep an entry unless there is one. Return the entry that is there afterwards. Raises ``StoreFailed``.

        Of several processes that add at the same time one succeeds, and all get its value.
        """
        ...

    async def discard(self, tenant: str, kind: str, key: str) -> None:
        """Remove an entry if there is one. Raises ``StoreFailed``."""
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
    """A store that can say what it holds, for a person who looks, and that can be kept in order."""

    async def entries(self, kind: str) -> list[Entry]:
        """All entries of a kind that have not expired, by tenant and key. Raises ``StoreFailed``."""
        ...

    async def forget(self, tenant: str) -> Mapping[str, int]:
        """Remove every entry of a tenant, so that none of its bytes stay; says how many there were of which kind.

        Others on the same store find the tenant among those who were ``forgotten``. Raises ``StoreFailed``: then some
        may be gone, and it can be called again.
        """
        ...

    async def remove(self, tenant: str) -> Mapping[str, int]:
        """The same, without telling anybody."""
        ...

    async def forgotten(self) -> Mapping[str, float]:
        """The tenants that were forgotten in the last day, by their SHA-256 in hex, and when, in seconds since 1970.

        Raises ``StoreFailed``.
        """
        ...

    async def unknown(self) -> int:
        """How many entries it can't read, as they were encrypted with other keys, or not where it encrypts.

        Raises ``StoreFailed``.
        """
        ...

    async def upkeep(self) -> None:
        """Remove what has expired and what is too much, and begin anew what is damaged. Raises ``StoreFailed``."""
        ...
