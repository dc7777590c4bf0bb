"""The settings: what a configuration may say, and what it means once it is checked."""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import ipaddress
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import platformdirs
from pydantic import (
    AfterValidator,
    Field,
    GetJsonSchemaHandler,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema

from proxy.config.faults import near
from proxy.config.fields import (
    Count,
    CountOrZero,
    Date,
    Grace,
    HostName,
    Name,
    Origin,
    Port,
    Seconds,
    Section,
    Size,
    Text,
    wrong,
)
from proxy.config.policy import Policy, WrittenPolicy
from proxy.config.suggestions import quoted
from proxy.http.headers import CREDENTIALS

__all__ = [
    "AuthSettings",
    "EncryptionSettings",
    "KeySettings",
    "LimitSettings",
    "Policy",
    "ProfileSettings",
    "Route",
    "RouteSettings",
    "ServerSettings",
    "Settings",
    "StoreSettings",
    "TeamSettings",
    "UpstreamSettings",
    "WrittenSettings",
]


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


Host = Annotated[Text, AfterValidator(_host)]
"""An IP address or a host name, without a port."""


class ServerSettings(Section):
    """Where to listen, and how much to take."""

    host: Host = "127.0.0.1"
    """The address to listen on; 0.0.0.0 for all of them."""
    port: Port = 8787
    """The port; 0 for any free one."""
    body_limit: Size = 64_000_000
    """The largest request body, in bytes or as text such as 64MB; also after decompression."""
    deadline: Seconds = 600
    """Seconds for a request until its answer begins, all attempts together."""
    drain: Grace = 30
    """Seconds that open answers have to end after a signal to stop."""
    keepalive: Seconds = 10
    """Seconds that a streaming client hears nothing while a summary is made; then comments keep it connected."""
    max_concurrent: Count = 1_000
    """Requests in work at the same time, streams until their end. Health and metrics don't count."""
    max_queue: CountOrZero = 100
    """Requests that may wait for one of those places; further ones are answered with 503 at once."""
    queue_timeout: Seconds = 5
    """Seconds that a request waits for a place, or for memory for its body; then it is answered with 503."""
    max_body_memory: Size | None = None
    """Bytes that the bodies of all requests in work may take together; twice body_limit at least. Left out: 1GB, or
    twice body_limit where that is more."""
    cors_origins: tuple[Origin, ...] = ()
    """Origins of web pages that may call the proxy from a browser, such as https://app.example; * for all of them."""
    hosts: tuple[HostName, ...] = ()
    """Further host names that callers may use in the Host header. localhost and 127.0.0.1 are always served."""

    @property
    def body_memory(self) -> int:
        """Bytes for all bodies."""
        return self.max_body_memory or max(1_000_000_000, 2 * self.body_limit)


_SQLITE_IN_MEMORY = "sqlite://"
_SQLITE = "sqlite:///"
_STORE_EXAMPLE = "url: sqlite:///path/to/compaction.db"


def default_store_url() -> str:
    """A file in the user's state folder."""
    return f"{_SQLITE}{platformdirs.user_state_path('compaction-proxy') / 'compaction.db'}"


_STORE_KEY_BYTES = 32


def _key_bytes(text: str) -> bytes | None:
    """The 32 bytes that a text spells in hexadecimal or base64; ``None`` if it spells no such thing."""
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
"""A key of 32 bytes that is never shown."""


class EncryptionSettings(Section):
    """What the store is encrypted with. Left out: it is not."""

    key: StoreKey | None = None
    """32 bytes in base64 or hexadecimal (openssl rand -base64 32). Left out: the store is not encrypted."""
    old_keys: tuple[StoreKey, ...] = ()
    """Former keys: they still decrypt, and what they encrypted is written anew with `key`."""

    @model_validator(mode="after")
    def _has_a_key(self) -> EncryptionSettings:
        if self.old_keys and self.key is None:
            raise wrong("needs store.encryption.key", "old_keys", fix='key: "${COMPACTION_STORE_KEY}"')
        return self

    @property
    def keys(self) -> tuple[bytes, ...]:
        """The key that encrypts, then the former ones; empty where nothing is encrypted."""
        stated = (*([self.key] if self.key is not None else []), *self.old_keys)
        return tuple(filter(None, (_key_bytes(key.get_secret_value()) for key in stated)))


class StoreSettings(Section):
    """Where summaries and the archive are kept."""

    url: str = Field(default_factory=default_store_url)
    """sqlite:///relative/path, sqlite:////absolute/path, or sqlite:// for memory only. Left out: a file in the user's
    state folder."""
    max_bytes: Size = 10_000_000_000
    """The size that the file is kept to, in bytes or as text such as 10GB. What expires first goes first."""
    encryption: EncryptionSettings = EncryptionSettings()
    """What the store is encrypted with. Left out: it is not."""

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
        """The file, relative to the working directory unless absolute; ``None`` for memory only."""
        return None if self.url == _SQLITE_IN_MEMORY else Path(self.url.removeprefix(_SQLITE))


class AuthSettings(Section):
    """Who may call."""

    mode: Literal["open", "keys"] = "open"
    """open: anybody, with their own key, which is passed on. keys: only callers with a key listed under a team."""
    keyless: Literal["shared", "separate"] | None = None
    """Callers without any key, in open mode. shared: they are one caller; separate: nothing of theirs is stored, and
    digests take the place of summaries. Left out: shared where the server listens on loopback alone."""


_KNOWN_BASE_URLS = {"openai": "https://api.openai.com/v1", "anthropic": "https://api.anthropic.com/v1"}
# Their credentials come from the machine's own environment; a key would be the exception.
_OWN_CREDENTIALS = frozenset(
    {"bedrock", "bedrock_converse", "sagemaker", "sagemaker_chat", "vertex_ai", "vertex_ai_beta"}
)
_ADDRESS_EXAMPLE = "base_url: https://api.openai.com/v1"
_API_PATH = re.compile(r"(/(?:chat/completions|completions|responses|embeddings|models|messages))/*$")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_AS_KEY = 'api_key: "${OPENAI_API_KEY}"'
_RESERVED_HEADERS = {
    "authorization": _AS_KEY,
    "api-key": _AS_KEY,
    **dict.fromkeys(
        ("host", "content-length", "content-type", "content-encoding", "transfer-encoding", "connection", "te"),
        "remove it. The proxy sets it for each request",
    ),
}


def _header_value(value: SecretStr) -> SecretStr:
    secret = value.get_secret_value()
    if not secret:
        raise wrong("is empty", fix="set the variable it comes from, or remove the line")
    if not secret.isascii() or not secret.isprintable() or secret != secret.strip():
        raise wrong(
            "has outer spaces, line breaks or other characters that a header can't hold", fix="correct the value"
        )
    return value


Secret = Annotated[SecretStr, AfterValidator(_header_value)]
"""Text that is sent in a header and never shown."""


class UpstreamSettings(Section):
    """A service that answers."""

    provider: Text = "openai"
    """The provider, as LiteLLM names it."""
    base_url: str | None = None
    """The address up to, not including, /chat/completions. Left out: the provider's own, as LiteLLM knows it."""
    api_key: Secret | None = None
    """The key. Left out: the caller's own is passed on."""
    lane: Literal["auto", "relay", "translate"] = "auto"
    """relay: the bytes go as they are; translate: by way of LiteLLM; auto: relay wherever the provider allows."""
    api_version: Text | None = None
    """The `api-version` of Azure."""
    headers: Mapping[str, Secret] = Field(default_factory=dict)
    """Headers added to each request."""
    ask_limits: bool = True
    """Whether the upstream is asked for its models' limits, now and then and in the background."""

    @field_validator("base_url")
    @classmethod
    def _is_plain_address(cls, url: str | None, info: ValidationInfo) -> str | None:
        if url is None:
            # Set here because OPENAI_BASE_URL and ANTHROPIC_BASE_URL may point clients at this very proxy.
            return _KNOWN_BASE_URLS.get(info.data.get("provider", ""))
        return _checked_address(url)

    @field_validator("headers", mode="before")
    @classmethod
    def _has_header_names(cls, headers: object) -> object:
        seen = set()
        for name in headers if isinstance(headers, Mapping) else ():
            lower = str(name).lower()
            if not _HEADER_NAME.fullmatch(lower):
                raise wrong("isn't a header name", name, fix="use letters, digits and -", shows=False)
            if lower in _RESERVED_HEADERS:
                raise wrong("can't be set here", name, fix=_RESERVED_HEADERS[lower], shows=False)
            if lower in seen:
                raise wrong("is a duplicate; case doesn't matter", name, fix="keep one of them", shows=False)
            seen.add(lower)
        return headers

    @property
    def has_credential(self) -> bool:
        """Whether requests are authorised without the caller's key."""
        return self.api_key is not None or self.provider in _OWN_CREDENTIALS

    @property
    def spends(self) -> bool:
        """Whether requests carry a credential of the operator, in a configured header or otherwise."""
        return self.has_credential or any(name.lower() in CREDENTIALS for name in self.headers)


def _checked_address(url: str) -> str:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname or not url.isprintable() or " " in url:
        raise wrong("must be an http or https URL", fix=_ADDRESS_EXAMPLE)
    if parts.username is not None or parts.password is not None:
        raise wrong("must not hold a user name or password", fix=_AS_KEY)
    if "?" in url or "#" in url:
        raise wrong(
            "must not hold a query or fragment", fix=f'{_ADDRESS_EXAMPLE}. For Azure, add api_version: "2024-10-21"'
        )
    if (path := _API_PATH.search(url)) is not None:
        raise wrong(f"must end before {path[1]}, which the proxy appends", fix=f"{_ADDRESS_EXAMPLE}, without {path[1]}")
    return url.rstrip("/")


class ProfileSettings(Section):
    """What is known of a model, where the built-in tables are wrong or silent. Limits are in tokens."""

    context_window: Count | None = None
    """Input and output together."""
    max_input_tokens: Count | None = None
    """The input alone."""
    max_output_tokens: Count | None = None
    """The output alone."""
    max_bytes: Size | None = None
    """What the upstream takes as the body of a request, in bytes or as text such as 32MB."""
    max_messages: Count | None = None
    """How many messages it takes in a request."""
    # The encodings that can be had without a download.
    tokenizer: Literal["o200k_base", "o200k_harmony", "cl100k_base", "p50k_base", "p50k_edit"] | None = None
    """The tokenizer, or the one that comes nearest."""
    images: Text | None = None
    """The rule by which images are counted."""
    strict_alternation: bool | None = None
    """Whether the upstream wants the user and the assistant to speak in turn, the user first."""

    @field_validator("images")
    @classmethod
    def _is_a_rule(cls, images: str | None) -> str | None:
        # Imported here: few configurations name a rule, and counting brings the tokenizer with it.
        from proxy.tokens.images import RULES

        if images is not None and images not in RULES:
            raise wrong("isn't a rule for images", fix=near(images, RULES))
        return images

    @model_validator(mode="after")
    def _parts_fit_the_whole(self) -> ProfileSettings:
        window = self.context_window
        for name in ("max_input_tokens", "max_output_tokens"):
            part = getattr(self, name)
            if window is not None and part is not None and part > window:
                raise wrong(f"must be at most context_window, {window}", name, fix=f"{name}: {window}")
        return self


class RouteSettings(Section):
    """Which models go where. The first match wins."""

    match: Text
    """The model a request names; *, ? and [seq] as in file names; case matters."""
    upstream: Name
    """The name of the upstream."""
    model: Text | None = None
    """The name the upstream knows. Left out: as requested."""
    profile: ProfileSettings | None = None
    """The model's limits. Left out: from the built-in tables, or as the upstream tells."""


_KEY_HASH = re.compile(r"sha256:[0-9a-f]{64}")


def _key_hash(value: str) -> str:
    if not _KEY_HASH.fullmatch(value.lower()):
        raise wrong(
            "must be the hash of a key, sha256: and 64 hex digits, not the key",
            fix='hash the key with: printf %s "$KEY" | sha256sum',
        )
    return value.lower()


KeyHash = Annotated[str, AfterValidator(_key_hash), Field(json_schema_extra={"pattern": "^sha256:[0-9a-fA-F]{64}$"})]
"""The SHA-256 of a key."""


class KeySettings(Section):
    """A key of a team, known by its hash. The hash alone may stand in its place."""

    hash: KeyHash
    """The SHA-256 of the key: `printf %s "$KEY" | sha256sum`, or as `keys new` prints it."""
    expires: Date | None = None
    """The day from whose beginning (UTC) the key is refused. Left out: never."""
    name: Text | None = None
    """What the key is for; for whoever reads the file."""

    @model_validator(mode="before")
    @classmethod
    def _hash_alone(cls, value: object) -> object:
        return {"hash": value} if isinstance(value, str) else value

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        section = handler.resolve_ref_schema(handler(schema))
        described = {"title": section.pop("title"), "description": section.pop("description")}
        return {**described, "anyOf": [section["properties"]["hash"], section]}

    @property
    def ends(self) -> float:
        """When it expires, in seconds since 1970; infinite where it never does."""
        if self.expires is None:
            return math.inf
        return datetime(self.expires.year, self.expires.month, self.expires.day, tzinfo=UTC).timestamp()


class LimitSettings(Section):
    """What a team may use. What is left out is not limited."""

    requests_per_minute: Count | None = None
    """Requests per minute, on all paths together; so many may come at once."""
    concurrent: Count | None = None
    """Requests in work at the same time, streams until their end."""
    summary_tokens_per_day: CountOrZero | None = None
    """Tokens that summaries may cost in a day (UTC), prompts and answers; then digests take their place."""


class TeamSettings(Section):
    """Callers who share a policy."""

    keys: tuple[KeySettings, ...] = ()
    """The keys that the team calls with; several for a change of keys."""
    limits: LimitSettings | None = None
    """What the team may use. Left out: no limits."""
    policy: Name = "default"
    """The name of the policy."""
    models: tuple[Text, ...] | None = None
    """The models it may use, as globs. Left out: all of them; an empty list: none."""
    paths: Literal["all", "models", "chat"] | None = None
    """The paths it may use. all: every path under /v1; models: those that name a model, and the list of models; chat:
    chat completions and the list of models. Left out: models if the team has a list of models, else all."""

    @model_validator(mode="after")
    def _lists_hold(self) -> TeamSettings:
        if self.models is not None and self.paths == "all":
            raise wrong("can't be all for a team with models: other paths name no model", "paths", fix="paths: models")
        return self


@dataclass(frozen=True, slots=True)
class Route:
    """Where a model goes: the upstream's name, the model's name there, and what the file says of its limits."""

    upstream: str
    model: str
    profile: ProfileSettings | None


def default_upstreams() -> dict[str, UpstreamSettings]:
    """Return the upstreams of a configuration that names none."""
    return {"openai": UpstreamSettings(), "anthropic": UpstreamSettings(provider="anthropic")}


class _SettingsFields(Section):
    server: ServerSettings = ServerSettings()
    """Where to listen, and how much to take."""
    store: StoreSettings = Field(default_factory=StoreSettings)
    """Where summaries and the archive are kept."""
    auth: AuthSettings = AuthSettings()
    """Who may call."""
    upstreams: Mapping[Name, UpstreamSettings] = Field(default_factory=default_upstreams)
    """The services that answer, by name. Left out: OpenAI, and Anthropic for requests in its format, each with the
    caller's own key."""
    models: tuple[RouteSettings, ...] = ()
    """Which models go where; the first match wins. Left out: every model goes to the first upstream."""
    teams: Mapping[Name, TeamSettings] = Field(default_factory=dict)
    """Callers who share a policy, by name."""

    @field_validator("upstreams")
    @classmethod
    def _has_upstream(cls, upstreams: Mapping[str, UpstreamSettings]) -> Mapping[str, UpstreamSettings]:
        if not upstreams:
            raise wrong(
                "is empty",
                fix="add an upstream, as in main: {base_url: https://api.openai.com/v1}, or remove the line",
                shows=False,
            )
        return upstreams


class WrittenSettings(_SettingsFields):
    """Configuration of compaction-proxy."""

    include: tuple[Text, ...] = ()
    """Further files, relative to this one, with policies and teams; *, ? and ** as in file names."""
    policies: Mapping[Name, WrittenPolicy] = Field(default_factory=dict)
    """What is done to conversations, by name. `default` applies to callers without a team."""


class Settings(_SettingsFields):
    """A configuration in force: every policy is complete."""

    policies: Mapping[str, Policy] = Field(default_factory=lambda: {"default": Policy()})
    """By name; `default` is always there."""

    @field_validator("policies")
    @classmethod
    def _has_default(cls, policies: Mapping[str, Policy]) -> Mapping[str, Policy]:
        return policies if "default" in policies else {"default": Policy(), **policies}

    def route(self, model: str) -> Route | None:
        """Where a model goes; ``None`` where routes are listed and none matches."""
        if not self.models:
            return Route(next(iter(self.upstreams)), model, None)
        for route in self.models:
            if fnmatchcase(model, route.match):
                return Route(route.upstream, route.model or model, route.profile)
        return None
