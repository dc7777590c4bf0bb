"""The section `upstreams`: the services that requests go to, their transports, and LiteLLM's list of providers.

The proxy relays to providers with OpenAI's format. LiteLLM's registry lists them with their URLs. Providers in the
table below don't need LiteLLM.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr, ValidationInfo, field_validator

from proxy.config.fields import Section, Text, wrong
from proxy.errors import ConfigurationError
from proxy.http.headers import CREDENTIALS

# Providers that use OpenAI's chat completions format, with their fixed URL if they have one. The proxy looks up others
# in LiteLLM's registry. Importing LiteLLM takes seconds, so common providers are listed here.
SPEAKS_OPENAI: dict[str, str | None] = {
    "openai": "https://api.openai.com/v1",
    "azure": None,
    "custom_openai": None,
    "openai_like": None,
    "hosted_vllm": None,
    "vllm": None,
    "lm_studio": None,
    "llamafile": None,
    "litellm_proxy": None,
    "openrouter": "https://openrouter.ai/api/v1",
    "groq": "https://api.groq.com/openai/v1",
    "together_ai": "https://api.together.xyz/v1",
    "deepseek": "https://api.deepseek.com",
    "fireworks_ai": "https://api.fireworks.ai/inference/v1",
    "xai": "https://api.x.ai/v1",
    "cerebras": "https://api.cerebras.ai/v1",
    "perplexity": "https://api.perplexity.ai",
    "nvidia_nim": "https://integrate.api.nvidia.com/v1",
    "sambanova": "https://api.sambanova.ai/v1",
    "deepinfra": "https://api.deepinfra.com/v1/openai",
    "moonshot": "https://api.moonshot.ai/v1",
    "mistral": "https://api.mistral.ai/v1",
    "novita": "https://api.novita.ai/v3/openai",
}


@dataclass(frozen=True, slots=True)
class TransportChoice:
    """The kind of transport to a provider, and the base URL for a relay."""

    kind: Literal["relay", "translate"]
    base_url: str | None


def resolve_transport(
    provider: str, base_url: str | None, lane: Literal["auto", "relay", "translate"], *, where: str
) -> TransportChoice | None:
    """Return the kind of transport and URL for a provider, or ``None`` if only LiteLLM's registry lists it.

    Raises ``ConfigurationError`` for a relay without an address.
    """
    if lane == "translate":
        return TransportChoice("translate", base_url)
    if provider in SPEAKS_OPENAI or lane == "relay":
        address = base_url or SPEAKS_OPENAI.get(provider)
        if address is None:
            raise ConfigurationError(
                f"{where}: provider {provider} has no default address. Fix: add base_url: https://HOST/v1"
            )
        return TransportChoice("relay", address)
    return None


@cache
def litellm_providers() -> frozenset[str]:
    """Return the names, read from LiteLLM's source because importing it takes seconds.

    Raises ``RuntimeError`` if LiteLLM doesn't define them in the expected place."""
    found = importlib.util.find_spec("litellm")
    folders = [] if found is None else found.submodule_search_locations or []
    for folder in folders:
        source = (Path(folder) / "types" / "utils.py").read_text(encoding="utf-8")
        names = frozenset(_values(ast.parse(source)))
        if names:
            return names
    raise RuntimeError("Cannot find the list of providers in LiteLLM. Fix: install the version in requirements.lock")


def _values(module: ast.Module) -> list[str]:
    """Return the values of the enumeration."""
    classes = [node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "LlmProviders"]
    members = [node.value for found in classes for node in found.body if isinstance(node, ast.Assign)]
    return [node.value for node in members if isinstance(node, ast.Constant) and isinstance(node.value, str)]


_KNOWN_BASE_URLS = {"openai": "https://api.openai.com/v1", "anthropic": "https://api.anthropic.com/v1"}
# LiteLLM reads their credentials from the machine's environment.
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


Api = Literal["chat", "responses", "messages"]
"""An API for conversations: chat completions, or the one of ``/v1/responses`` or ``/v1/messages``."""

_CERTAIN: Mapping[tuple[str, str | None], tuple[Api, ...]] = MappingProxyType(
    {
        ("openai", _KNOWN_BASE_URLS["openai"]): ("chat", "responses"),
        ("anthropic", None): ("messages",),
        ("azure", None): ("chat", "responses"),
    }
)
"""The APIs of services, by provider and address. ``None`` is any address."""

COMPACTS: Mapping[str, Api] = MappingProxyType({"anthropic": "messages", "azure": "responses", "openai": "responses"})
"""Providers that compact conversations of an API on request."""

EVERY_API: tuple[Api, ...] = ("chat", "responses", "messages")

Secret = Annotated[SecretStr, AfterValidator(_header_value)]
"""Text that the proxy sends in a header and never prints."""


class UpstreamSettings(Section):
    """A service that the proxy sends requests to."""

    provider: Text = "openai"
    """The provider, by its name in LiteLLM."""
    base_url: str | None = None
    """The URL before /chat/completions. Default: the provider's URL in LiteLLM."""
    api_key: Secret | None = None
    """The key for the upstream. Default: the proxy forwards the caller's key."""
    lane: Literal["auto", "relay", "translate"] = "auto"
    """relay: forward the bytes unchanged. translate: convert with LiteLLM. auto: relay if the provider supports it."""
    speaks: tuple[Api, ...] | None = None
    """The upstream's APIs. The proxy translates requests in others. Default: by provider, and learned from errors."""
    api_version: Text | None = None
    """The `api-version` for Azure."""
    headers: Mapping[str, Secret] = Field(default_factory=dict)
    """Headers to add to each request."""
    ask_limits: bool = True
    """Ask the upstream for its models' limits in the background, every 15 minutes."""

    @field_validator("base_url")
    @classmethod
    def _is_plain_address(cls, url: str | None, info: ValidationInfo) -> str | None:
        if url is None:
            # Set here because OPENAI_BASE_URL and ANTHROPIC_BASE_URL may point clients at this very proxy.
            return _KNOWN_BASE_URLS.get(info.data.get("provider", ""))
        return _checked_address(url)

    @field_validator("speaks")
    @classmethod
    def _has_apis(cls, speaks: tuple[Api, ...] | None, info: ValidationInfo) -> tuple[Api, ...] | None:
        if speaks is None:
            return None
        if not speaks:
            raise wrong("is empty", fix="SETTING: [chat], or remove the line", shows=False)
        if len(set(speaks)) < len(speaks):
            raise wrong("lists an API twice", fix=f"SETTING: [{', '.join(dict.fromkeys(speaks))}]")
        if info.data.get("lane") == "translate":
            raise wrong("has no effect with lane: translate", fix="remove one of both lines", shows=False)
        return speaks

    @field_validator("headers", mode="before")
    @classmethod
    def _has_header_names(cls, headers: object) -> object:
        return checked_header_names(headers, _RESERVED_HEADERS)

    @property
    def certain_apis(self) -> tuple[Api, ...] | None:
        """Return the APIs that the upstream has, or ``None`` if only its answers can show that."""
        if self.speaks is not None:
            return self.speaks
        for address in (self.base_url, None):
            if (known := _CERTAIN.get((self.provider, address))) is not None:
                return known
        return None

    @property
    def has_credential(self) -> bool:
        """Return whether the upstream accepts requests without the caller's key."""
        return self.api_key is not None or self.provider in _OWN_CREDENTIALS

    @property
    def spends(self) -> bool:
        """Return whether requests contain a credential of the operator, in a configured header or otherwise."""
        return self.has_credential or any(name.lower() in CREDENTIALS for name in self.headers)


def checked_header_names(headers: object, reserved: Mapping[str, str]) -> object:
    """Return headers if their names are valid. ``reserved`` has the names that can't be set, with the fix for each."""
    seen = set()
    for name in headers if isinstance(headers, Mapping) else ():
        lower = str(name).lower()
        if not _HEADER_NAME.fullmatch(lower):
            raise wrong("isn't a header name", name, fix="use letters, digits and -", shows=False)
        if lower in reserved:
            raise wrong("can't be set here", name, fix=reserved[lower], shows=False)
        if lower in seen:
            raise wrong("is a duplicate; case doesn't matter", name, fix="keep one of them", shows=False)
        seen.add(lower)
    return headers


def check_url(url: str, *, example: str, key: str, query: str) -> None:
    """Raise an error unless a URL is one of HTTP without credentials, query, and fragment.

    ``example``, ``key``, and ``query`` are the fixes for a wrong URL, for credentials, and for a query.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname or not url.isprintable() or " " in url:
        raise wrong("must be an http or https URL", fix=example)
    if parts.username is not None or parts.password is not None:
        raise wrong("must not hold a user name or password", fix=key)
    if "?" in url or "#" in url:
        raise wrong("must not hold a query or fragment", fix=query)


def _checked_address(url: str) -> str:
    azure = f'{_ADDRESS_EXAMPLE}. For Azure, add api_version: "2024-10-21"'
    check_url(url, example=_ADDRESS_EXAMPLE, key=_AS_KEY, query=azure)
    if (path := _API_PATH.search(url)) is not None:
        raise wrong(f"must end before {path[1]}, which the proxy appends", fix=f"{_ADDRESS_EXAMPLE}, without {path[1]}")
    return url.rstrip("/")


def default_upstreams() -> dict[str, UpstreamSettings]:
    """Return the upstreams of a configuration that names none."""
    return {"openai": UpstreamSettings(), "anthropic": UpstreamSettings(provider="anthropic")}
