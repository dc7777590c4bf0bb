"""Decide whether the proxy and an upstream count the same parts of a request.

Upstreams put fields into the prompt that the proxy doesn't count, such as ``documents``. Their templates drop parts
that the proxy does count, such as the ``reasoning_content`` of earlier turns. The usage of such a request shows nothing
about tokenizers, so only requests made of known parts are compared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from proxy.constants import UNDECODABLE

_FIELDS = frozenset(
    {
        *("model", "messages", "tools", "functions", "tool_choice", "function_call", "response_format"),
        *("stream", "stream_options", "n", "stop", "seed", "user", "metadata", "store", "service_tier"),
        *("max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "logit_bias"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs", "top_logprobs"),
        *("parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"),
        *("reasoning_effort", "verbosity"),
    }
)
"""Fields that the proxy counts, or that no provider puts into the prompt except for a few tokens."""

_MESSAGE = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "function_call", "id", "cache_control", "annotations"}
)

_PART = frozenset({"type", "text", "cache_control"})

FORMAT_PART = 20
"""Divide a body's bytes by this for the most that a response format may take. Not every upstream counts its schema."""

_PLAIN_VALUE = 200
"""Bytes that an unknown field may have if it adds no text."""

_TEXT, _FUNCTION = b'"text"', b'"function"'
_EMPTY = frozenset({b"null", b"[]", b"{}", b'""', b"false"})

# Chat templates and gateways drop parts of a history: the reasoning of earlier turns (Qwen3, DeepSeek-R1), tools and
# their results (templates without them), fields that they don't support, images. A reported size without such a part
# isn't a sign that a prompt was cut.
_KEPT_ROLES = ("system", "developer", "user", "assistant")
_TOOL_ROLES = ("tool", "function")
_TEXT_PARTS = ("text", "input_text", "output_text")
_CALL = re.compile(rb'"(?:tool_call_id|tool_calls|function_call)"')
_THOUGHTS_END = re.compile(r"</(?:think|thinking|thought|reasoning)>|<\|(?:end_of_thought|channel)\|>")

_Object = dict[str, msgspec.Raw]

_body = msgspec.json.Decoder(_Object)
_objects = msgspec.json.Decoder(list[_Object] | None)
_NONE = msgspec.Raw(b"null")


def comparable(raw: bytes) -> bool:
    """Return whether the proxy's count of a body and an upstream's usage cover the same parts.

    Reads every byte once: 1 to 2 ms per MB.
    """
    try:
        fields = _body.decode(raw)
        if not known_only(fields, _FIELDS) or len(bytes(fields.get("response_format", b""))) * FORMAT_PART > len(raw):
            return False
        tools = _objects.decode(fields.get("tools", _NONE)) or ()
        # Tools that the provider runs, such as a search, put their results into the prompt.
        if any(bytes(tool.get("type", b"")) != _FUNCTION for tool in tools):
            return False
        messages = _objects.decode(fields["messages"]) or ()
        return all(known_only(message, _MESSAGE) and _plain(message) for message in messages)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError):
        return False


def adds_text(raw: bytes) -> bool:
    """Return whether a body has a field that may add text to the prompt besides the messages, such as ``documents``.

    Unknown fields with a few plain values, such as the ``options`` of Ollama, add none.
    """
    try:
        fields = _body.decode(raw)
    except UNDECODABLE:
        return True
    return has_unknown_text(fields, _FIELDS)


def has_unknown_text(fields: Mapping[str, msgspec.Raw], known: frozenset[str]) -> bool:
    """Return whether a field that isn't known may add text to the prompt."""
    unknown = (bytes(value) for name, value in fields.items() if name not in known)
    return any((len(value) > _PLAIN_VALUE or b"[" in value) and value not in _EMPTY for value in unknown)


def has_calls(unit: bytes) -> bool:
    """Return whether a message has a tool call or a tool's result."""
    return _CALL.search(unit) is not None


def kept_text(unit: bytes, *, tools: bool) -> str:
    """Return the text of a message that every template keeps. ``tools``: this template keeps tool results."""
    message = msgspec.json.decode(unit)
    if not isinstance(message, Mapping):
        return ""
    role = message.get("role")
    if role not in _KEPT_ROLES and not (tools and role in _TOOL_ROLES):
        return ""
    text = _text(message.get("content"))
    return _THOUGHTS_END.split(text)[-1] if role == "assistant" else text


def known_only(fields: Mapping[str, msgspec.Raw], known: frozenset[str]) -> bool:
    """Return whether every field is a known one, or empty: ``null`` adds nothing to a prompt."""
    return all(name in known or bytes(value) in _EMPTY for name, value in fields.items())


def _plain(message: Mapping[str, msgspec.Raw]) -> bool:
    """Return whether the content is text only."""
    content = bytes(message.get("content", b""))
    if not content.startswith(b"["):
        return not content.startswith(b"{")
    return all(
        known_only(part, _PART) and bytes(part.get("type", _TEXT)) == _TEXT for part in _objects.decode(content) or ()
    )


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        return ""
    parts = (part for part in content if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS)
    return "\n".join(text for part in parts if isinstance(text := part.get("text"), str))
