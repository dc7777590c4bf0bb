"""What LiteLLM recognises: by its own list of words, and by the exception that it makes of an answer."""

from __future__ import annotations

import contextlib
import io
import logging
import os

import httpx

from bench.overflow.lines import Line
from proxy.overflow import Overflow

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # Read while it is imported: no list of prices is fetched.

import litellm
from litellm.litellm_core_utils.exception_mapping_utils import ExceptionCheckers, exception_type
from litellm.llms.base_llm.chat.transformation import BaseLLMException

RECOGNISED = Overflow("input", None, None, None, None, "compact")
"""It says no more than that: neither limit nor size."""


def by_words(line: Line) -> Overflow | None:
    """Its list of sentences, on the whole body."""
    found = ExceptionCheckers.is_error_str_context_window_exceeded(line.body.decode())
    return RECOGNISED if found else None


def by_exception(line: Line) -> Overflow | None:
    """The class of the exception that it maps the answer to, told which provider it is from."""
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
            return RECOGNISED
        except Exception:  # noqa: BLE001 - whatever else it is called, it is no overflow
            return None
    return None
