"""Codecs for stored entries: plain, or encrypted with AES-256-GCM.

For encrypted entries the lookup columns are keyed digests, and the encrypted content includes the real names. The
content is bound to its columns, so it is unreadable in another row.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib
import os
from collections.abc import Sequence
from typing import Protocol

import msgspec

RowKey = tuple[str, str, str]
"""The tenant, kind, and key columns, as stored."""

_NONCE = 12


class Unreadable(Exception):
    """The stored bytes aren't the bytes that the proxy wrote for this row."""


class Content(msgspec.Struct, frozen=True, array_like=True):
    """An entry with its real names."""

    tenant: str
    kind: str
    key: str
    value: bytes


class Codec(Protocol):
    """Encode entries. Each row stores the ``id`` of its codec."""

    id: str

    def tenant(self, tenant: str) -> str:
        """Return the column for a tenant."""
        ...

    def kind(self, kind: str) -> str:
        """Return the column for a kind."""
        ...

    def place(self, tenant: str, kind: str, key: str) -> RowKey:
        """Return all three columns."""
        ...

    def write(self, content: Content) -> bytes:
        """Return the bytes to store for an entry."""
        ...

    def read(self, place: RowKey, stored: bytes) -> Content:
        """Return the entry. Raises ``Unreadable``."""
        ...


class _Cipher(Protocol):
    def encrypt(self, nonce: bytes, data: bytes, associated_data: bytes) -> bytes: ...

    def decrypt(self, nonce: bytes, data: bytes, associated_data: bytes) -> bytes: ...


class Plain:
    """A codec that doesn't encrypt."""

    id = ""

    def tenant(self, tenant: str) -> str:
        """See ``Codec``."""
        return tenant

    def kind(self, kind: str) -> str:
        """See ``Codec``."""
        return kind

    def place(self, tenant: str, kind: str, key: str) -> RowKey:
        """See ``Codec``."""
        return tenant, kind, key

    def write(self, content: Content) -> bytes:
        """See ``Codec``."""
        return content.value

    def read(self, place: RowKey, stored: bytes) -> Content:
        """See ``Codec``."""
        return Content(*place, stored)


class AesGcmCodec:
    """A codec that encrypts with a 32-byte key. Nonces are random, so use a key for up to 2^32 entries."""

    def __init__(self, key: bytes) -> None:
        # Import here, because most deployments don't encrypt and don't need the package.
        aead = importlib.import_module("cryptography.hazmat.primitives.ciphers.aead")
        self._wrong: type[Exception] = importlib.import_module("cryptography.exceptions").InvalidTag
        self.id = _derived(key, "id").hex()[:16]
        self._names = _derived(key, "names")
        self._cipher: _Cipher = aead.AESGCM(_derived(key, "content"))

    def tenant(self, tenant: str) -> str:
        """See ``Codec``."""
        return self._name("tenant", tenant)

    def kind(self, kind: str) -> str:
        """See ``Codec``."""
        return self._name("kind", kind)

    def place(self, tenant: str, kind: str, key: str) -> RowKey:
        """See ``Codec``."""
        return self.tenant(tenant), self.kind(kind), self._name("key", tenant, kind, key)

    def write(self, content: Content) -> bytes:
        """See ``Codec``."""
        place = self.place(content.tenant, content.kind, content.key)
        nonce = os.urandom(_NONCE)
        return nonce + self._cipher.encrypt(nonce, msgspec.msgpack.encode(content), _bound(place))

    def read(self, place: RowKey, stored: bytes) -> Content:
        """See ``Codec``."""
        try:
            opened = self._cipher.decrypt(stored[:_NONCE], stored[_NONCE:], _bound(place))
            content = msgspec.msgpack.decode(opened, type=Content)
        except (self._wrong, ValueError, msgspec.DecodeError) as error:
            raise Unreadable(type(error).__name__) from None
        return content

    def _name(self, *parts: str) -> str:
        # Digest the parts as a list, so that different parts never produce the same input.
        return hmac.new(self._names, ascii(parts).encode(), hashlib.sha256).hexdigest()


def codecs(keys: Sequence[bytes]) -> tuple[Codec, ...]:
    """Return the codec for new entries, then those for older ones. Without keys, entries aren't encrypted."""
    return tuple(map(AesGcmCodec, keys)) or (Plain(),)


def _derived(key: bytes, purpose: str) -> bytes:
    """Derive a separate key for each purpose."""
    return hmac.new(key, f"compaction-proxy store {purpose}".encode(), hashlib.sha256).digest()


def _bound(place: RowKey) -> bytes:
    return "\n".join(place).encode()
