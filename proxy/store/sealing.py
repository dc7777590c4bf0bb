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
from typing import TYPE_CHECKING

import msgspec
import structlog

from proxy.store.interface import Entry, ManagedStore, Names
from proxy.telemetry.metrics import STORE_REMOVED, STORE_UNREADABLE

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    from proxy.store.redis_store import RedisStore
    from proxy.store.sqlite import SqliteStore

    Backend = SqliteStore | RedisStore

log = structlog.get_logger(__name__)

INLINE_BYTES = 65_536  # values of more bytes are encrypted and decrypted in a thread

_NONCE = 12


class Unreadable(Exception):
    """The stored bytes aren't the bytes that the proxy wrote under these names."""


Content = tuple[str, str, str, bytes]  # the real names of an entry, and its value


class AesGcmCodec:
    """Encrypts with a 32-byte key. Nonces are random, so use a key for up to 2^32 entries."""

    def __init__(self, key: bytes) -> None:
        # Import here, because most deployments don't encrypt and don't need the package.
        aead = importlib.import_module("cryptography.hazmat.primitives.ciphers.aead")
        self._invalid: type[Exception] = importlib.import_module("cryptography.exceptions").InvalidTag
        self.id = _derived(key, "id").hex()[:16]
        self._names = _derived(key, "names")
        self._cipher: AESGCM = aead.AESGCM(_derived(key, "content"))

    def name(self, *parts: str) -> str:
        """Return a digest in place of a name, whose parts begin with its kind, such as ``tenant``."""
        # Digest the parts as a list, so that different parts never produce the same input.
        return hmac.new(self._names, ascii(parts).encode(), hashlib.sha256).hexdigest()

    def row(self, tenant: str, kind: str, key: str) -> Names:
        return self.name("tenant", tenant), self.name("kind", kind), self.name("key", tenant, kind, key)

    def seal(self, row: Names, value: bytes, nonce: bytes = b"") -> bytes:
        nonce = nonce or os.urandom(_NONCE)
        return nonce + self._cipher.encrypt(nonce, value, _bound(row))

    def open(self, row: Names, stored: bytes) -> bytes:
        """Return the decrypted value of a row. Raises ``Unreadable``."""
        try:
            return self._cipher.decrypt(stored[:_NONCE], stored[_NONCE:], _bound(row))
        except (self._invalid, ValueError) as error:
            raise Unreadable(type(error).__name__) from None

    def encrypt(self, entries: Sequence[Entry]) -> list[Entry]:
        """Return the entries to store, with their names in the backend."""
        # One call, because each one waits for the interpreter lock.
        nonces = os.urandom(_NONCE * len(entries))
        sealed = []
        for place, entry in enumerate(entries):
            row = self.row(*entry.names)
            content: Content = (*entry.names, entry.value)
            nonce = nonces[_NONCE * place : _NONCE * (place + 1)]
            sealed.append(Entry(*row, self.seal(row, msgspec.msgpack.encode(content), nonce), entry.seconds))
        return sealed

    def decrypt(self, stored: Entry) -> Entry:
        """Return the entry under its real names. Raises ``Unreadable``."""
        try:
            content: Content = msgspec.msgpack.decode(self.open(stored.names, stored.value), type=Content)
        except (ValueError, msgspec.DecodeError) as error:
            raise Unreadable(type(error).__name__) from None
        return Entry(*content, stored.seconds)

    def readable(self, stored: Sequence[Entry]) -> list[Entry]:
        """Return the readable entries under their real names. Count and log the others."""
        found = []
        for entry in stored:
            try:
                found.append(self.decrypt(entry))
            except Unreadable as error:
                STORE_UNREADABLE.inc()
                log.warning("store.undecryptable", reason=str(error))
        return found


class SealedStore(ManagedStore):
    """A store that encrypts the entries of a backend."""

    def __init__(self, backend: Backend, keys: Sequence[bytes]) -> None:
        """Encrypt with the first of the ``keys``, 32 bytes each, and decrypt with all of them."""
        self._backend = backend
        self._codecs = [AesGcmCodec(key) for key in keys]
        self.codecs = frozenset(codec.id for codec in self._codecs)

    async def get_many(self, tenant: str, kind: str, keys: Sequence[str]) -> dict[str, bytes]:
        return await self._get_many(self._codecs, tenant, kind, keys)

    async def _get_many(
        self, codecs: Sequence[AesGcmCodec], tenant: str, kind: str, keys: Sequence[str]
    ) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for codec in codecs:
            rows = [codec.row(tenant, kind, key) for key in keys if key not in found]
            if not rows:
                break
            values = await self._backend.get_many(*rows[0][:2], [row[2] for row in rows])
            stored = [Entry(*row, values[row[2]], 0.0) for row in rows if row[2] in values]
            found |= {entry.key: entry.value for entry in await _off_loop(codec.readable, stored)}
        return found

    async def put_many(self, entries: Sequence[Entry]) -> None:
        codec = self._codecs[0]
        await self._backend.put_many(await _off_loop(codec.encrypt, entries), codec.id)

    async def add(self, tenant: str, kind: str, key: str, value: bytes, seconds: float) -> bytes:
        newest, *older = self._codecs
        found = await self._get_many(older, tenant, kind, [key])
        if key in found:
            return found[key]
        (ours,) = await _off_loop(newest.encrypt, [Entry(tenant, kind, key, value, seconds)])
        while (stored := await self._backend.add(*ours.names, ours.value, seconds, newest.id)) != ours.value:
            if theirs := await _off_loop(newest.readable, [ours._replace(value=stored)]):
                return theirs[0].value
            # Damaged. Of several processes, one replaces it and the others use the new entry.
            await self._backend.replace(*ours.names, stored, ours.value, seconds, newest.id)
        return value

    async def replace(self, tenant: str, kind: str, key: str, old: bytes, new: bytes, seconds: float) -> bool:
        for codec in self._codecs:
            (ours,) = await _off_loop(codec.encrypt, [Entry(tenant, kind, key, new, seconds)])
            stored = await self._backend.get(*ours.names)
            if stored is not None and (theirs := await _off_loop(codec.readable, [ours._replace(value=stored)])):
                # Compare the stored bytes, too, since another process may have replaced the entry since the read.
                return theirs[0].value == old and await self._backend.replace(
                    *ours.names, stored, ours.value, seconds, codec.id
                )
        return False

    async def entries(self, kind: str) -> list[Entry]:
        found: dict[Names, Entry] = {}
        for codec in self._codecs:
            stored = await self._backend.entries(codec.name("kind", kind))
            for entry in await _off_loop(codec.readable, stored):
                found.setdefault(entry.names, entry)
        return [found[names] for names in sorted(found)]

    async def pages(self) -> AsyncIterator[list[Entry]]:
        for codec in self._codecs:
            async for stored in self._backend.pages(codec.id):
                readable = await _off_loop(codec.readable, stored)
                self.skipped += len(stored) - len(readable)
                yield readable

    async def remove(self, tenant: str) -> dict[str, int]:
        for codec in self._codecs:
            if counts := await self._backend.remove(codec.name("tenant", tenant)):
                return {"encrypted": sum(counts.values())}
        return {}

    async def erase(self) -> None:
        await self._backend.erase()

    async def rebuild(self) -> None:
        await self._backend.rebuild()

    async def counts(self) -> Mapping[str, int]:
        return await self._backend.counts()

    async def maintain(self) -> None:
        """Run the backend's maintenance, remove unencrypted entries, and re-encrypt those under older keys."""
        await self._backend.maintain()
        changed = False
        while count := await self._backend.remove_codec(""):
            log.warning("store.unencrypted_removed", entries=count)
            STORE_REMOVED.labels(reason="unencrypted").inc(count)
            changed = True
        counts = await self._backend.counts()
        for codec in self._codecs[1:]:
            if counts[codec.id]:
                async for entries in self._backend.pages(codec.id):
                    await self._renew(codec, entries)
                changed = True
        if changed:
            await self._backend.maintain()

    async def aclose(self) -> None:
        await self._backend.aclose()

    async def _renew(self, codec: AesGcmCodec, entries: Sequence[Entry]) -> None:
        """Encrypt entries under an older key with the first one, unless newer entries exist."""
        newest = self._codecs[0]
        for entry in await _off_loop(newest.encrypt, await _off_loop(codec.readable, entries)):
            await self._backend.add(*entry.names, entry.value, entry.seconds, newest.id)
        for entry in entries:
            await self._backend.replace(*entry.names, entry.value, b"", 0, codec.id)


async def _off_loop(work: Callable[[Sequence[Entry]], list[Entry]], entries: Sequence[Entry]) -> list[Entry]:
    """Encrypt or decrypt entries, many bytes in a thread."""
    inline = sum(len(entry.value) for entry in entries) <= INLINE_BYTES
    return work(entries) if inline else await asyncio.to_thread(work, entries)


def _derived(key: bytes, purpose: str) -> bytes:
    return hmac.new(key, f"compaction-proxy store {purpose}".encode(), hashlib.sha256).digest()


def _bound(row: Names) -> bytes:
    return "\n".join(row).encode()
