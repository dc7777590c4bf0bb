"""Where summaries and the archive are kept."""

from proxy.store.interface import Store, StoreFailed
from proxy.store.opening import open_store

__all__ = ["Store", "StoreFailed", "open_store"]
