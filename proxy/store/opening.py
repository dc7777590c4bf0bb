"""From the address in the configuration to a store."""

from __future__ import annotations

from pathlib import Path

from proxy.errors import ConfigurationError
from proxy.store.interface import ListingStore
from proxy.store.sqlite import SqliteStore


def open_store(url: str) -> ListingStore:
    """The store at an address: ``sqlite:///relative/path``, ``sqlite:////absolute/path`` or ``sqlite://`` (in memory).

    Nothing is opened before it is used. Raises ``ConfigurationError`` for other addresses.
    """
    if url == "sqlite://":
        return SqliteStore(None)
    scheme, separator, path = url.partition(":///")
    if scheme == "sqlite" and separator and path:
        return SqliteStore(Path(path).expanduser())
    raise ConfigurationError(f"store.url: {scheme}:// is not a store of this version; use sqlite:///path/to/file.db")
