"""The sections `upstreams`, `models`, and `prices`: which models go to which service, their limits, and their prices.

The proxy relays to providers with OpenAI's format. LiteLLM's registry lists them with their URLs. Providers in the
table below don't need LiteLLM.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    SecretStr,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from proxy.config.document import near
from proxy.config.fields import Count, Name, Section, Size, Text, no_truth_value, wrong
from proxy.errors import ConfigurationError
from proxy.http.headers import CREDENTIALS
from proxy.limits.prices import FACTORS, FIELDS, SEARCHES, is_price_field
from proxy.telemetry.record import TIERS

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


_KNOWN_BASE_URLS = {"openai": "https://api.openai.com/v1", "anthropic": "https://api.anthropic.com/v1"}
# LiteLLM reads their credentials from the machine's environment.
_OWN_CREDENTIALS = frozenset(
    {"bedrock", "bedrock_converse", "sagemaker", "sagemaker_chat", "vertex_ai", "vertex_ai_beta"}
)
_ADDRESS_EXAMPLE = "base_url: https://api.openai.com/v1"
_API_PATH = re.compile(r"(/(?:chat/completions|completions|responses|embeddings|models|messages))/*$")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_AS_KEY = 'api_key: "${OPENAI_API_KEY}"'
RESERVED_HEADERS = dict.fromkeys(
    ("host", "content-length", "content-type", "content-encoding", "transfer-encoding", "connection", "te"),
    "remove it. The proxy sets it for each request",
)
"""Headers that can't be set, with the fix."""


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

Secret = Annotated[SecretStr, AfterValidator(_header_value)]  # text that the proxy sends in a header and never prints


class UpstreamSettings(Section):
    """A service that the proxy sends requests to."""

    provider: Text = "openai"
    """The provider, by its name in LiteLLM."""
    base_url: str | None = None
    """The URL before /chat/completions, /responses, and /messages. Default: the provider's URL in LiteLLM."""
    api_key: Secret | None = None
    """The key for the upstream. Default: the proxy forwards the caller's key."""
    lane: Literal["auto", "relay", "translate"] = "auto"
    """relay: forward the bytes unchanged. translate: convert with LiteLLM. auto: relay if the provider supports it."""
    speaks: tuple[Api, ...] | None = None
    """The upstream's APIs. The proxy translates requests in others. Default: by provider, and learned from errors."""
    api_version: Text | None = None
    """The `api-version` for Azure, in quotes. It replaces the one that a client sends."""
    headers: Mapping[str, Secret] = Field(default_factory=dict)
    """Headers to add to each request. Keys go into api_key."""
    ask_limits: bool = True
    """Ask the upstream for its models' limits in the background, every 15 minutes."""

    @field_validator("base_url")
    @classmethod
    def _is_plain_address(cls, url: str | None, info: ValidationInfo) -> str | None:
        if url is None:
            # Set here because OPENAI_BASE_URL and ANTHROPIC_BASE_URL may point clients at this very proxy.
            return _KNOWN_BASE_URLS.get(info.data.get("provider", ""))
        azure = f'{_ADDRESS_EXAMPLE}. For Azure, add api_version: "2024-10-21"'
        return checked_url(url, _API_PATH, example=_ADDRESS_EXAMPLE, key=_AS_KEY, query=azure)

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
        return checked_header_names(headers, {"authorization": _AS_KEY, "api-key": _AS_KEY, **RESERVED_HEADERS})

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


def checked_url(url: str, path: re.Pattern[str], *, example: str, key: str, query: str) -> str:
    """Return a URL of HTTP without a final slash. Raise an error if it has credentials, a query, or a fragment.

    It must not end in ``path``, which the proxy appends. ``example``, ``key``, and ``query`` are the fixes for a wrong
    URL, for credentials, and for a query.
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
    if (end := path.search(url)) is not None:
        raise wrong(f"must end before {end[1]}, which the proxy appends", fix=f"{example}, without {end[1]}")
    return url.rstrip("/")


def default_upstreams() -> dict[str, UpstreamSettings]:
    return {"openai": UpstreamSettings(), "anthropic": UpstreamSettings(provider="anthropic")}


class ProfileSettings(Section):
    """A model's limits, if the built-in tables are wrong or don't list it. Limits are in tokens."""

    main: ClassVar[str | None] = "context_window"

    like: Text | None = None
    """A listed model with the same limits and tokenizer, for example the one that a deployment serves."""
    context_window: Count | None = None
    """Maximum tokens of input and output together. Default: from the upstream or the built-in tables."""
    max_input_tokens: Count | None = None
    """Maximum tokens of the input. Default: from the upstream or the built-in tables."""
    max_output_tokens: Count | None = None
    """Maximum tokens of the output. Default: from the built-in tables."""
    max_bytes: Size | None = None
    """Maximum size of a request body: bytes, or text like 32MB. Default: the provider's, if known."""
    max_messages: Count | None = None
    """Maximum messages in a request that the upstream accepts. Default: 2,048 for OpenAI and Azure."""
    # The encodings that need no download.
    tokenizer: Literal["o200k_base", "o200k_harmony", "cl100k_base", "p50k_base", "p50k_edit"] | None = None
    """The model's tokenizer, or the most similar one. Default: by the model's name."""
    images: Text | None = None
    """A model with the same rule for counting images, such as gpt-4o or claude. Default: by the model's name."""
    strict_alternation: bool | None = None
    """Whether the upstream requires user and assistant messages to alternate, starting with the user."""

    @field_validator("images")
    @classmethod
    def _is_a_rule(cls, images: str | None) -> str | None:
        # Imported here: few configurations name a rule, and counting brings the tokenizer with it.
        from proxy.tokens.media import RULES

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
    """Send matching models to an upstream. The first match wins."""

    match: Text
    """The model in the request. *, ?, and [seq] work as in file names. Case-sensitive."""
    upstream: Name
    """The name of the upstream."""
    model: Text | None = None
    """The model's name at the upstream. Default: the name in the request."""
    profile: ProfileSettings | None = None
    """The model's limits. Default: from the upstream or the built-in tables."""


@dataclass(frozen=True, slots=True)
class Route:
    """The upstream of a model, its name there, and its limits in the configuration."""

    upstream: str
    model: str
    profile: ProfileSettings | None


_PARTS = {
    SEARCHES: "{search_context_size_medium: 0.01}",
    FACTORS: "{us: 1.1}",
}
"""The fields whose value is a section in LiteLLM's table, with an example."""


def _fields(prices: Mapping[str, float | Mapping[str, float]]) -> Mapping[str, float | Mapping[str, float]]:
    for name, value in prices.items():
        if not is_price_field(name) and name not in _PARTS:
            raise wrong(
                "isn't a price field of LiteLLM's table that the proxy uses",
                name,
                fix=f"use {', '.join(FIELDS)}, or one of them with _above_200k_tokens or another size, "
                f"and with _{', _'.join(TIERS)} for a tier; or {', '.join(_PARTS)}",
            )
        if isinstance(value, Mapping) != (name in _PARTS):
            fix = _PARTS.get(name, "0.00000125")
            raise wrong(f"must be {'a mapping' if name in _PARTS else 'a number'}", name, fix=f"{name}: {fix}")
    if "input_cost_per_token" not in prices:
        raise wrong("needs input_cost_per_token", fix="input_cost_per_token: 0.00000125")
    return prices


def _kind(value: object) -> str:
    return "section" if isinstance(value, Mapping) else "number"


PriceValue = Annotated[float, Field(ge=0), BeforeValidator(no_truth_value)]
"""US dollars per token or search, or a factor."""

PriceField = Annotated[
    Annotated[PriceValue, Tag("number")] | Annotated[Mapping[Text, PriceValue], Tag("section")], Discriminator(_kind)
]

ModelPrices = Annotated[Mapping[Text, PriceField], AfterValidator(_fields)]
"""The prices of a model in US dollars per token or search, by the fields of LiteLLM's table."""

Prices = Mapping[Text, ModelPrices]  # Prices by model: the upstream's name, or a glob. The first match wins.
