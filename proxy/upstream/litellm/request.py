"""Choose the transport of a provider that only LiteLLM knows, and build the arguments of LiteLLM's calls.

LiteLLM's ``acompletion`` takes the address, the key, mocks, fallbacks, and callbacks as arguments like the temperature.
So this module copies only the fields listed below from the client's body.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import chain
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from proxy.config.upstreams import TransportChoice
from proxy.errors import BadBody, ConfigurationError, RequestError, UnknownModel
from proxy.litellm_package import load
from proxy.upstream.bridge.transport import body_of, decoded
from proxy.upstream.traits import apply
from proxy.upstream.transport import Outgoing

# LiteLLM counts these among its OpenAI-compatible providers, but their formats or addresses need its translation.
NEEDS_TRANSLATION = frozenset({"azure_ai", "databricks", "watsonx", "github_copilot", "snowflake"})


async def litellm_choice(provider: str, base_url: str | None) -> TransportChoice:
    """Return the transport for a provider by LiteLLM's registry. Raises ``ConfigurationError``."""
    litellm = await load()
    if provider not in {known.value for known in litellm.LlmProviders}:
        raise ConfigurationError(f"provider {provider} is unknown to LiteLLM: correct its name")
    if provider not in litellm.openai_compatible_providers or provider in NEEDS_TRANSLATION:
        return TransportChoice("translate", base_url)
    if base_url is not None:
        return TransportChoice("relay", base_url)
    _, _, _, address = litellm.get_llm_provider("any", custom_llm_provider=provider)
    return TransportChoice("relay", address) if address else TransportChoice("translate", None)


PARAMETERS = frozenset(
    {
        *("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call"),
        *("temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "seed"),
        *("max_tokens", "max_completion_tokens", "n", "stop"),
        *("logprobs", "top_logprobs", "response_format", "modalities", "audio", "prediction"),
        *("reasoning_effort", "verbosity", "service_tier", "user", "safety_identifier", "prompt_cache_key"),
        "stream_options",
        "web_search_options",
        "thinking",  # not OpenAI's, but LiteLLM's parameter for Anthropic's reasoning; it contains only numbers
    }
)
"""Copied unchanged. The list omits two of OpenAI's parameters: ``metadata``, because LiteLLM reads keys, callbacks, and
prompt names from it, and ``store``, because other providers don't store answers."""

MESSAGE_FIELDS = frozenset(
    {
        *("role", "content", "name", "tool_calls", "tool_call_id", "function_call", "refusal", "audio"),
        *("reasoning_content", "thinking_blocks"),  # must go back to the provider that wrote them
        *("images", "cache_control"),
    }
)

PARTS = frozenset({"text", "image_url", "file", "thinking", "redacted_thinking"})
"""The parts that LiteLLM translates for all providers. It drops most others with status 200."""

GOOGLE = frozenset({"gemini", "vertex_ai", "vertex_ai_beta"})  # providers that take the images of their answers back
WITHOUT_AUDIO = frozenset({"anthropic", "bedrock", "bedrock_converse"})  # LiteLLM drops audio, and in results for all

LOST = "'{path}': the translation for this model's provider loses it. Fix: send it as text, or remove it."

TOOL_TYPES = frozenset({"function"})  # others start something: an MCP server by its URL, or a shell

CREDENTIAL_FROM_ENVIRONMENT = frozenset(
    {
        *("bedrock", "bedrock_converse", "sagemaker", "sagemaker_chat"),  # AWS's own credentials
        *("vertex_ai", "vertex_ai_beta"),  # Google's
        *("ollama", "ollama_chat"),  # none
    }
)
"""Providers that don't need a key from the configuration. The proxy never sends them a caller's key."""

FETCHED_BY_PROVIDER: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"anthropic": ("https://",), "vertex_ai": ("gs://",), "vertex_ai_beta": ("gs://",)}
)
"""URLs of images and files that the provider fetches itself. LiteLLM would fetch all others from this machine, so a
client could reach the local network. The proxy rejects such a request."""

_REMOTE = re.compile(r"\s*[a-z][a-z0-9+.-]{1,20}://", re.I)
_MODEL = re.compile(r"[A-Za-z0-9][\w.:@+-]*(?:/[A-Za-z0-9][\w.:@+-]*)*")


_VERSION = re.compile(r"/v\d\w*$")


def api_base(provider: str, base_url: str | None) -> str | None:
    """Return the ``base_url`` that LiteLLM expects for this provider. The configured one may end in a version."""
    if base_url is None:
        return None
    url = base_url.rstrip("/")
    if provider == "anthropic":  # LiteLLM adds /v1/messages
        return url.removesuffix("/v1/messages").removesuffix("/v1")
    if provider == "gemini" and not _VERSION.search(urlsplit(url).path):  # LiteLLM adds /models/NAME:generateContent
        return f"{url}/v1beta"
    return url


def arguments(provider: str, request: Outgoing) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return ``acompletion``'s arguments from the client, and the effective edits. Raises ``RequestError``."""
    if not _MODEL.fullmatch(request.model):
        raise UnknownModel("The model's name contains invalid characters. Correct 'model'.", param="model")
    body = body_of(request)
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise BadBody("'messages' must be an array of objects.", param="messages")
    _refuse_other_tools(body.get("tools"))
    _refuse_remote_media(provider, messages)
    chosen = {name: body[name] for name in PARAMETERS & body.keys() if body[name] is not None}
    if not request.stream:
        chosen.pop("stream_options", None)
    chosen["messages"] = [_message(provider, f"messages[{number}]", message) for number, message in enumerate(messages)]
    edited = apply(chosen, request.edits)  # what is publicly known, LiteLLM knows itself
    return {**chosen, "model": f"{provider}/{request.model}", "stream": request.stream}, edited


def _message(provider: str, path: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as LiteLLM takes it. Raises ``RequestError`` if LiteLLM would drop a part of it."""
    kept = {key: message[key] for key in message if key in MESSAGE_FIELDS}
    if isinstance(kept.get("tool_calls"), list):
        kept["tool_calls"] = [_parsable(call) for call in kept["tool_calls"]]
    audio = message.get("role") != "tool" and provider not in WITHOUT_AUDIO
    taken = PARTS | {"input_audio"} if audio else PARTS
    content, refused = kept.get("content"), kept.pop("refusal", None)
    if isinstance(content, list):
        kept["content"] = content = [_said(part) for part in content]
    elif refused and not content:
        kept["content"] = refused
    checked = {"content": (content, taken), "tool_calls": (kept.get("tool_calls"), TOOL_TYPES)}
    if provider not in GOOGLE:
        checked["images"] = (kept.get("images"), frozenset())
    for name, (listed, types) in checked.items():
        for number, one in enumerate(listed if isinstance(listed, list) else ()):
            if isinstance(one, dict) and one.get("type", next(iter(types), "")) not in types:
                where = f"{path}.{name}[{number}]"
                raise RequestError(LOST.format(path=where), param=where)
    return kept


def _parsable(call: Any) -> Any:
    """Return a call with arguments in JSON. A limit on the output may have cut them, and LiteLLM parses them."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(given := function.get("arguments"), str) or not given:
        return call
    try:
        decoded(given.encode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return {**call, "function": {**function, "arguments": json.dumps({"incomplete": given})}}
    return call


def _said(part: Any) -> Any:
    refused = part.get("refusal") if isinstance(part, dict) else None
    return {"type": "text", "text": refused} if isinstance(refused, str) else part


def _refuse_other_tools(tools: object) -> None:
    for tool in tools if isinstance(tools, list) else ():
        if not isinstance(tool, dict) or tool.get("type", "function") not in TOOL_TYPES:
            raise RequestError(
                "This model's provider only takes tools of type 'function'. Remove the others.", param="tools"
            )


def _refuse_remote_media(provider: str, messages: list[dict[str, Any]]) -> None:
    allowed = FETCHED_BY_PROVIDER.get(provider, ())
    for index, message in enumerate(messages):
        parts = [message.get(name) for name in ("content", "images")]
        for part in chain.from_iterable(listed for listed in parts if isinstance(listed, list)):
            for url in _urls(part, 0):
                if not url.strip().lower().startswith(allowed or ("\0",)):
                    raise RequestError(
                        "This model's provider doesn't take images or files by URL. Send the content as a data: URL.",
                        param=f"messages[{index}].content",
                    )


def _urls(value: object, depth: int) -> list[str]:
    """Return the strings of a content part that are URLs. Skip its ``text``, which is prose."""
    if isinstance(value, str):
        return [value] if _REMOTE.match(value) else []
    if depth > 4:
        return []
    if isinstance(value, list):
        return [url for item in value for url in _urls(item, depth + 1)]
    if isinstance(value, dict):
        return [url for key, item in value.items() if key != "text" for url in _urls(item, depth + 1)]
    return []
