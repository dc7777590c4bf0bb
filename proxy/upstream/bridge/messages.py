"""Translate ``/v1/messages`` to chat completions and back, with LiteLLM's adapter."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import msgspec

from proxy.errors import RequestError, anthropic_type
from proxy.http import sse
from proxy.overflow import recognise
from proxy.upstream.bridge.chat import ChatTranslation, chat_translator
from proxy.upstream.bridge.messages_answers import MessageBuilder

_ADAPTERS = "litellm.llms.anthropic.pass_through.adapters"

# LiteLLM decides by the model's name whether the upstream is Anthropic's. Here it never is.
NEUTRAL = "bridged"

OVERFLOW = "prompt is too long"
"""The words by which Anthropic's clients, such as Claude Code, recognize an overflow."""

_FIELDS = frozenset(
    {
        *("max_tokens", "metadata", "stop_sequences", "system", "temperature", "thinking", "tool_choice", "tools"),
        *("top_p", "output_format", "output_config"),
    }
)


class MessagesTranslation(ChatTranslation):
    """A request of ``/v1/messages`` as a chat request, and the way back."""

    def __init__(self, litellm: Any, body: Mapping[str, Any]) -> None:
        self._litellm = litellm
        self._model = body["model"]
        self._stops = body.get("stop_sequences") or ()
        self._adapter = importlib.import_module(f"{_ADAPTERS}.transformation").LiteLLMAnthropicMessagesAdapter()
        fields = {name: value for name, value in body.items() if name in _FIELDS and value is not None}
        fields["tools"] = [tool for tool in fields.get("tools") or () if tool.get("type") in (None, "custom")]
        request, self._names = self._adapter.translate_anthropic_to_openai(
            {**fields, "model": NEUTRAL, "messages": body["messages"]}, custom_llm_provider="custom_openai"
        )
        self.request = {**request, "reasoning_effort": self._effort(request.get("reasoning_effort"))}
        if (body.get("tool_choice") or {}).get("disable_parallel_tool_use"):
            self.request["parallel_tool_calls"] = False

    def _effort(self, effort: Any) -> str | None:
        """Return the effort for models that are known to reason. Others reject the parameter."""
        value = effort.get("effort") if isinstance(effort, Mapping) else effort
        return value if value and self._litellm.supports_reasoning(self._model) else None

    def builder(self) -> MessageBuilder:
        """Return a builder of the message."""
        return MessageBuilder(self._model, self._names, self._stops)


def _translation(litellm: Any, body: dict[str, Any]) -> MessagesTranslation:
    """Translate a request. Raises ``RequestError`` if it has no messages."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
        raise RequestError("'messages' must be a non-empty array of objects.", param="messages")
    return MessagesTranslation(litellm, body)


def _error(fields: Mapping[str, Any], status: int) -> dict[str, Any]:
    """Return the error in Anthropic's shape, with its words for an overflow before the upstream's own."""
    message = str(fields.get("message") or "The upstream returned an error.")
    plain = msgspec.json.encode({"error": dict(fields)})
    if OVERFLOW not in message.lower() and recognise(status, plain) is not None:
        message = f"{OVERFLOW}: {message}"
    return {"type": "error", "error": {"type": anthropic_type(status), "message": message}}


def _error_event(fields: Mapping[str, Any], status: int, number: int) -> bytes:
    return sse.encode(msgspec.json.encode(_error(fields, status)), "error")


TRANSLATOR = chat_translator(_translation, _error, _error_event, "anthropic")
