"""LiteLLM's recognition, by the exception class that it selects."""

from __future__ import annotations

import contextlib
import io
import logging
import os

import httpx

from bench.overflow.lines import Line
from proxy.overflow import Overflow

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # Read at import time. It prevents a download.

import litellm
from litellm.litellm_core_utils.exception_mapping_utils import exception_type
from litellm.llms.base_llm.chat.transformation import BaseLLMException

RECOGNIZED = Overflow("input", None, None, None, None, "compact")
"""LiteLLM reads neither limit nor size."""


def by_exception(line: Line) -> Overflow | None:
    """Have LiteLLM map the response to an exception. LiteLLM knows the provider."""
    if line.silent:
        return None
    request = httpx.Request("POST", "http://upstream/v1/chat/completions")
    response = httpx.Response(line.status, headers=dict(line.headers), content=line.body, request=request)
    original = BaseLLMException(line.status, line.body.decode(), response=response)
    logging.getLogger("LiteLLM").setLevel(logging.CRITICAL)
    litellm.suppress_debug_info = True
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            exception_type(model="model", original_exception=original, custom_llm_provider=line.litellm)
        except litellm.ContextWindowExceededError:
            return RECOGNIZED
        except Exception:  # noqa: BLE001 - any other exception isn't an overflow
            return None
    return None
