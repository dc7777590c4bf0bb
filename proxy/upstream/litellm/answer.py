"""Convert LiteLLM's answers to OpenAI's format, without LiteLLM's own fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.upstream.litellm import errors as translate_errors
from proxy.upstream.transport import Headers

_TOP = ("id", "object", "created", "model", "choices", "usage", "system_fingerprint", "service_tier")
_CHOICE = ("index", "finish_reason", "logprobs")
_MESSAGE = (
    *("role", "content", "refusal", "tool_calls", "function_call", "audio", "annotations"),
    *("reasoning_content", "thinking_blocks"),  # clients must send them back, or tools after reasoning fail
)
_TOOL_CALL = ("index", "id", "type", "function")
_USAGE = ("prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details", "completion_tokens_details")

# Fields that OpenAI always writes, even as null.
_KEPT_NULLS = frozenset({"content", "finish_reason"})


def completion(response: Any) -> dict[str, Any]:
    """Convert a LiteLLM ``ModelResponse`` to a ``chat.completion``."""
    return _clean(response.model_dump(warnings=False), part="message")


def chunk(response: Any) -> dict[str, Any]:
    """Convert a LiteLLM ``ModelResponseStream`` to a ``chat.completion.chunk``."""
    cleaned = _clean(response.model_dump(warnings=False), part="delta")
    if "usage" in cleaned and not any(choice["delta"] or choice["finish_reason"] for choice in cleaned["choices"]):
        cleaned["choices"] = []  # OpenAI's usage chunk has no choices.
    return cleaned


def request_id(response: Any) -> Headers:
    """Return ``x-request-id``, the provider's request id, from LiteLLM's copy of the headers."""
    copied = getattr(response, "_hidden_params", {}).get("additional_headers") or {}
    headers = {name.removeprefix("llm_provider-"): str(value) for name, value in copied.items() if value}
    return [header for header in translate_errors.answer_headers(headers) if header[0] == "x-request-id"]


def _clean(answer: Mapping[str, Any], *, part: str) -> dict[str, Any]:
    cleaned = _only(answer, _TOP)
    cleaned["choices"] = [_choice(choice, part) for choice in answer.get("choices") or ()]
    usage = answer.get("usage")
    # LiteLLM reports a prompt of 0 tokens if the provider reported nothing.
    if usage and usage.get("prompt_tokens"):
        cleaned["usage"] = {key: _present(value) for key, value in _only(usage, _USAGE).items()}
    else:
        cleaned.pop("usage", None)
    return cleaned


def _choice(choice: Mapping[str, Any], part: str) -> dict[str, Any]:
    cleaned = _only(choice, _CHOICE)
    cleaned.setdefault("finish_reason", None)
    message = choice.get(part) or {}
    cleaned[part] = _only(message, _MESSAGE)
    if part == "message":
        cleaned[part].setdefault("content", None)
    if calls := message.get("tool_calls"):
        cleaned[part]["tool_calls"] = [_only(call, _TOOL_CALL) for call in calls]
        if part == "message":
            for call in cleaned[part]["tool_calls"]:
                call.pop("index", None)
    return cleaned


def _only(value: Mapping[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    return {name: _present(value[name]) for name in fields if value.get(name) not in (None, [])}


def _present(value: Any) -> Any:
    """Remove nulls, which LiteLLM writes for every field that the provider omits."""
    if isinstance(value, dict):
        return {key: _present(item) for key, item in value.items() if item is not None or key in _KEPT_NULLS}
    if isinstance(value, list):
        return [_present(item) for item in value]
    return value
