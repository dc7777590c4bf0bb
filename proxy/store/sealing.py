"""Encrypt the entries of any store with AES-256-GCM.

The names under which the backend stores an entry are keyed digests, and the encrypted content includes the real names.
The content is bound to those digests, so it's unreadable under the names of another entry.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import importlib
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec
import structlog

from proxy.store.interface import Backend, Entry, ManagedStore
from proxy.telemetry.metrics import STORE_REMOVED, STORE_UNREADABLE

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

log = structlog.get_logger(__name__)

T = TypeVar("T")

RowKey = tuple[str, str, str]
"""The tenant, kind, and key under which the backend stores an entry."""

BATCH = 20
"""Entries that are encrypted again at once."""

INLINE_BYTES = 65_536
"""Values of more bytes are encrypted and decrypted in a thread."""

_NONCE = 12


class Unreadable(Exception):
    """The stored bytes aren't the bytes that the proxy wrote under these names."""


class Content(msgspec.Struct, frozen=True, array_like=True):
    """An entry with its real names."""

    tenant: str
    kind: str
    key: str
    value: bytes


class AesGcmCodec:
    """Encrypts with a 32-byte key. Nonces are random, so use a key for up to 2^32 entries."""

    def __init__(self, key: bytes) -> None:
        # Import here, because most deployments don't encrypt and don't need the package.
        aead = importlib.import_module("cryptography.hazmat.primitives.ciphers.aead")
        self._invalid: type[Exception] = importlib.import_module("cryptography.exceptions").InvalidTag
        self.id = _derived(key, "id").hex()[:16]
        self._names = _derived(key, "names")
        self._cipher: AESGCM = aead.AESGCM(_derived(key, "content"))

    def tenant(self, tenant: str) -> str:
        """Return the name of a tenant in the backend."""
        return self._digest("tenant", tenant)

    def kind(self, kind: str) -> str:
        """Return the name of a kind in the backend."""
        return self._digest("kind", kind)

    def row_key(self, tenant: str, kind: str, key: str) -> RowKey:
        """Return the names of an entry in the backend."""
        return self.tenant(tenant), self.kind(kind), self._digest("key", tenant, kind, key)

    def name(self, kind: str, name: str) -> str:
        """Return a digest in place of a name by which rows are looked up."""
        return self._digest(kind, name)

    def encrypt(self, content: Content) -> bytes:
        return self.encrypt_many([Entry(content.tenant, content.kind, content.key, content.value, 0.0)])[0].value

    def encrypt_many(self, entries: Sequence[Entry]) -> list[Entry]:
        """Return the entries to store, with their names in the backend."""
        # One call, because each one waits for the interpreter lock.
        nonces = os.urandom(_NONCE * len(entries))
        sealed = []
        for place, entry in enumerate(entries):
            row = self.row_key(entry.tenant, entry.kind, entry.key)
            content = msgspec.msgpack.encode(Content(entry.tenant, entry.kind, entry.key, entry.value))
            nonce = nonces[_NONCE * place : _NONCE * (place + 1)]
            sealed.append(Entry(*row, nonce + self._cipher.encrypt(nonce, content, _bound(row)), entry.seconds))
        return sealed

    def seal(self, row: RowKey, value: bytes) -> bytes:
        nonce = os.urandom(_NONCE)
        return nonce + self._cipher.encrypt(nonce, value, _bound(row))

    def open(self, row: RowKey, stored: bytes) -> bytes:
        """Return the decrypted value of a row. Raises ``Unreadable``."""
        try:
            return self._cipher.decrypt(stored[:_NONCE], stored[_NONCE:], _bound(row))
        except (self._invalid, ValueError) as error:
            raise Unreadable(type(error).__name__) from None

    def decrypt(self, row: RowKey, stored: bytes) -> Content:
        """Return the entry. Raises ``Unreadable``."""
        try:
            return msgspec.msgpack.decode(self.open(row, stored), type=Content)
        except (ValueError, msgspec.DecodeError) as error:
            raise Unreadable(type(error).__name__) from None

    def _digest(self, *parts: str) -> str:
        # Digest the parts as a list, so that different parts never produce the same input.
        return hmac.new(self._names, ascii(parts).encode(), hashlib.sha256).hexdigest()


class SealedStore(ManagedStore):
    """A store that encrypts the entries of a backend."""

    def __init__(self, backend: Backend, keys: Sequence[bytes]) -> None:
        """Encrypt with the first of the ``keys``, 32 bytes each, and decrypt with all of them."""
        self._backend = backend
        self._codecs = [AesGcmCodec(key) for key in keys]
        self.skipped = 0
        """Damaged entries that ``pages`` didn't yield."""

    async def get_many(self, tenant: str, kind: str, keys: Sequence[str]) -> dict[str, bytes]:
        return await self._get_many(self._codecs, tenant, kind, keys)

    async def _get_many(
        self, codecs: Sequence[AesGcmCodec], tenant: str, kind: str, keys: Sequence[str]
    ) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for codec in codecs:
            rows = {codec.row_key(tenant, kind, key): key for key in keys if key not in found}
            if not rows:
                break
            names = codec.tenant(tenant), codec.kind(kind)
            stored = await self._backend.get_many(*names, [row[2] for row in rows])
            values = {key: (row, stored[row[2]]) for row, key in rows.items() if row[2] in stored}
            size = sum(len(value) for _, value in values.values())
            found.update(await _off_loop(size, partial(_values, codec, values)))
        return found

    async def put_many(self, entries: Sequence[Entry]) -> None:
        codec = self._codecs[0]
        size = sum(len(entry.value) for entry in entries)
        await self._backend.put_many(await _off_loop(size, partial(codec.encrypt_many, entries)), codec.id)

    async def add(self, tenant: str, kind: str, key: str, value: bytes, seconds: float) -> bytes:
        newest, *older = self._codecs
        found = await self._get_many(older, tenant, kind, [key])
        if key in found:
            return found[key]
        row = newest.row_key(tenant, kind, key)
        ours = await _encrypt(newest, Content(tenant, kind, key, value))
        while (stored := await self._backend.add(*row, ours, seconds, newest.id)) != ours:
            content = await _decrypt(newest, row, stored)
            if content is not None:
                return content.value
            # Damaged. Of several processes, one replaces it and the others use the new entry.
            await self._backend.replace(*row, stored, ours, seconds, newest.id)
        return value

    async def replace(self, tenant: str, kind: str, key: str, old: bytes, new: bytes, seconds: float) -> bool:
        for codec in self._codecs:
            row = codec.row_key(tenant, kind, key)
            stored = await self._backend.get(*row)
            content = None if stored is None else await _decrypt(codec, row, stored)
            if stored is not None and content is not None:
                # Compare the stored bytes, too, since another process may have replaced the entry since the read.
                ours = await _encrypt(codec, Content(tenant, kind, key, new))
                return content.value == old and await self._backend.replace(*row, stored, ours, seconds, codec.id)
        return False

    async def delete_many(self, tenant: str, kind: str, keys: Sequence[str]) -> None:
        for codec in self._codecs:
            rows = [codec.row_key(tenant, kind, key) for key in keys]
            await self._backend.delete_many(codec.tenant(tenant), codec.kind(kind), [row[2] for row in rows], codec.id)

    async def entries(self, kind: str) -> list[Entry]:
        found: dict[tuple[str, str], Entry] = {}
        for codec in self._codecs:
            stored = await self._backend.entries(codec.kind(kind))
            for entry in await asyncio.to_thread(_readable, codec, stored):
                found.setdefault((entry.tenant, entry.key), entry)
        return [found[name] for name in sorted(found)]

    async def pages(self) -> AsyncIterator[list[Entry]]:
        for codec in self._codecs:
            async for stored in self._backend.pages(codec.id):
                readable = await asyncio.to_thread(_readable, codec, stored)
                self.skipped += len(stored) - len(readable)
                yield readable

    async def remove(self, tenant: str) -> dict[str, int]:
        for codec in self._codecs:
            if counts := await self._backend.remove(codec.tenant(tenant)):
                return {"encrypted": sum(counts.values())}
        return {}

    async def erase(self) -> None:
        await self._backend.erase()

    async def rebuild(self) -> None:
        await self._backend.rebuild()

    async def unknown(self) -> int:
        ours = {codec.id for codec in self._codecs}
        return sum(count for codec, count in (await self._backend.counts()).items() if codec not in ours)

    async def maintain(self) -> None:
        """Run the backend's maintenance, remove unencrypted entries, and re-encrypt those under older keys."""
        await self._backend.maintain()
        changed = False
        while count := await self._backend.remove_codec(""):
            log.warning("store.unencrypted_removed", entries=count)
            STORE_REMOVED.labels(reason="unencrypted").inc(count)
            changed = True
        for codec in self._codecs[1:]:
            while entries := await self._backend.scan(codec.id, BATCH):
                await self._renew(codec, entries)
                changed = True
        if changed:
            await self._backend.maintain()

    async def aclose(self) -> None:
        await self._backend.aclose()

    async def _renew(self, codec: AesGcmCodec, entries: Sequence[Entry]) -> None:
        """Encrypt entries under an older key with the first one, unless a newer entry exists."""
        newest = self._codecs[0]
        for entry in entries:
            content = await _decrypt(codec, (entry.tenant, entry.kind, entry.key), entry.value)
            if content is not None:
                stored = await _encrypt(newest, content)
                renewed = newest.row_key(content.tenant, content.kind, content.key)
                await self._backend.add(*renewed, stored, entry.seconds, newest.id)
            await self._backend.delete_many(entry.tenant, entry.kind, [entry.key], codec.id)


async def _encrypt(codec: AesGcmCodec, content: Content) -> bytes:
    return await _off_loop(len(content.value), partial(codec.encrypt, content))


async def _decrypt(codec: AesGcmCodec, row: RowKey, stored: bytes) -> Content | None:
    return await _off_loop(len(stored), partial(_content, codec, row, stored))


async def _off_loop(size: int, work: Callable[[], T]) -> T:
    """Encrypt or decrypt this many bytes, many of them in a thread."""
    return work() if size <= INLINE_BYTES else await asyncio.to_thread(work)


def _content(codec: AesGcmCodec, row: RowKey, stored: bytes) -> Content | None:
    """Decrypt an entry. Return ``None`` if it's unreadable."""
    try:
        return codec.decrypt(row, stored)
    except Unreadable as error:
        STORE_UNREADABLE.inc()
        log.warning("store.undecryptable", reason=str(error))
        return None


def _values(codec: AesGcmCodec, stored: Mapping[str, tuple[RowKey, bytes]]) -> dict[str, bytes]:
    contents = {key: _content(codec, row, value) for key, (row, value) in stored.items()}
    return {key: content.value for key, content in contents.items() if content is not None}


def _readable(codec: AesGcmCodec, entries: Sequence[Entry]) -> list[Entry]:
    """Return the readable entries under their real names."""
    found = []
    for entry in entries:
        content = _content(codec, (entry.tenant, entry.kind, entry.key), entry.value)
        if content is not None:
            found.append(Entry(content.tenant, content.kind, content.key, content.value, entry.seconds))
    return found


def _derived(key: bytes, purpose: str) -> bytes:
    """Derive a separate key for each purpose."""
    return hmac.new(key, f"compaction-proxy store {purpose}".encode(), hashlib.sha256).digest()


def _bound(row: RowKey) -> bytes:
    return "\n".join(row).encode()
