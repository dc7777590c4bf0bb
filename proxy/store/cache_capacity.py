"""Share one number of bytes among the large caches of a process, and the part of each among tenants."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, MutableMapping
from typing import Generic, NamedTuple, TypeVar

from proxy.store.tenant_cache import Place

V = TypeVar("V")

DEFAULT = 256_000_000  # bytes of `server.cache_memory`

SLACK = 50
"""A cache that is full is emptied by this part more, so that not every new value looks for the largest tenant."""


class CacheCapacity(NamedTuple):
    """The bytes that the caches of a process may take, as they estimate their values.

    Small maps, such as those of limits and of the sizes of conversations, have fixed bounds of their own.
    """

    total: int = DEFAULT

    @property
    def facts(self) -> int:
        return self.total // 2

    @property
    def items(self) -> int:
        return self.total // 4

    @property
    def summaries(self) -> int:
        return self.total // 4


class TenantMemory(MutableMapping[Place, V], Generic[V]):
    """Values by tenant and key. If they take too many bytes, the tenant with the most loses its least recently used.

    So one tenant may take all, but only while others don't need their equal parts.
    """

    def __init__(self, most: int, size: Callable[[V], int], entries: int = sys.maxsize) -> None:
        """``most`` is in bytes, and ``size`` returns those of a value. There are at most ``entries`` values."""
        self.most = most
        self._entries = entries
        self.bytes = 0
        self._count = 0
        self._size = size
        self._tenants: dict[str, dict[Place, tuple[V, int]]] = {}
        self._bytes: dict[str, int] = {}

    def __getitem__(self, place: Place) -> V:
        values = self._tenants[place[0]]
        found = values[place] = values.pop(place)
        return found[0]

    def __setitem__(self, place: Place, value: V) -> None:
        self.pop(place, None)
        size = self._size(value)
        self._tenants.setdefault(place[0], {})[place] = value, size
        self._bytes[place[0]] = self._bytes.get(place[0], 0) + size
        self.bytes += size
        self._count += 1
        room = self.most if self.bytes <= self.most else self.most - self.most // SLACK
        # The newest value stays even if it's too large alone.
        while self._count > 1 and (self.bytes > room or self._count > self._entries):
            largest = max(self._bytes, key=self._bytes.__getitem__)
            oldest = next(iter(self._tenants[largest]))
            if oldest == place:
                largest = max(self._bytes.keys() - {largest}, key=self._bytes.__getitem__)
                oldest = next(iter(self._tenants[largest]))
            del self[oldest]

    def __delitem__(self, place: Place) -> None:
        values = self._tenants[place[0]]
        _, size = values.pop(place)
        self._bytes[place[0]] -= size
        self.bytes -= size
        self._count -= 1
        if not values:
            del self._tenants[place[0]], self._bytes[place[0]]

    def __iter__(self) -> Iterator[Place]:
        for values in self._tenants.values():
            yield from values

    def __len__(self) -> int:
        return self._count
