"""LiteLLM's package: import it at first use, turn off everything except sending requests, and read its files.

Only this module imports LiteLLM, or uses parts of it that its documents don't name. The import takes four seconds of
CPU and 200 MB, so it happens once, in a thread. This module turns off LiteLLM's download of the price list, callbacks,
caches, retries, token counts, image downloads, redirects, printed advice, and log lines, which can contain prompts.

The table of models, the tokenizers, and the list of providers are files in the package, which need no import.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import logging
import os
import re
import threading
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

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

TABLE = "model_prices_and_context_window_backup.json"
TESTED = "1.108"  # The release line that translation was tested with. A test compares it with the dependencies.

_lock = threading.Lock()
_loaded: list[Any] = []


_MEMBER = re.compile(r'^    \w+ = "([^"]+)"', re.MULTILINE)

CALL: Mapping[str, object] = MappingProxyType(
    {
        "max_retries": 0,
        "num_retries": 0,
        "drop_params": True,
        # Otherwise LiteLLM imports its server's MCP client for each request with tools, and fails if it is missing.
        "_skip_mcp_handler": True,
    }
)
"""Arguments of each call of ``acompletion``."""


@functools.cache
def _folder() -> Path | None:
    spec = find_spec("litellm")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return Path(folders[0]) if folders else None


def table() -> Path | None:
    """Return the path of the table of models and prices, or ``None`` if the package doesn't have it."""
    folder = _folder()
    return folder / TABLE if folder is not None and (folder / TABLE).is_file() else None


def tokenizers() -> Path | None:
    """Return the folder with tiktoken's files, or ``None`` if LiteLLM isn't installed."""
    folder = _folder()
    return None if folder is None else folder / "litellm_core_utils" / "tokenizers"


@functools.cache
def providers() -> frozenset[str]:
    """Return the names of the providers, from LiteLLM's source.

    Raises ``RuntimeError`` if LiteLLM doesn't define them in the expected place.
    """
    if (folder := _folder()) is not None:
        source = (folder / "types" / "utils.py").read_text(encoding="utf-8")
        members = source.partition("class LlmProviders(")[2].partition("\nclass ")[0]
        if names := frozenset(_MEMBER.findall(members)):
            return names
    raise RuntimeError("Cannot find the list of providers in LiteLLM. Fix: install the version in requirements.lock")


async def load() -> Any:
    """Return the ``litellm`` module. The first caller waits for the import, in a thread. Raises ``ImportError``."""
    return _loaded[0] if _loaded else await asyncio.to_thread(_load)


def untested_version() -> str | None:
    """Return the installed version of LiteLLM if it isn't of the tested line. This doesn't import it."""
    from importlib.metadata import version  # takes as long as ten other modules

    installed = version("litellm")
    return None if installed.startswith(f"{TESTED}.") else installed


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


def copied_headers(response: Any) -> Mapping[str, str]:
    """Return LiteLLM's copy of the provider's headers."""
    copied = getattr(response, "_hidden_params", {}).get("additional_headers") or {}
    return {name.removeprefix("llm_provider-"): str(value) for name, value in copied.items() if value}
