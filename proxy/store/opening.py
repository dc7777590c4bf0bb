"""From the address in the configuration to a store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from proxy.errors import ConfigurationError
from proxy.store.interface import ListingStore
from proxy.store.sqlite import SqliteStore


def open_store(url: str, keys: Sequence[bytes] = (), max_bytes: int | None = None) -> ListingStore:
    """The store at an address: ``sqlite:///relative/path``, ``sqlite:////absolute/path`` or ``sqlite://`` (in memory).

    The first of the ``keys``, of 32 bytes each, encrypts what is stored; all of them decrypt. ``max_bytes`` is its
    size.
    Nothing is opened before it is used. Raises ``ConfigurationError`` for other addresses.
    """
    path = store_file(url)
    return SqliteStore(path, keys, max_bytes)


def store_file(url: str) -> Path | None:
    """The file at an address; ``None`` for memory. Raises ``ConfigurationError`` for addresses of no store."""
    if url == "sqlite://":
        return None
    scheme, separator, path = url.partition(":///")
    if scheme == "sqlite" and separator and path:
        return Path(path).expanduser()
    raise ConfigurationError(f"store.url: {scheme}:// is not a store of this version; use sqlite:///path/to/file.db")
