"""Which lane reaches a provider, and where it is.

A provider that speaks OpenAI's format is relayed to; LiteLLM's registry says which those are and where they live. A
route with its own ``base_url`` and a provider from the table below needs no LiteLLM at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from proxy.errors import ConfigurationError

# Providers known to take and give OpenAI's chat completions byte for byte, with their address where it is fixed.
# LiteLLM's registry is asked for those that are not listed; importing it takes seconds, so the common ones are here.
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
    """How a provider is reached: the lane, and the base URL for a relay."""

    lane: Literal["relay", "translate"]
    base_url: str | None


def resolve_transport(
    provider: str, base_url: str | None, lane: Literal["auto", "relay", "translate"], *, where: str
) -> TransportChoice | None:
    """How to reach a provider, or ``None`` where only LiteLLM's registry can tell (see ``asked_litellm``).

    Raises ``ConfigurationError`` if the lane was settled to be a relay and there is no address for it.
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
