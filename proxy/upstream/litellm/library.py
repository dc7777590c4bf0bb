"""LiteLLM, imported when it is first needed, and kept quiet.

The import takes four seconds of CPU and 200 MB, so it happens in a thread, once. Everything that LiteLLM would do
besides carrying a request is turned off here: its price list from the network, its callbacks, caches, retries, token
counts and fetches of images, the following of redirects, its printed advice and its log lines, which can hold prompts.
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

# Read by LiteLLM while it is imported.
_ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else the price list is downloaded
        "LITELLM_MODE": "PRODUCTION",  # else a .env file in the working folder is loaded
        "MAX_IMAGE_URL_DOWNLOAD_SIZE_MB": "0",  # no image is fetched on behalf of a client
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
        # LiteLLM makes up a usage where the provider gave none; with this it is zeros, which are taken out again.
        "disable_token_counter": True,
        "drop_params": True,
        # A conversation whose form the provider would refuse (an assistant speaks first, tools were used but are not
        # listed) gets a placeholder in place of a 400 that no OpenAI client expects.
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

_lock = threading.Lock()
_loaded: list[Any] = []


async def load() -> Any:
    """The ``litellm`` module; the first caller waits for its import, off the event loop. Raises ``ImportError``."""
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
            # Else they are built at first use, on the event loop, with warnings that the import has just silenced.
            for name in _ANSWER_TYPES:
                getattr(litellm.types.utils, name).model_rebuild()
            _loaded.append(litellm)
        return _loaded[0]


def _follow_no_redirects() -> None:
    """Have every client that LiteLLM makes for itself answer with a redirect instead of following it.

    Following one takes the prompt to another host, and the key too where it travels in a header of its own.
    """
    handlers = importlib.import_module("litellm.llms.custom_httpx.http_handler")
    for handler in (handlers.AsyncHTTPHandler, handlers.HTTPHandler):
        handler.__init__ = _with(handler.__init__, follow_redirects=False)
    # What is handed to OpenAI's own client, for OpenAI, Azure and all that LiteLLM reaches through it.
    common = importlib.import_module("litellm.llms.openai.common_utils").BaseOpenAILLM
    for name in ("_get_async_http_client", "_get_sync_http_client"):
        setattr(common, name, staticmethod(_staying(getattr(common, name))))


def _send_once() -> None:
    """Have LiteLLM report a connection that failed, instead of sending the request once more on a new one.

    Its own parameters against retries don't cover this. A provider that resets the connection may have done the work.
    """
    handlers = importlib.import_module("litellm.llms.custom_httpx.http_handler")

    async def refuse(*_: Any, **__: Any) -> Any:
        failed = sys.exception()
        raise RuntimeError("LiteLLM sends a request again that didn't fail") if failed is None else failed

    handlers.AsyncHTTPHandler.single_connection_post_request = refuse


def _with(function: Callable[..., Any], **fixed: object) -> Callable[..., Any]:
    """The function with arguments that are what they are here, whatever it is called with."""

    @functools.wraps(function)
    def called(*args: Any, **given: Any) -> Any:
        return function(*args, **{**given, **fixed})

    return called


def _staying(made: Callable[..., Any]) -> Callable[..., Any]:
    """What makes a client, as one that follows no redirects."""

    @functools.wraps(made)
    def called(*args: Any, **given: Any) -> Any:
        client = made(*args, **given)
        client.follow_redirects = False
        return client

    return called


def http_client() -> Any:
    """A client of LiteLLM's own kind that belongs to whoever asks for it. LiteLLM must have been loaded."""
    return importlib.import_module("litellm.llms.custom_httpx.http_handler").AsyncHTTPHandler()
