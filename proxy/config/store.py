"""The section `store`: where summaries and the archive are stored, and their encryption."""

from __future__ import annotations

import base64
import importlib.util
import re
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import platformdirs
from pydantic import AfterValidator, Field, SecretStr, field_validator, model_validator

from proxy.config.fields import Section, Size, wrong

_SQLITE_IN_MEMORY = "sqlite://"
_SQLITE = "sqlite:///"
_STORE_EXAMPLE = "url: sqlite:///path/to/compaction.db"
_REDIS = re.compile(r"rediss?(\+(sentinel|cluster))?://")
_HOST = r"(\[[0-9a-fA-F:.]+\]|[\w.-]+)(:\d{1,5})?"
_SERVER = re.compile(rf"[a-z+]+://([^@/\s]*@)?{_HOST}(/\d{{0,5}})?(\?\S*)?", re.ASCII)
_SENTINELS = re.compile(rf"[a-z+]+://([^@/\s]*@)?{_HOST}(,{_HOST})*/[\w.-]+(/\d{{0,5}})?(\?\S*)?", re.ASCII)
_REDIS_EXAMPLE = "url: rediss://:${REDIS_PASSWORD}@redis.example.com:6379/0"


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

    main: ClassVar[str | None] = "url"

    url: str = Field(default_factory=default_store_url)
    """The database: sqlite:///relative/path, sqlite:////absolute/path, sqlite:// for memory only, or the address of a
    Redis or Valkey server that replicas share (redis:// or rediss://). Default: a file in the user's state folder."""
    max_bytes: Size = 10_000_000_000
    """Maximum size of a file: bytes, or text like 10GB. The entries that expire first go, down to 90 % of it."""
    encryption: EncryptionSettings = EncryptionSettings()
    """Encryption of the store. Default: not encrypted."""

    @field_validator("url")
    @classmethod
    def _is_known(cls, url: str) -> str:
        if _REDIS.match(url):
            return _redis_url(url)
        if url.partition("://")[0] in ("valkey", "valkeys"):
            raise wrong("the scheme for Valkey is redis:// or rediss://", fix=_REDIS_EXAMPLE)
        path = url.removeprefix(_SQLITE)
        if url != _SQLITE_IN_MEMORY and (path == url or path in ("", ":memory:") or path.endswith("/")):
            raise wrong(
                "must be sqlite:///PATH, sqlite:// to keep everything in memory, or redis://HOST:PORT",
                fix=_STORE_EXAMPLE,
            )
        if any(not c.isprintable() for c in path) or "?" in path or "#" in path:
            raise wrong("must not hold ?, # or unprintable characters", fix=_STORE_EXAMPLE)
        return url

    @model_validator(mode="after")
    def _has_a_file_to_limit(self) -> StoreSettings:
        if "max_bytes" in self.model_fields_set and self.kind == "redis":
            raise wrong("limits a file, not a server", "max_bytes", fix="remove it, and set the server's own maxmemory")
        return self

    @property
    def path(self) -> Path | None:
        """Return the path of the file, or ``None`` without a file. A relative path starts in the working directory."""
        return Path(self.url.removeprefix(_SQLITE)) if self.url.startswith(_SQLITE) else None

    @property
    def kind(self) -> Literal["memory", "sqlite", "redis"]:
        if self.path is not None:
            return "sqlite"
        return "memory" if self.url == _SQLITE_IN_MEMORY else "redis"


def _redis_url(url: str) -> str:
    if importlib.util.find_spec("redis") is None:
        raise wrong("needs the package redis", fix="run pip install 'redis[hiredis]>=8.1'")
    if "+sentinel" in url.partition("://")[0]:
        if not _SENTINELS.fullmatch(url):
            raise wrong("must name hosts and a service", fix="url: redis+sentinel://HOST:26379,HOST:26379/SERVICE/0")
    elif not _SERVER.fullmatch(url):
        raise wrong("must have a host, at most a port and the number of a database, and no spaces", fix=_REDIS_EXAMPLE)
    from proxy.store.redis_client import PARAMETERS, check  # only who uses Redis needs its package

    try:
        check(url)
    except ValueError as error:
        raise wrong(str(error), fix=f"use only these parameters: {', '.join(PARAMETERS)}") from None
    return url
