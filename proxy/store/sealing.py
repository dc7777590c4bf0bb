"""How an entry lies in a store: as it is, or encrypted, under names that tell nothing.

Encrypted means AES-256-GCM. The columns that entries are found by are keyed digests, and the entry's real names are
inside what is encrypted. What is encrypted is bound to its columns: moved to another place it can't be read.
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
"""The columns tenant, kind and key, as they stand in the store."""

_NONCE = 12


class Unreadable(Exception):
    """What is stored is not what was written there."""


class Content(msgspec.Struct, frozen=True, array_like=True):
    """An entry with its real names."""

    tenant: str
    kind: str
    key: str
    value: bytes


class Codec(Protocol):
    """``id`` stands beside each entry, and says how it was written."""

    id: str

    def tenant(self, tenant: str) -> str:
        """The column for a tenant."""
        ...

    def kind(self, kind: str) -> str:
        """The column for a kind."""
        ...

    def place(self, tenant: str, kind: str, key: str) -> RowKey:
        """All three columns."""
        ...

    def write(self, content: Content) -> bytes:
        """What is stored for an entry."""
        ...

    def read(self, place: RowKey, stored: bytes) -> Content:
        """The entry again. Raises ``Unreadable``."""
        ...


class _Cipher(Protocol):
    def encrypt(self, nonce: bytes, data: bytes, associated_data: bytes) -> bytes: ...

    def decrypt(self, nonce: bytes, data: bytes, associated_data: bytes) -> bytes: ...


class Plain:
    """Entries as they are."""

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
    """Entries encrypted with a key of 32 bytes. Not more than 2 to the 32 of them with one key: nonces are random."""

    def __init__(self, key: bytes) -> None:
        # Imported here: most deployments never encrypt, and need no such package.
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
        # As a list, so that no two lists of parts read alike.
        return hmac.new(self._names, ascii(parts).encode(), hashlib.sha256).hexdigest()


def codecs(keys: Sequence[bytes]) -> tuple[Codec, ...]:
    """How entries are written, first, and how older ones may have been. Without keys they are not encrypted."""
    return tuple(map(AesGcmCodec, keys)) or (Plain(),)


def _derived(key: bytes, purpose: str) -> bytes:
    """A key of its own for each purpose."""
    return hmac.new(key, f"compaction-proxy store {purpose}".encode(), hashlib.sha256).digest()


def _bound(place: RowKey) -> bytes:
    return "\n".join(place).encode()
