"""Open the store at the address in the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from proxy.errors import ConfigurationError
from proxy.store.interface import ManagedStore
from proxy.store.sealing import SealedStore
from proxy.store.sqlite import SqliteStore


def open_store(url: str, keys: Sequence[bytes] = (), max_bytes: int | None = None) -> ManagedStore:
    """Return the store at ``sqlite:///relative/path``, ``sqlite:////absolute/path``, or ``sqlite://`` (in memory).

    The first of the ``keys``, 32 bytes each, encrypts new entries; all of them decrypt. ``max_bytes`` is the size that
    maintenance enforces. The file opens at first use. Raises ``ConfigurationError`` for other addresses.
    """
    store = SqliteStore(store_file(url), max_bytes)
    return SealedStore(store, keys) if keys else store


def store_file(url: str) -> Path | None:
    """Return the file at an address, or ``None`` for memory. Raises ``ConfigurationError`` for other addresses."""
    if url == "sqlite://":
        return None
    scheme, separator, path = url.partition(":///")
    if scheme == "sqlite" and separator and path:
        return Path(path).expanduser()
    raise ConfigurationError(f"store.url: {scheme}:// is not a store of this version; use sqlite:///path/to/file.db")
