"""The section `store`: where summaries and the archive are stored, and their encryption."""

from __future__ import annotations

import base64
import importlib.util
from pathlib import Path
from typing import Annotated

import platformdirs
from pydantic import AfterValidator, Field, SecretStr, field_validator, model_validator

from proxy.config.fields import Section, Size, wrong

_SQLITE_IN_MEMORY = "sqlite://"
_SQLITE = "sqlite:///"
_STORE_EXAMPLE = "url: sqlite:///path/to/compaction.db"


def default_store_url() -> str:
    """Return the URL of a file in the user's state folder."""
    return f"{_SQLITE}{platformdirs.user_state_path('compaction-proxy') / 'compaction.db'}"


_STORE_KEY_BYTES = 32


def _key_bytes(text: str) -> bytes | None:
    """Return 32 bytes from hexadecimal or base64 text, or ``None`` if the text isn't such a key."""
    try:
        if len(text) == 2 * _STORE_KEY_BYTES:
            return bytes.fromhex(text)
        plain = text.replace("-", "+").replace("_", "/").rstrip("=")
        key = base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except ValueError:
        return None
    return key if len(key) == _STORE_KEY_BYTES else None


def _store_key(value: SecretStr) -> SecretStr:
    if _key_bytes(value.get_secret_value()) is None:
        raise wrong(
            "must be a key of 32 bytes, in base64 or as 64 hex digits", fix="set the output of: openssl rand -base64 32"
        )
    if importlib.util.find_spec("cryptography") is None:
        raise wrong("needs the package cryptography", fix="run pip install cryptography, or remove the setting")
    return value


StoreKey = Annotated[SecretStr, AfterValidator(_store_key)]
"""A key of 32 bytes. The proxy never prints it."""


class EncryptionSettings(Section):
    """Encryption of the store. Default: not encrypted."""

    key: StoreKey | None = None
    """The key: 32 bytes in base64 or hexadecimal (openssl rand -base64 32). Default: not encrypted."""
    old_keys: tuple[StoreKey, ...] = ()
    """Former keys. They still decrypt entries, which the proxy encrypts again with `key`."""

    @model_validator(mode="after")
    def _has_a_key(self) -> EncryptionSettings:
        if self.old_keys and self.key is None:
            raise wrong("needs store.encryption.key", "old_keys", fix='key: "${COMPACTION_STORE_KEY}"')
        return self

    @property
    def keys(self) -> tuple[bytes, ...]:
        """Return the current key, then the former ones. Empty if the store isn't encrypted."""
        stated = (*([self.key] if self.key is not None else []), *self.old_keys)
        return tuple(filter(None, (_key_bytes(key.get_secret_value()) for key in stated)))


class StoreSettings(Section):
    """Where to store summaries and the archive."""

    url: str = Field(default_factory=default_store_url)
    """The database: sqlite:///relative/path, sqlite:////absolute/path, or sqlite:// for memory only. Default: a file in
    the user's state folder."""
    max_bytes: Size = 10_000_000_000
    """Maximum size of the file: bytes, or text like 10GB. The proxy removes the entries that expire first."""
    encryption: EncryptionSettings = EncryptionSettings()
    """Encryption of the store. Default: not encrypted."""

    @field_validator("url")
    @classmethod
    def _is_sqlite(cls, url: str) -> str:
        if url.partition("://")[0] in ("redis", "rediss", "valkey", "valkeys", "unix"):
            raise wrong("Redis isn't supported", fix=_STORE_EXAMPLE)
        path = url.removeprefix(_SQLITE)
        if url != _SQLITE_IN_MEMORY and (path == url or path in ("", ":memory:") or path.endswith("/")):
            raise wrong("must be sqlite:///PATH, or sqlite:// to keep everything in memory", fix=_STORE_EXAMPLE)
        if any(not c.isprintable() for c in path) or "?" in path or "#" in path:
            raise wrong("must not hold ?, # or unprintable characters", fix=_STORE_EXAMPLE)
        return url

    @property
    def path(self) -> Path | None:
        """Return the path of the file, or ``None`` for memory only. A relative path starts in the working directory."""
        return None if self.url == _SQLITE_IN_MEMORY else Path(self.url.removeprefix(_SQLITE))
