"""Choose the transport and base URL for a provider, and list LiteLLM's providers.

The proxy relays to providers with OpenAI's format. LiteLLM's registry lists them with their URLs. Providers in the
table below don't need LiteLLM.
"""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from proxy.errors import ConfigurationError

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
