"""Extract the text of a conversation that every chat template keeps.

Chat templates and gateways drop parts of a history: the reasoning of earlier turns (Qwen3, DeepSeek-R1), tools and
their results (templates without them), fields that they don't support, images. A reported size without such a part
isn't a sign that a prompt was cut.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_KEPT_ROLES = ("system", "developer", "user", "assistant")
_TOOL_ROLES = ("tool", "function")
_TEXT_PARTS = ("text", "input_text", "output_text")
_CALL = re.compile(rb'"(?:tool_call_id|tool_calls|function_call)"')
_THOUGHTS_END = re.compile(r"</(?:think|thinking|thought|reasoning)>|<\|(?:end_of_thought|channel)\|>")

_MANAGED = re.compile(rb'"(?:context_management|truncation|transforms|truncate_prompt_tokens)"\s*:')
"""Request fields that ask the upstream to shorten the prompt."""


def asks_for_cuts(raw: bytes) -> bool:
    """Return whether a request body asks the upstream to shorten the prompt."""
    return _MANAGED.search(raw) is not None


def has_calls(message: bytes) -> bool:
    """Return whether a message, as JSON, has a tool call or a tool's result."""
    return _CALL.search(message) is not None


def kept_text(message: object, *, tools: bool) -> str:
    """Return the text of a message that every template keeps. ``tools``: this template keeps tool results."""
    if not isinstance(message, Mapping):
        return ""
    role = message.get("role")
    if role not in _KEPT_ROLES and not (tools and role in _TOOL_ROLES):
        return ""
    text = _text(message.get("content"))
    return _THOUGHTS_END.split(text)[-1] if role == "assistant" else text


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        return ""
    parts = (part for part in content if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS)
    return "\n".join(text for part in parts if isinstance(text := part.get("text"), str))
