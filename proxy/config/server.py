"""The sections of the process: `server`, `log`, `records`, `metrics`, `otel`, and `store`."""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

import platformdirs
from pydantic import AfterValidator, Field, PlainValidator, SecretStr, WithJsonSchema, field_validator, model_validator

from proxy.config.fields import (
    Count,
    CountOrZero,
    Days,
    Grace,
    HostName,
    Origin,
    Port,
    Seconds,
    Section,
    Size,
    Text,
    quoted,
    wrong,
)
from proxy.config.upstreams import RESERVED_HEADERS, Secret, checked_header_names, checked_url

_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?")


def _host(host: str) -> str:
    if _HOST_NAME.fullmatch(host):
        return host
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return host
    try:
        parts = urlsplit(host if "://" in host else f"//{host}")
        name, port = parts.hostname or "", parts.port
    except ValueError:
        name, port = "", None
    fix = f"host: {quoted(name) if ':' in name else name}" if name else "host: 127.0.0.1"
    raise wrong(
        "must be an address or name without a port",
        fix=f"{fix}{'' if port is None else f', and on its own line port: {port}'}",
        example="host: 127.0.0.1",
    )


_PREFIX = re.compile(r"(?:/(?:\*|[A-Za-z0-9._~-]+))+")


def _prefix(path: str) -> str:
    if _PREFIX.fullmatch(path) and not any(name in (".", "..") for name in path.split("/")):
        return path
    raise wrong("must be a path without a slash at its end; * stands for one name", fix="prefixes: [/gateway/*]")


Prefix = Annotated[Text, AfterValidator(_prefix)]  # the beginning of a path, as in `/gateway/*`
Host = Annotated[Text, AfterValidator(_host)]  # an IP address or a host name, without a port


class ServerSettings(Section):
    """Where to listen, and limits on requests."""

    main: ClassVar[str | None] = "port"

    host: Host = "127.0.0.1"
    """The address to listen on; 0.0.0.0 for all addresses. `--host` overrides it."""
    port: Port = 8787
    """The port to listen on; 0 for any free port. `--port` overrides it."""
    body_limit: Size = 64_000_000
    """Maximum size of a conversation's body, also after decompression: bytes, or text like 64MB or 64MiB."""
    deadline: Seconds = 600
    """Seconds until a response must start, all attempts and summaries together. Also limits background summaries."""
    drain: Grace = 30
    """Seconds that open responses have to finish after a signal to stop."""
    keepalive: Seconds = 10
    """Seconds of silence in a stream while the proxy makes a summary. Then it sends heartbeat comments."""
    max_concurrent: Count = 1_000
    """Maximum concurrent requests. A stream counts until it ends. Health checks and metrics don't count."""
    max_queue: CountOrZero = 100
    """Maximum requests that wait for a free slot. Further ones get 503, before the proxy reads their body."""
    queue_timeout: Seconds = 5
    """Seconds that a request waits for a slot, or for memory for its body. Then it gets 503."""
    max_body_memory: Size | None = None
    """Maximum bytes of all request bodies together, at least twice body_limit. Default: 1GB, or twice body_limit if
    that is more."""
    cache_memory: Size = 256_000_000
    """Bytes that the caches of counts, items, and summaries in a process may take; at least 16MB."""
    cors_origins: tuple[Origin, ...] = ()
    """Origins of web pages that may call the proxy from a browser, like https://app.example; * for all origins."""
    hosts: tuple[HostName, ...] = ()
    """Additional host names to accept in the Host header. localhost and 127.0.0.1 are always accepted."""
    prefixes: tuple[Prefix, ...] = ()
    """Paths below which the proxy serves the same endpoints, like /api/llm; * stands for one name."""

    @property
    def body_memory(self) -> int:
        return self.max_body_memory or max(1_000_000_000, 2 * self.body_limit)


Level = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "json", "text"]
LoggedRequests = Literal["notable", "all", "none"]


class LogSettings(Section):
    """Log lines: names and figures, no content."""

    level: Level = "info"
    """The lowest level to log. Libraries never log below info, because their debug lines quote requests."""
    format: LogFormat = "auto"
    """json: one object per line. text: readable lines. auto: json unless standard error is a terminal."""
    requests: LoggedRequests = "notable"
    """Which requests get a line when they finish. notable: those that failed, or that the proxy changed, retried, or
    delayed."""


class RecordSettings(Section):
    """Records of requests: names and figures, no content."""

    days: Days = 7
    """Days to keep records, at most 36,500."""
    max: Count = 100_000
    """Maximum number of records. The proxy removes the oldest ones over that."""


_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_][A-Za-z0-9._-]*):([1-9][0-9]{0,4})")
_MOST_PORT = 65_535


def _address(value: object) -> str:
    match = _ADDRESS.fullmatch(value) if isinstance(value, str) else None
    if match is None or int(match[2]) > _MOST_PORT:
        raise wrong("must be an address and a port", fix="SETTING: 127.0.0.1:9090")
    return match[0]


Address = Annotated[
    str, PlainValidator(_address), WithJsonSchema({"type": "string", "pattern": f"^{_ADDRESS.pattern}$"})
]
"""A host name or IP address, and a port."""


class MetricsSettings(Section):
    """Where to serve the metrics."""

    listen: Address | None = None
    """The address and port of /metrics, as in 127.0.0.1:9090. Default: /metrics on the server's own port."""

    @property
    def address(self) -> tuple[str, int] | None:
        if self.listen is None:
            return None
        host, _, port = self.listen.rpartition(":")
        return host.strip("[]"), int(port)


PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
INSTALL = "pip install 'opentelemetry-exporter-otlp-proto-http>=1.45,<1.46'"
"""The command that installs the packages of the extra `otel`. The exporter needs the SDK of its own version."""

_EXAMPLE = "endpoint: http://127.0.0.1:4318"
_SIGNAL_PATH = re.compile(r"(/v1/(?:traces|metrics|logs))/*$")


class OtelSettings(Section):
    """Where to send spans with OpenTelemetry."""

    endpoint: str | None = None
    """The URL of an OTLP collector over HTTP, before /v1/traces. Default: OTEL_EXPORTER_OTLP_ENDPOINT, or
    http://localhost:4318."""
    headers: Mapping[str, Secret] = Field(default_factory=dict)
    """Headers for the collector, such as its key."""

    @field_validator("endpoint")
    @classmethod
    def _is_base_url(cls, url: str | None) -> str | None:
        if url is None:
            return None
        key = 'headers: {authorization: "${OTLP_KEY}"}'
        return checked_url(url, _SIGNAL_PATH, example=_EXAMPLE, key=key, query=_EXAMPLE)

    @field_validator("headers", mode="before")
    @classmethod
    def _has_header_names(cls, headers: object) -> object:
        return checked_header_names(headers, RESERVED_HEADERS)

    @model_validator(mode="after")
    def _can_export(self) -> OtelSettings:
        if not has_packages():
            raise wrong("needs packages that aren't installed", fix=f"run {INSTALL}, or write otel: null", shows=False)
        return self


def has_packages() -> bool:
    try:
        return all(importlib.util.find_spec(name) is not None for name in PACKAGES)
    except ModuleNotFoundError:  # a package above one of them is missing
        return False


_SQLITE_IN_MEMORY = "sqlite://"
_SQLITE = "sqlite:///"
_STORE_EXAMPLE = "url: sqlite:///path/to/compaction.db"
_REDIS = re.compile(r"rediss?(\+(sentinel|cluster))?://")
_HOST = r"(\[[0-9a-fA-F:.]+\]|[\w.-]+)(:\d{1,5})?"
_SERVER = re.compile(rf"[a-z+]+://([^@/\s]*@)?{_HOST}(/\d{{0,5}})?(\?\S*)?", re.ASCII)
_SENTINELS = re.compile(rf"[a-z+]+://([^@/\s]*@)?{_HOST}(,{_HOST})*/[\w.-]+(/\d{{0,5}})?(\?\S*)?", re.ASCII)
_REDIS_EXAMPLE = "url: rediss://:${REDIS_PASSWORD}@redis.example.com:6379/0"


def default_store_url() -> str:
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


StoreKey = Annotated[SecretStr, AfterValidator(_store_key)]  # A key of 32 bytes. The proxy never prints it.


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
