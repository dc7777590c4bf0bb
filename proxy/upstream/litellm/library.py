"""Import LiteLLM at first use, and turn off everything except sending requests.

The import takes four seconds of CPU and 200 MB, so it happens once, in a thread. This module turns off LiteLLM's
download of the price list, callbacks, caches, retries, token counts, image downloads, redirects, printed advice, and
log lines, which can contain prompts.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from proxy.config.upstreams import TransportChoice
from proxy.errors import ConfigurationError

# Read by LiteLLM while it is imported.
_ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise LiteLLM downloads the price list
        "LITELLM_MODE": "PRODUCTION",  # otherwise LiteLLM loads a .env file in the working directory
        "MAX_IMAGE_URL_DOWNLOAD_SIZE_MB": "0",  # LiteLLM downloads no images for a client
    }
)

# Set on the module after the import.
_FLAGS: Mapping[str, object] = MappingProxyType(
    {
        "suppress_debug_info": True,  # no advice printed on errors
        "set_verbose": False,
        "turn_off_message_logging": True,
        "redact_messages_in_exceptions": True,
        "disable_streaming_logging": True,
        # LiteLLM invents a usage if the provider reports none. With this flag it writes zeros, which `answer` removes.
        "disable_token_counter": True,
        "drop_params": True,
        # LiteLLM adds a placeholder to a conversation that the provider would reject (an assistant message comes first,
        # or tools were used but aren't listed). OpenAI's clients don't expect that 400.
        "modify_params": True,
        "num_retries": 0,
        "cache": None,
        "user_url_validation": True,
        "user_url_allowed_hosts": [],
    }
)
_CALLBACK_LISTS = (
    *("callbacks", "input_callback", "success_callback", "failure_callback", "service_callback"),
    *("_async_input_callback", "_async_success_callback", "_async_failure_callback"),
)
_ANSWER_TYPES = ("Message", "Delta", "Choices", "StreamingChoices", "ModelResponse", "ModelResponseStream", "Usage")
_LOGGERS = ("LiteLLM", "LiteLLM Proxy", "LiteLLM Router")

# LiteLLM counts these among its OpenAI-compatible providers, but their formats or addresses need its translation.
NEEDS_TRANSLATION = frozenset({"azure_ai", "databricks", "watsonx", "github_copilot", "snowflake"})

_lock = threading.Lock()
_loaded: list[Any] = []


async def load() -> Any:
    """Return the ``litellm`` module. The first caller waits for the import, in a thread. Raises ``ImportError``."""
    return _loaded[0] if _loaded else await asyncio.to_thread(_load)


def _load() -> Any:
    with _lock:
        if not _loaded:
            os.environ.update(_ENVIRONMENT)
            litellm = importlib.import_module("litellm")
            for name, value in _FLAGS.items():
                setattr(litellm, name, value)
            for name in _CALLBACK_LISTS:
                setattr(litellm, name, [])
            for name in _LOGGERS:
                logging.getLogger(name).disabled = True
            _follow_no_redirects()
            _send_once()
            # Otherwise pydantic builds them at first use, on the event loop, with warnings.
            for name in _ANSWER_TYPES:
                getattr(litellm.types.utils, name).model_rebuild()
            _loaded.append(litellm)
        return _loaded[0]


def _follow_no_redirects() -> None:
    """Make each of LiteLLM's own clients return a redirect instead of following it.

    Following one would send the prompt to another host, and also the key if it has a header of its own.
    """
    handlers = importlib.import_module("litellm.llms.custom_httpx.http_handler")
    for handler in (handlers.AsyncHTTPHandler, handlers.HTTPHandler):
        handler.__init__ = _with(handler.__init__, follow_redirects=False)
    # The HTTP clients given to OpenAI's SDK, for OpenAI, Azure, and all providers that LiteLLM reaches through it.
    common = importlib.import_module("litellm.llms.openai.common_utils").BaseOpenAILLM
    for name in ("_get_async_http_client", "_get_sync_http_client"):
        setattr(common, name, staticmethod(_staying(getattr(common, name))))


def _send_once() -> None:
    """Make LiteLLM report a failed connection instead of retrying on a new one.

    LiteLLM's retry parameters don't cover this. A provider that resets the connection may have run the request.
    """
    handlers = importlib.import_module("litellm.llms.custom_httpx.http_handler")

    async def refuse(*_: Any, **__: Any) -> Any:
        failed = sys.exception()
        raise RuntimeError("LiteLLM sends a request again that didn't fail") if failed is None else failed

    handlers.AsyncHTTPHandler.single_connection_post_request = refuse


def _with(function: Callable[..., Any], **fixed: object) -> Callable[..., Any]:
    """Return a function with fixed arguments, which override the caller's."""

    @functools.wraps(function)
    def called(*args: Any, **given: Any) -> Any:
        return function(*args, **{**given, **fixed})

    return called


def _staying(made: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a client factory so that its clients don't follow redirects."""

    @functools.wraps(made)
    def called(*args: Any, **given: Any) -> Any:
        client = made(*args, **given)
        client.follow_redirects = False
        return client

    return called


def http_client() -> Any:
    """Return a new LiteLLM HTTP client. The caller closes it. Call ``load`` first."""
    return importlib.import_module("litellm.llms.custom_httpx.http_handler").AsyncHTTPHandler()


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
