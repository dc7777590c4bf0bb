"""A store in one SQLite file. Several worker processes on one machine can share it."""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import structlog

from proxy.store.interface import Entry, StoreFailed
from proxy.store.sealing import Codec, Content, RowKey, Unreadable, codecs
from proxy.store.sqlite_worker import PAD, PAGE, SqliteWorker, rebuild
from proxy.telemetry.metrics import STORE_REMOVED, STORE_UNREADABLE

log = structlog.get_logger(__name__)

MARK = "forgotten"
"""The kind of entry that tells other processes about a forgotten tenant. These entries don't belong to a tenant."""

MARK_SECONDS = 24 * 3600.0

BATCH = 200
"""Entries per removal. Other processes can write between removals."""

SMALL = 1_000
"""Bytes. To shrink the file, the store removes smaller entries only if there are no larger ones."""

ROOM = 0.9
"""Share of the size limit to shrink to when the file exceeds it."""

PAGES = 1_000
"""Empty pages that one step returns to the file system."""

PATIENCE = 60.0
"""Seconds to retry each step of a tenant's removal while other processes use the file."""

_REMOVE = "DELETE FROM entries WHERE tenant = ? AND kind = ? AND key = ?"
_PUT = f"INTO entries VALUES (?, ?, ?, ?, ?, zeroblob({PAD}), ?)"


class SqliteStore:
    """Run reads and writes in separate threads, so reads don't wait for writes."""

    def __init__(self, path: Path | None, keys: Sequence[bytes] = (), max_bytes: int | None = None) -> None:
        """Use the file at ``path``, or memory if it is ``None``.

        The store creates a missing file and its folder, readable only by their owner. The first of the ``keys``, 32
        bytes each, encrypts; all of them decrypt. ``upkeep`` shrinks the file to ``max_bytes``.
        """
        self._path = path
        self._codecs = codecs(keys)
        self._by_id = {codec.id: codec for codec in self._codecs}
        self._encrypts = bool(keys)
        self._max_bytes = max_bytes
        self._writer = SqliteWorker(path, "store-write")
        self._reader = SqliteWorker(path, "store-read") if path is not None else self._writer
        self._removed = True
        """Whether the write-ahead log may still contain bytes of removed entries."""
        self._foreign = 0

    async def get(self, tenant: str, kind: str, key: str) -> bytes | None:
        """See ``Store``."""
        return await self._reader.run(lambda db: self._get(db, tenant, kind, key))

    async def put(self, tenant: str, kind: str, key: str, value: bytes, seconds: float) -> None:
        """See ``Store``."""
        content = Content(tenant, kind, key, value)
        await self._writer.run(lambda db: self._put(db, content, time.time() + seconds))

    async def add(self, tenant: str, kind: str, key: str, value: bytes, seconds: float) -> bytes:
        """See ``Store``."""
        content = Content(tenant, kind, key, value)
        return await self._writer.run(lambda db: self._add(db, content, time.time() + seconds))

    async def discard(self, tenant: str, kind: str, key: str) -> None:
        """See ``Store``."""
        places = [codec.place(tenant, kind, key) for codec in self._codecs]
        await self._writer.run(lambda db: self._discard(db, places))

    async def entries(self, kind: str) -> list[Entry]:
        """See ``ListingStore``. Doesn't create a missing file."""
        if await self._absent():
            return []
        found = await self._reader.run(lambda db: self._contents(db, kind))
        return sorted((Entry(c.tenant, c.key, c.value) for c in found), key=lambda entry: (entry.tenant, entry.key))

    async def forget(self, tenant: str) -> Mapping[str, int]:
        """Remove a tenant's entries and list the tenant in ``forgotten``. Raises ``StoreFailed``."""
        counts: dict[str, int] = {}
        if await self._absent():
            return counts
        mark = hashlib.sha256(tenant.encode()).hexdigest()

        await _patiently(lambda: self._remove(tenant, counts))
        await _patiently(lambda: self.put("", MARK, mark, repr(time.time()).encode(), MARK_SECONDS))
        await _patiently(lambda: self._writer.run(rebuild))  # only once, because it is slow for a large file
        await _patiently(self._empty)
        return counts

    async def remove(self, tenant: str) -> Mapping[str, int]:
        """See ``ListingStore``."""
        counts: dict[str, int] = {}
        if not await self._absent():
            await _patiently(lambda: self._remove(tenant, counts))
            await _patiently(self._empty)
        return counts

    async def forgotten(self) -> dict[str, float]:
        """Return recently forgotten tenants: their SHA-256 in hex, and the time in seconds since 1970."""
        marks = {entry.key: _seconds(entry.value) for entry in await self.entries(MARK)}
        return {digest: when for digest, when in marks.items() if when is not None}

    async def unknown(self) -> int:
        """Count entries written with unknown keys, or unencrypted ones in an encrypted store."""
        ids = tuple(self._by_id)
        if await self._absent():
            return 0
        places = ", ".join("?" * len(ids))
        query = f"SELECT count(*) FROM entries WHERE codec NOT IN ({places})"  # noqa: S608 - question marks only
        return int((await self._reader.run(lambda db: db.execute(query, ids).fetchone()))[0])

    async def upkeep(self) -> None:
        """Run maintenance (see ``ListingStore``) and re-encrypt entries under older keys with the first key.

        After the first call the store moves a damaged file away. Processes that only read leave it in place.
        """
        self._writer.mends = self._reader.mends = True
        if await self._absent():
            return
        while await self._writer.run(self._expire):
            pass
        if self._encrypts:
            while await self._writer.run(self._bare):
                pass
            for codec in self._codecs[1:]:
                while await self._writer.run(lambda db, codec=codec: self._renew(db, codec)):  # type: ignore[misc]
                    pass
        while await self._writer.run(self._shrink):
            pass
        if self._removed:
            self._removed = not await self._emptied()
        foreign = await self.unknown()
        if foreign > self._foreign:
            log.warning("store.other_keys", entries=foreign)
        self._foreign = foreign

    async def aclose(self) -> None:
        """See ``Store``."""
        await self._writer.aclose()
        if self._reader is not self._writer:
            await self._reader.aclose()

    async def _absent(self) -> bool:
        """Return whether there is no file yet. Raises ``StoreFailed`` if its folder can't be read."""
        return self._path is not None and not await self._reader.look(self._path.exists)

    async def _remove(self, tenant: str, counts: dict[str, int]) -> None:
        """Remove a tenant's entries, and count them by kind. Raises ``StoreFailed``."""
        while kinds := await self._writer.run(lambda db: self._remove_some(db, tenant)):
            for kind in kinds:
                counts[kind] = counts.get(kind, 0) + 1

    async def _emptied(self) -> bool:
        """Clear removed bytes from the file and its log. Return whether that succeeded."""
        while await self._writer.run(_give_back):
            pass
        return await self._writer.run(_emptied)

    async def _empty(self) -> None:
        """Clear removed bytes. Raises ``StoreFailed`` if that fails."""
        if not await self._emptied():
            raise StoreFailed("the log can't be emptied: the file is being read without a pause")

    def _get(self, db: sqlite3.Connection, tenant: str, kind: str, key: str) -> bytes | None:
        for codec in self._codecs:
            place = codec.place(tenant, kind, key)
            row = db.execute(
                "SELECT value FROM entries WHERE tenant = ? AND kind = ? AND key = ? AND codec = ? AND expires > ?",
                (*place, codec.id, time.time()),
            ).fetchone()
            content = None if row is None else _read(codec, place, row[0])
            if content is not None:
                return content.value
        return None

    def _put(self, db: sqlite3.Connection, content: Content, expires: float) -> None:
        with db:
            self._insert(db, content, expires)

    def _insert(self, db: sqlite3.Connection, content: Content, expires: float) -> None:
        codec = self._codecs[0]
        place = codec.place(content.tenant, content.kind, content.key)
        db.execute(f"INSERT OR REPLACE {_PUT}", (*place, expires, codec.id, codec.write(content)))

    def _add(self, db: sqlite3.Connection, content: Content, expires: float) -> bytes:
        with db:
            db.execute("BEGIN IMMEDIATE")  # no other process writes between the read and the write
            found = self._get(db, content.tenant, content.kind, content.key)
            if found is not None:
                return found
            self._insert(db, content, expires)
        return content.value

    def _discard(self, db: sqlite3.Connection, places: Sequence[RowKey]) -> None:
        with db:
            db.executemany(_REMOVE, places)
        self._removed = True

    def _contents(self, db: sqlite3.Connection, kind: str) -> list[Content]:
        found: dict[tuple[str, str], Content] = {}
        for codec in self._codecs:
            rows = db.execute(
                "SELECT tenant, kind, key, value FROM entries WHERE codec = ? AND kind = ? AND expires > ?",
                (codec.id, codec.kind(kind), time.time()),
            )
            for *place, value in rows:
                content = _read(codec, tuple(place), value)
                if content is not None:
                    found.setdefault((content.tenant, content.key), content)
        return list(found.values())

    def _remove_some(self, db: sqlite3.Connection, tenant: str) -> list[str]:
        """Remove some entries of a tenant. Return the kind of each."""
        kinds: list[str] = []
        names: dict[str, str] = {}
        for codec in self._codecs:
            rows = db.execute(
                "SELECT tenant, kind, key FROM entries WHERE tenant = ? AND codec = ? LIMIT ?",
                (codec.tenant(tenant), codec.id, BATCH),
            ).fetchall()
            for place in rows:
                if place[1] not in names:
                    names[place[1]] = _kind(db, codec, place)
                kinds.append(names[place[1]])
            with db:
                db.executemany(_REMOVE, rows)
        return kinds

    def _expire(self, db: sqlite3.Connection) -> bool:
        rows = db.execute(
            "SELECT tenant, kind, key FROM entries WHERE expires <= ? LIMIT ?", (time.time(), BATCH)
        ).fetchall()
        return self._drop(db, rows, "expired")

    def _bare(self, db: sqlite3.Connection) -> bool:
        rows = db.execute("SELECT tenant, kind, key FROM entries WHERE codec = '' LIMIT ?", (BATCH,)).fetchall()
        if rows:
            log.warning("store.unencrypted_removed", entries=len(rows))
        return self._drop(db, rows, "unencrypted")

    def _renew(self, db: sqlite3.Connection, codec: Codec) -> bool:
        """Re-encrypt some entries from an older key. Return whether there may be more."""
        rows = db.execute(
            "SELECT tenant, kind, key, value, expires FROM entries WHERE codec = ? LIMIT ?", (codec.id, BATCH // 10)
        ).fetchall()
        ours = self._codecs[0]
        with db:
            for *place, value, expires in rows:
                content = _read(codec, tuple(place), value)
                if content is not None:
                    renewed = ours.place(content.tenant, content.kind, content.key)
                    db.execute(f"INSERT OR IGNORE {_PUT}", (*renewed, expires, ours.id, ours.write(content)))
                db.execute(_REMOVE, place)
        self._removed |= bool(rows)
        return bool(rows)

    def _shrink(self, db: sqlite3.Connection) -> bool:
        """Remove some entries that expire first if the file is too large. Return whether there may be more."""
        if self._max_bytes is None:
            return False
        used = _used(db)
        if used <= self._max_bytes:
            return False
        excess = used - int(self._max_bytes * ROOM)
        query = "SELECT tenant, kind, key, length(value) FROM entries WHERE length(value) >= ? ORDER BY expires LIMIT ?"
        rows = db.execute(query, (SMALL, BATCH)).fetchall() or db.execute(query, (0, BATCH)).fetchall()
        chosen: list[RowKey] = []
        for *place, size in rows:
            if excess <= 0:
                break
            chosen.append((place[0], place[1], place[2]))
            excess -= (size // PAGE + 2) * PAGE
        return self._drop(db, chosen, "size")

    def _drop(self, db: sqlite3.Connection, places: Sequence[RowKey], reason: str) -> bool:
        with db:
            db.executemany(_REMOVE, places)
        STORE_REMOVED.labels(reason=reason).inc(len(places))
        self._removed |= bool(places)
        return bool(places)


def _read(codec: Codec, place: Sequence[str], stored: object) -> Content | None:
    """Decode an entry. Return ``None`` if it is unreadable."""
    tenant, kind, key = place
    try:
        if not isinstance(stored, bytes):
            raise Unreadable(type(stored).__name__)
        return codec.read((tenant, kind, key), stored)
    except Unreadable as error:
        STORE_UNREADABLE.inc()
        log.warning("store.undecryptable", reason=str(error))
        return None


def _kind(db: sqlite3.Connection, codec: Codec, place: RowKey) -> str:
    """Return the real name of an entry's kind."""
    row = db.execute("SELECT value FROM entries WHERE tenant = ? AND kind = ? AND key = ?", place).fetchone()
    content = None if row is None else _read(codec, place, row[0])
    return "unreadable" if content is None else content.kind


async def _patiently(work: Callable[[], Awaitable[None]]) -> None:
    """Retry work until it succeeds. Raises ``StoreFailed`` after ``PATIENCE`` seconds."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return await work()
        except StoreFailed:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.1)


def _seconds(value: bytes) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None


def _pragma(db: sqlite3.Connection, name: str) -> int:
    return int(db.execute(f"PRAGMA {name}").fetchone()[0])


def _used(db: sqlite3.Connection) -> int:
    """Return the bytes of used pages in the file."""
    return (_pragma(db, "page_count") - _pragma(db, "freelist_count")) * _pragma(db, "page_size")


def _give_back(db: sqlite3.Connection) -> bool:
    """Return some empty pages to the file system. Return whether there may be more.

    Files from earlier versions keep their empty pages and reuse them.
    """
    free = _pragma(db, "freelist_count")
    if free:
        db.execute(f"PRAGMA incremental_vacuum({PAGES})").fetchall()
    return _pragma(db, "freelist_count") < free


def _emptied(db: sqlite3.Connection) -> bool:
    """Truncate the log, which removes deleted bytes from it. Return whether that succeeded."""
    busy, *_ = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    return not busy
