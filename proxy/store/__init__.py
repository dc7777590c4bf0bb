"""Storage for summaries, archived messages, and learned limits, at the address in the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from proxy.errors import ConfigurationError
from proxy.store.guarded import Guarded
from proxy.store.interface import Entry, ManagedStore, Refused, Store, StoreFailed
from proxy.store.sealing import SealedStore
from proxy.store.sqlite import SqliteStore

if TYPE_CHECKING:
    from proxy.store.redis_store import RedisLimits

__all__ = [
    "Entry",
    "Guarded",
    "ManagedStore",
    "Refused",
    "Store",
    "StoreFailed",
    "is_redis",
    "open_limits",
    "open_store",
    "store_file",
]


def open_store(url: str, keys: Sequence[bytes] = (), max_bytes: int | None = None) -> ManagedStore:
    """Return the store at ``sqlite:///relative/path``, ``sqlite:////absolute/path``, ``sqlite://``, or ``redis://host``.

    The first of the ``keys``, 32 bytes each, encrypts new entries; all of them decrypt. ``max_bytes`` is the size of a
    file that maintenance enforces. The store connects at first use. Raises ``ConfigurationError`` for other addresses.
    """
    if is_redis(url):
        # Only who uses Redis needs its package.
        from proxy.store.redis_store import RedisStore

        backend: RedisStore | SqliteStore = RedisStore(url)
    else:
        backend = SqliteStore(store_file(url), max_bytes)
    return SealedStore(backend, keys) if keys else backend


def open_limits(url: str) -> RedisLimits | None:
    """Return the counts of all replicas, or ``None`` if the store isn't on Redis."""
    if not is_redis(url):
        return None
    from proxy.store.redis_store import RedisLimits

    return RedisLimits(url)


def is_redis(url: str) -> bool:
    return url.startswith(("redis:", "rediss:", "redis+", "rediss+"))


def store_file(url: str) -> Path | None:
    """Return the file at an address, or ``None`` without a file. Raises ``ConfigurationError`` for other addresses."""
    if url == "sqlite://" or is_redis(url):
        return None
    scheme, separator, path = url.partition(":///")
    if scheme == "sqlite" and separator and path:
        return Path(path).expanduser()
    raise ConfigurationError(f"store.url: {scheme}:// is not a store of this version; use sqlite:///path/to/file.db")
