"""Records of requests and the ledger, in a file next to the store's or on the server of the store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from proxy.records.model import RecordStore
from proxy.records.sqlite import SqliteRecords
from proxy.store import is_redis, store_file


def open_records(url: str, keys: Sequence[bytes] = ()) -> RecordStore:
    """Return the records of the store at an address. See ``open_store``."""
    if is_redis(url):
        # Only deployments with Redis need its package.
        from proxy.records.redis import RedisRecords

        return RedisRecords(url, keys)
    path = store_file(url)
    return SqliteRecords(None if path is None else records_file(path), keys)


def records_file(path: Path) -> Path:
    """Return the file with the records of a store: ``compaction-records.db`` for ``compaction.db``."""
    return path.with_name(f"{path.stem}-records{path.suffix}")
