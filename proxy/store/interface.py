"""The store interface. Callers continue without a store that fails, so it never fails a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


class StoreFailed(Exception):
    """The store can't currently be read or written."""


class Store(Protocol):
    """Entries by tenant, kind, and key. Values are bytes; ``seconds`` is the lifetime of an entry."""

    async def get(self, tenant: str, kind: str, key: str) -> bytes | None:
        """Return the entry, or ``None`` if there is none or it has expired. Raises ``StoreFailed``."""
        ...

    async def put(self, tenant: str, kind: str, key: str, value: bytes, seconds: float) -> None:
        """Store an entry and replace an older one. Raises ``StoreFailed``."""
        ...

    async def add(self, tenant: str, kind: str, key: str, value: bytes, seconds: float) -> bytes:
        """Store an entry unless one exists. Return the value now in the store. Raises ``StoreFailed``.

        If several processes add an entry at the same time, one succeeds and all get its value.
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
    """A stored entry."""

    tenant: str
    key: str
    value: bytes


class ListingStore(Store, Protocol):
    """A store that can list its entries for the CLI, and that supports maintenance."""

    async def entries(self, kind: str) -> list[Entry]:
        """Return all unexpired entries of a kind, sorted by tenant and key. Raises ``StoreFailed``."""
        ...

    async def forget(self, tenant: str) -> Mapping[str, int]:
        """Remove every entry of a tenant and all of its bytes. Return the number of removed entries by kind.

        Other processes on the same store find the tenant in ``forgotten``. Raises ``StoreFailed`` after a partial
        removal; calling it again is safe.
        """
        ...

    async def remove(self, tenant: str) -> Mapping[str, int]:
        """Remove every entry of a tenant like ``forget``, but don't add the tenant to ``forgotten``."""
        ...

    async def forgotten(self) -> Mapping[str, float]:
        """Return the tenants forgotten in the last day: their SHA-256 in hex, and the time in seconds since 1970.

        Raises ``StoreFailed``.
        """
        ...

    async def unknown(self) -> int:
        """Count the entries that the store can't read: encrypted with other keys, or unencrypted in an encrypted store.

        Raises ``StoreFailed``.
        """
        ...

    async def upkeep(self) -> None:
        """Remove expired and excess entries, and replace a damaged file. Raises ``StoreFailed``."""
        ...
