"""Build LiteLLM's arguments from a client's body.

LiteLLM's ``acompletion`` takes the address, the key, mocks, fallbacks, and callbacks as arguments like the temperature.
So this module copies only the fields listed below from the body.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import msgspec

from proxy.errors import BadBody, RequestError, UnknownModel
from proxy.upstream.transport import Outgoing

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
        "cache_control",
    }
)

TOOL_TYPES = frozenset({"function"})
"""Other types start something at the provider or in LiteLLM (an MCP server by its URL, a shell)."""

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


@dataclass(frozen=True, slots=True)
class Base:
    """The end of a base URL that LiteLLM expects: remove ``removed``, and add ``version`` if there is none."""

    removed: tuple[str, ...] = ()
    version: str = ""


BASES: Mapping[str, Base] = MappingProxyType(
    {
        "anthropic": Base(removed=("/v1/messages", "/v1")),  # LiteLLM adds /v1/messages
        "gemini": Base(version="/v1beta"),  # LiteLLM adds /models/NAME:generateContent
    }
)
_VERSION = re.compile(r"/v\d+\w*$")


def api_base(provider: str, base_url: str | None) -> str | None:
    """Return the ``base_url`` that LiteLLM expects for this provider. The configured one may end in a version."""
    if base_url is None:
        return None
    url = base_url.rstrip("/")
    rule = BASES.get(provider, Base())
    for end in rule.removed:
        if url.endswith(end):
            url = url.removesuffix(end)
            break
    if rule.version and not _VERSION.search(urlsplit(url).path):
        url += rule.version
    return url


def arguments(provider: str, request: Outgoing) -> dict[str, Any]:
    """Return the client's part of ``acompletion``'s arguments. Raises ``RequestError`` for untranslatable parts."""
    if not _MODEL.fullmatch(request.model):
        raise UnknownModel("The model's name contains invalid characters. Correct 'model'.", param="model")
    body = _parsed(request.body)
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise BadBody("'messages' must be an array of objects.", param="messages")
    _refuse_other_tools(body.get("tools"))
    _refuse_remote_media(provider, messages)
    chosen = {name: body[name] for name in PARAMETERS & body.keys() if body[name] is not None}
    if not request.stream:
        chosen.pop("stream_options", None)
    return {
        **chosen,
        "model": f"{provider}/{request.model}",
        "messages": [{key: message[key] for key in message if key in MESSAGE_FIELDS} for message in messages],
        "stream": request.stream,
    }


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        try:
            value = msgspec.json.decode(body)
        except msgspec.DecodeError:
            # Lone surrogates, NaN, and similar values: a question mark replaces each invalid character.
            lenient = json.dumps(json.loads(body), ensure_ascii=False)
            value = json.loads(lenient.encode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        raise BadBody(
            "The body isn't JSON, so the proxy can't translate it for this model's provider. Send valid JSON."
        ) from error
    if not isinstance(value, dict):
        raise BadBody("The body must be a JSON object.")
    return value


def _refuse_other_tools(tools: object) -> None:
    for tool in tools if isinstance(tools, list) else ():
        if not isinstance(tool, dict) or tool.get("type", "function") not in TOOL_TYPES:
            raise RequestError(
                "This model's provider only takes tools of type 'function'. Remove the others.", param="tools"
            )


def _refuse_remote_media(provider: str, messages: list[dict[str, Any]]) -> None:
    allowed = FETCHED_BY_PROVIDER.get(provider, ())
    for index, message in enumerate(messages):
        parts = message.get("content")
        for part in parts if isinstance(parts, list) else ():
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
