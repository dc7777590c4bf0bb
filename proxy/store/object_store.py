"""Entries as objects on S3, Google Cloud Storage, Azure Blob Storage, or in a folder.

An object's name has everything but the value, so listings suffice for maintenance:
``1/TENANT/KIND/KEY/WRITTEN.EXPIRES.CODEC``, with 1 as the version of this format, and the times in microseconds and
milliseconds since 1970. A write adds an object, and the newest one counts. Maintenance removes the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import obstore
from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, LocalStore, ObjectStore, S3Store

from proxy.store.interface import PER_PAGE, Backend, Entry, StoreFailed
from proxy.telemetry.metrics import STORE_REMOVED

VERSION = "1"
"""The format of names. Other versions of the proxy skip entries of a version that they don't know."""

SWEPT = "swept"
"""The object with the time of the last sweep, in seconds since 1970."""

PAGE = 1_000
"""Names per listing, which is the maximum of S3."""

PAGES = 100
"""Listings per round of maintenance."""

SWEEP_SECONDS = 6 * 3600.0
"""Seconds between sweeps, which list all names. Replicas share them."""

CHECK_SECONDS = 600.0
"""Seconds after which a process checks whether a sweep is due."""

PARALLEL = 10
"""Reads of one call at the same time."""

WRITES = 50
"""Writes of one call at the same time."""

CONNECT_SECONDS = 2
REQUEST_SECONDS = 10
RETRIES = 1

_STATUS = re.compile(r"\bstatus[ :]+(\d{3})\b|\b(\d{3}) [A-Z][a-z]++ ?[A-Za-z]*:")


class _Version(NamedTuple):
    """One write of an entry. ``row`` has the tenant, kind, and key; times are in seconds."""

    row: tuple[str, str, str]
    written: int
    expires: float
    codec: str
    path: str

    @property
    def age(self) -> tuple[int, float]:
        """Return a value that is larger for newer versions of an entry."""
        return self.written, self.expires


class ObjectsStore(Backend):
    """See ``Backend`` for the methods.

    If several processes add or replace an entry at the same moment, all may succeed, and the last write counts. Entries
    of the archive are derived from their content, so they are equal.
    """

    def __init__(
        self, url: str, options: Mapping[str, str] | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        """Use the bucket, container, or folder at ``url``. ``options`` are the ``endpoint`` and ``region`` of S3.

        Creates a missing folder, readable only by its owner. ``clock`` returns seconds since 1970. Raises ``OSError``
        or obstore's ``BaseError`` if the folder can't be created or the environment lacks settings.
        """
        self._objects, self._folder = _client(url, options or {})
        self._clock = clock
        self._next_check = 0.0
        self._sweep: AsyncIterator[Sequence[Mapping[str, Any]]] | None = None
        self._unfinished = False
        """True if a sweep of this process failed. It is then due at once."""
        self._last: _Version | None = None
        """The version that the sweep looked at last and didn't remove."""
        self._counting: Counter[str] = Counter()
        self._counted: Counter[str] | None = None
        """The entries by codec in the last sweep, or ``None`` before the first call of ``maintain``."""
        self._scans: dict[str, AsyncIterator[list[_Version]]] = {}

    async def get_many(self, tenant: str, kind: str, keys: Sequence[str]) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        with failures():
            for start in range(0, len(keys), PARALLEL):
                some = keys[start : start + PARALLEL]
                values = await asyncio.gather(*(self._get(tenant, kind, key) for key in some))
                found |= {key: value for key, value in zip(some, values, strict=True) if value is not None}
        return found

    async def put_many(self, entries: Sequence[Entry], codec: str = "") -> None:
        left = iter(entries)
        writers = (self._put(left, codec) for _ in range(min(WRITES, len(entries))))
        # Wait for all, so that no write continues after a failure.
        for failure in await asyncio.gather(*writers, return_exceptions=True):
            if failure is not None:
                raise failure

    async def add(self, tenant: str, kind: str, key: str, value: bytes, seconds: float, codec: str = "") -> bytes:
        found = await self.get(tenant, kind, key)
        if found is not None:
            return found
        await self.put_many([Entry(tenant, kind, key, value, seconds)], codec)
        return value

    async def replace(
        self, tenant: str, kind: str, key: str, old: bytes, new: bytes, seconds: float, codec: str = ""
    ) -> bool:
        same = await self.get(tenant, kind, key) == old
        if same:
            await self.put_many([Entry(tenant, kind, key, new, seconds)], codec)
        return same

    async def delete_many(self, tenant: str, kind: str, keys: Sequence[str], codec: str = "") -> None:
        with failures():
            for key in keys:
                async for versions in self._listed(_folder(tenant, kind, key)):
                    await _delete(self._objects, [version.path for version in versions])

    async def entries(self, kind: str) -> list[Entry]:
        newest: dict[tuple[str, str, str], _Version] = {}
        with failures():
            async for versions in self._listed(VERSION):
                for version in versions:
                    if version.row[1] == kind:
                        newest[version.row] = max(version, newest.get(version.row, version), key=lambda one: one.age)
            return await self._read([newest[row] for row in sorted(newest)])

    async def pages(self, codec: str = "") -> AsyncIterator[list[Entry]]:
        last: list[_Version] = []
        with failures():
            async for versions in self._listed(VERSION):
                # The versions of an entry are neighbors in a listing, and may continue in the next one.
                newest: dict[tuple[str, str, str], _Version] = {}
                for version in (*last, *versions):
                    newest[version.row] = max(version, newest.get(version.row, version), key=lambda one: one.age)
                *wanted, final = newest.values()
                last = [final]
                for start in range(0, len(wanted), PER_PAGE):
                    yield await self._read([one for one in wanted[start : start + PER_PAGE] if one.codec == codec])
            yield await self._read([version for version in last if version.codec == codec])

    async def scan(self, codec: str, limit: int) -> list[Entry]:
        with failures():
            if not (await self._counts())[codec]:
                return []
            # Continue the listing of the last call, because each one lists all entries.
            names = self._scans.pop(codec, None) or self._listed(VERSION, limit)
            async for versions in names:
                if found := await self._read([version for version in versions if version.codec == codec]):
                    self._scans[codec] = names
                    return found
            self._forget_count(codec)
        return []

    async def remove(self, tenant: str) -> Counter[str]:
        with failures():
            async for versions in self._listed(_folder(tenant)):
                await _delete(self._objects, [version.path for version in versions])
                return Counter(kind for _, kind, _ in {version.row for version in versions})
            if self._folder is not None:
                # Files that a process was writing when it was killed don't appear in listings.
                await asyncio.to_thread(shutil.rmtree, self._folder / _folder(tenant), ignore_errors=True)
        return Counter()

    async def remove_codec(self, codec: str) -> int:
        count = 0
        with failures():
            if (await self._counts())[codec]:
                async for versions in self._listed(VERSION):
                    gone = [version.path for version in versions if version.codec == codec]
                    await _delete(self._objects, gone)
                    count += len(gone)
                self._forget_count(codec)
        return count

    async def counts(self) -> Counter[str]:
        """Count as of the last sweep in a process that runs maintenance."""
        with failures():
            return await self._counts()

    async def erase(self) -> None:
        """Do nothing: the service or the file system frees removed objects."""

    async def rebuild(self) -> None:
        """Do nothing. See ``erase``."""

    async def maintain(self) -> None:
        """Remove expired and replaced versions, in steps of up to ``PAGES`` listings, if a sweep is due."""
        with failures():
            if self._sweep is None:
                if not await self._is_due():
                    return
                self._sweep = aiter(obstore.list(self._objects, VERSION, chunk_size=PAGE))
                self._counting, self._last, self._unfinished = Counter(), None, True
            try:
                done = await self._continue(self._sweep)
            except BaseException:
                self._sweep = None
                raise
            if done:
                self._sweep, self._unfinished, self._counted = None, False, self._counting

    async def aclose(self) -> None:
        """Do nothing. The client closes its connections when it's freed."""

    async def _put(self, entries: Iterator[Entry], codec: str) -> None:
        for entry in entries:
            if entry.seconds <= 0:
                await self.delete(entry.tenant, entry.kind, entry.key)
                continue
            folder, now = _folder(entry.tenant, entry.kind, entry.key), self._clock()
            path = f"{folder}/{int(now * 1_000_000)}.{int((now + entry.seconds) * 1000)}.{_quoted(codec)}"
            with failures():
                await obstore.put_async(self._objects, path, entry.value, use_multipart=False)

    async def _get(self, tenant: str, kind: str, key: str) -> bytes | None:
        found: list[_Version] = []
        async for versions in self._listed(_folder(tenant, kind, key)):
            found += versions
        if not found:
            return None
        entries = await self._read([max(found, key=lambda version: version.age)])
        return entries[0].value if entries else None

    async def _read(self, versions: Sequence[_Version]) -> list[Entry]:
        """Return the entries of versions, without those that have expired or that another process removed."""
        now = self._clock()
        wanted = [version for version in versions if version.expires > now]
        found = []
        for start in range(0, len(wanted), PARALLEL):
            some = wanted[start : start + PARALLEL]
            values = await asyncio.gather(*(_value(self._objects, version) for version in some))
            for version, value in zip(some, values, strict=True):
                if value is not None:
                    found.append(Entry(*version.row, value, version.expires - now))
        return found

    async def _listed(self, prefix: str, size: int = PAGE) -> AsyncIterator[list[_Version]]:
        """Yield the versions below a prefix, in batches that aren't empty."""
        async for page in obstore.list(self._objects, prefix, chunk_size=size):
            if versions := _versions(page):
                yield versions

    async def _counts(self) -> Counter[str]:
        if self._counted is not None:
            return self._counted
        counts: Counter[str] = Counter()
        async for versions in self._listed(VERSION):
            counts.update(version.codec for version in versions)
        return counts

    def _forget_count(self, codec: str) -> None:
        if self._counted is not None:
            del self._counted[codec]

    async def _is_due(self) -> bool:
        now = self._clock()
        if now < self._next_check and not self._unfinished:
            return False
        self._next_check = now + CHECK_SECONDS
        if not self._unfinished and now < await _swept(self._objects) + SWEEP_SECONDS:
            # The process that made the sweep counted the entries, and does the work that depends on the counts.
            self._counted = self._counted or Counter()
            return False
        await obstore.put_async(self._objects, SWEPT, repr(now).encode(), use_multipart=False)
        return True

    async def _continue(self, sweep: AsyncIterator[Sequence[Mapping[str, Any]]]) -> bool:
        """Process some listings of a sweep. Return whether it's finished."""
        for _ in range(PAGES):
            page = await anext(sweep, None)
            if page is None:
                return True
            gone: dict[str, list[str]] = {"expired": [], "replaced": []}
            # The versions of an entry are neighbors in a listing.
            for row, several in groupby(_versions(page), key=lambda version: version.row):
                versions = sorted(several, key=lambda version: version.age)
                if self._last is not None and self._last.row == row:
                    versions = sorted([self._last, *versions], key=lambda version: version.age)
                    self._counting[self._last.codec] -= 1
                *older, newest = versions
                gone["replaced"] += [version.path for version in older]
                self._last = None
                if newest.expires <= self._clock():
                    gone["expired"].append(newest.path)
                else:
                    self._last = newest
                    self._counting[newest.codec] += 1
            for reason, paths in gone.items():
                await _delete(self._objects, paths)
                STORE_REMOVED.labels(reason=reason).inc(len(paths))
        return False


def _client(url: str, options: Mapping[str, str]) -> tuple[ObjectStore, Path | None]:
    """Return a client for an address, and the folder if it is one. See ``ObjectsStore``."""
    scheme, _, rest = url.partition("://")
    if scheme == "file":
        folder = Path(rest)
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        # The library makes files by the umask, so this folder keeps others out, also if the operator made ``folder``.
        private = folder / VERSION
        private.mkdir(exist_ok=True)
        with contextlib.suppress(PermissionError):  # it belongs to another user
            private.chmod(0o700)
        return LocalStore(folder, automatic_cleanup=True), folder
    bucket, _, path = rest.partition("/")
    common: dict[str, Any] = {
        "prefix": path.strip("/") or None,
        "client_options": {
            "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
            "timeout": timedelta(seconds=REQUEST_SECONDS),
            **({"allow_http": True} if options.get("endpoint", "").startswith("http:") else {}),
        },
        "retry_config": {"max_retries": RETRIES, "retry_timeout": timedelta(seconds=REQUEST_SECONDS)},
    }
    config: dict[str, Any] = dict(options)
    makers: dict[str, Any] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
    store: ObjectStore = makers[scheme](bucket, **common, **config)
    return store, None


@contextlib.contextmanager
def failures() -> Iterator[None]:
    """Raise ``StoreFailed`` for an error of the service or of the connection to it."""
    try:
        yield
    except (BaseError, OSError) as error:
        # The message may contain an object's name, which contains a tenant's.
        found = _STATUS.search(str(error))
        status = "" if found is None else f" {found[1] or found[2]}"
        raise StoreFailed(f"object storage: {type(error).__name__}{status}") from None


async def _value(objects: ObjectStore, version: _Version) -> bytes | None:
    """Return the value of a version, or ``None`` if another process removed it."""
    try:
        answer = await obstore.get_async(objects, version.path)
        return bytes(await answer.bytes_async())
    except FileNotFoundError:
        return None


async def _delete(objects: ObjectStore, paths: Sequence[str]) -> None:
    if paths:
        with contextlib.suppress(FileNotFoundError):  # another process removed one of them
            await obstore.delete_async(objects, paths)


async def _swept(objects: ObjectStore) -> float:
    """Return the time of the last sweep, or 0 before the first one."""
    try:
        answer = await obstore.get_async(objects, SWEPT)
        return float(bytes(await answer.bytes_async()))
    except (FileNotFoundError, ValueError):
        return 0.0


def _folder(*parts: str) -> str:
    """Return the name of the folder with a tenant's entries, those of a kind, or the versions of an entry."""
    return "/".join((VERSION, *map(_quoted, parts)))


def _quoted(part: str) -> str:
    """Return text that is safe as part of a name, also on file systems that ignore case. An empty part becomes =."""
    return (
        "".join(
            chr(byte) if chr(byte) in "abcdefghijklmnopqrstuvwxyz0123456789_-" else f"={byte:02x}"
            for byte in part.encode()
        )
        or "="
    )


def _versions(page: Iterable[Mapping[str, Any]]) -> list[_Version]:
    """Return the versions in a listing, without objects that have other names."""
    found = []
    for each in page:
        with contextlib.suppress(ValueError):
            _, *row, last = each["path"].split("/")
            tenant, kind, key = map(_unquoted, row)
            written, expires, codec = last.split(".")
            version = _Version((tenant, kind, key), int(written), int(expires) / 1000, _unquoted(codec), each["path"])
            found.append(version)
    return found


def _unquoted(part: str) -> str:
    return "" if part == "=" else unquote(part.replace("=", "%"), errors="strict")
