"""Choose the transport for a provider by LiteLLM's registry."""

from __future__ import annotations

from proxy.config.upstreams import TransportChoice
from proxy.errors import ConfigurationError
from proxy.upstream.litellm.library import load

# LiteLLM counts these among its OpenAI-compatible providers, but their formats or addresses need its translation.
NEEDS_TRANSLATION = frozenset({"azure_ai", "databricks", "watsonx", "github_copilot", "snowflake"})


async def litellm_choice(provider: str, base_url: str | None) -> TransportChoice:
    """Return the transport for a provider by LiteLLM's registry. The first call imports LiteLLM, which takes seconds.

    Raises ``ConfigurationError`` for a provider that LiteLLM doesn't have.
    """
    litellm = await load()
    if provider not in {known.value for known in litellm.LlmProviders}:
        raise ConfigurationError(f"provider {provider} is unknown to LiteLLM: correct its name")
    if provider not in litellm.openai_compatible_providers or provider in NEEDS_TRANSLATION:
        return TransportChoice("translate", base_url)
    if base_url is not None:
        return TransportChoice("relay", base_url)
    _, _, _, address = litellm.get_llm_provider("any", custom_llm_provider=provider)
    return TransportChoice("relay", address) if address else TransportChoice("translate", None)
