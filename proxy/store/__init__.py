"""Storage for summaries, archived messages, and learned limits."""

from proxy.store.guarded import Guarded
from proxy.store.interface import Entry, ManagedStore, Refused, Store, StoreFailed
from proxy.store.opening import open_store

__all__ = ["Entry", "Guarded", "ManagedStore", "Refused", "Store", "StoreFailed", "open_store"]
