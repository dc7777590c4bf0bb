"""The interfaces of stores. Callers continue without a store that fails, so it never fails a request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import NamedTuple

PER_PAGE = 20  # Entries that `pages` yields at once. Entries may have several megabytes.
SHARED_TENANT = "anonymous"  # the tenant of callers without a key, if all of them count as one caller
UNSTORED_TENANT = "nobody"  # The tenant of callers without a key otherwise. The proxy stores nothing that they send.


class StoreFailed(Exception):
    """The store can't currently be read or written. All methods except ``aclose`` raise it."""


class Refused(StoreFailed):
    """The store works, but can't hold one of the values, so another attempt would fail, too."""


Names = tuple[str, str, str]  # the tenant, kind, and key of an entry


class Entry(NamedTuple):
    """A stored entry. ``seconds`` is its remaining lifetime."""

    tenant: str
    kind: str
    key: str
    value: bytes
    seconds: float

    @property
    def names(self) -> Names:
        return self[:3]


class Store(ABC):
    """Entries by tenant, kind, and key. Values are bytes; ``seconds`` is the lifetime of an entry.

    A kind names the contents and their format. An incompatible format gets a kind of its own, such as ``summary.2``.
    """

    @abstractmethod
    async def get_many(self, tenant: str, kind: str, keys: Sequence[str]) -> dict[str, bytes]:
        """Return the entries with these keys. Keys without an unexpired entry are missing."""

    @abstractmethod
    async def put_many(self, entries: Sequence[Entry]) -> None:
        """Store entries with different names, and replace older ones. After a failure, some may be stored.

        Raises ``Refused`` if the store doesn't take one of them.
        """

    @abstractmethod
    async def add(self, tenant: str, kind: str, key: str, value: bytes, seconds: float) -> bytes:
        """Store an entry unless one exists. Return the value now in the store.

        If several processes add an entry at the same time, one succeeds and all get its value.
        """

    @abstractmethod
    async def replace(self, tenant: str, kind: str, key: str, old: bytes, new: bytes, seconds: float) -> bool:
        """Replace an entry if it has the value ``old``, or remove it if ``seconds`` is 0. Return whether it had.

        No other process changes the entry between the comparison and the write.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Close the store."""

    async def get(self, tenant: str, kind: str, key: str) -> bytes | None:
        """Return the entry, or ``None`` if there is none or it has expired."""
        return (await self.get_many(tenant, kind, [key])).get(key)

    async def put(self, tenant: str, kind: str, key: str, value: bytes, seconds: float) -> None:
        """Store an entry and replace an older one."""
        await self.put_many([Entry(tenant, kind, key, value, seconds)])


class ManagedStore(Store):
    """A store with the operations of commands and maintenance. No request waits for them.

    Each entry has the name of its codec, empty for none. SQLite and Redis have a parameter for it.
    """

    codecs: Collection[str] = ("",)
    """The codecs of the entries that this store reads."""
    skipped = 0
    """Damaged entries that ``pages`` didn't yield."""

    @abstractmethod
    async def entries(self, kind: str) -> list[Entry]:
        """Return all unexpired entries of a kind, sorted by tenant and key."""

    @abstractmethod
    def pages(self) -> AsyncIterator[list[Entry]]:
        """Yield all readable, unexpired entries in small batches. An entry that changes meanwhile may come twice."""

    @abstractmethod
    async def remove(self, tenant: str) -> Mapping[str, int]:
        """Remove some entries of a tenant. Return their number by kind, which is empty once none are left."""

    @abstractmethod
    async def erase(self) -> None:
        """Overwrite the values of removed entries. Raise ``StoreFailed`` while that isn't possible."""

    @abstractmethod
    async def rebuild(self) -> None:
        """Overwrite the names of removed entries, too. This may be slow."""

    @abstractmethod
    async def counts(self) -> Mapping[str, int]:
        """Return the number of entries by codec."""

    @abstractmethod
    async def maintain(self) -> None:
        """Remove expired and excess entries, and replace damaged storage."""

    async def unknown(self) -> int:
        """Count the entries that this store can't read, because they were written with other encryption settings."""
        return sum(count for codec, count in (await self.counts()).items() if codec not in self.codecs)
