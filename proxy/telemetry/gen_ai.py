"""Attributes of calls to models, by OpenTelemetry's conventions for generative AI.

Source: github.com/open-telemetry/semantic-conventions-genai. The names aren't stable yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from urllib.parse import urlsplit

OPERATION = "chat"
"""The operation of all three APIs."""

_PROVIDERS = {
    "azure": "azure.ai.openai",
    "azure_ai": "azure.ai.inference",
    "bedrock": "aws.bedrock",
    "bedrock_converse": "aws.bedrock",
    "cohere_chat": "cohere",
    "gemini": "gcp.gemini",
    "mistral": "mistral_ai",
    "vertex_ai": "gcp.vertex_ai",
    "vertex_ai_beta": "gcp.vertex_ai",
    "watsonx": "ibm.watsonx.ai",
    "xai": "x_ai",
}
"""The conventions' names of providers, where they differ from LiteLLM's."""

_PORTS = {"http": 80, "https": 443}

Upstream = tuple[str, str | None]
"""The provider of an upstream by its name in LiteLLM, and its base URL."""

FindUpstream = Callable[[str], Upstream | None]
"""Returns the upstream of a name, or ``None`` if the configuration doesn't have it anymore."""

Attributes = Mapping[str, str | int]


@lru_cache(1_000)
def attributes_of(name: str, upstream: Upstream | None) -> Attributes:
    """Return the attributes of all calls to an upstream."""
    found: dict[str, str | int] = {"gen_ai.operation.name": OPERATION, "compaction.upstream": name}
    if upstream is None:
        return found
    provider, base_url = upstream
    found["gen_ai.provider.name"] = _PROVIDERS.get(provider, provider)
    if base_url is not None and (address := urlsplit(base_url)).hostname:
        found["server.address"] = address.hostname
        found["server.port"] = address.port or _PORTS[address.scheme]
    return found
