"""Translate ``/v1/responses`` to chat completions with LiteLLM's transformation."""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec

from proxy.errors import RequestError
from proxy.http import sse
from proxy.upstream.bridge.chat import ChatTranslation, chat_translator
from proxy.upstream.bridge.responses_answers import ResponseBuilder
from proxy.upstream.bridge.transport import openai_error

_PACKAGE = "litellm.responses.litellm_completion_transformation"

_STATE = ("previous_response_id", "conversation", "prompt")
"""Fields that refer to something stored at the server."""

_TOOLS = frozenset({"function", "custom"})
"""Types of tools that the client runs. An upstream without the API has no hosted ones."""

NO_STATE = (
    "This model's upstream has no Responses API, so it keeps no responses. Send the whole conversation in 'input', "
    "without '{name}'."
)
NO_REFERENCES = (
    "This model's upstream has no Responses API, and the proxy doesn't have one of the items. Send the items "
    "themselves instead of 'item_reference', for example with store: false."
)


class ResponsesTranslation(ChatTranslation):
    """A request of ``/v1/responses`` as a chat request, and the way back."""

    def __init__(self, litellm: Any, body: Mapping[str, Any]) -> None:
        config = importlib.import_module(f"{_PACKAGE}.transformation").LiteLLMCompletionResponsesConfig
        self._model = str(body["model"])
        given, added = _without_added_tools(body["input"])
        tools = [tool for tool in [*(body.get("tools") or ()), *added] if tool.get("type") in _TOOLS]
        fields = {name: value for name, value in body.items() if name not in ("input", "tools", "stream")}
        self._asked = {**fields, "tools": tools} if tools else fields
        self.request: dict[str, Any] = config.transform_responses_api_request_to_chat_completion_request(
            model=self._model,
            input=given,
            responses_api_request=self._asked,
            custom_llm_provider="custom_openai",
            stream=body.get("stream"),
        )
        effort = (body.get("reasoning") or {}).get("effort")
        self.request["reasoning_effort"] = effort if effort and litellm.supports_reasoning(self._model) else None

    def of_completion(self, completion: dict[str, Any]) -> dict[str, Any]:
        """Return the response for a chat completion."""
        return self._builder().whole(completion)

    async def of_chunks(self, chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
        """Yield the events for the chunks of a chat stream."""
        builder = self._builder()
        async for chunk in chunks:
            for event in builder.feed(chunk):
                yield sse.encode(msgspec.json.encode(event), event["type"])
        for event in builder.finish():
            yield sse.encode(msgspec.json.encode(event), event["type"])

    def _builder(self) -> ResponseBuilder:
        tools = self._asked.get("tools") or ()
        custom = frozenset(str(tool.get("name")) for tool in tools if tool.get("type") == "custom")
        sealed = importlib.import_module(f"{_PACKAGE}.reasoning_items").encode_thinking_blocks
        return ResponseBuilder(self._asked, custom, sealed)


def _without_added_tools(given: Any) -> tuple[Any, list[dict[str, Any]]]:
    """Return the input without its items that add tools, and these tools. Chat completions have tools in one place."""
    if isinstance(given, str):
        return given, []
    rest = [item for item in given if item.get("type") != "additional_tools"]
    adding = (item for item in given if item.get("type") == "additional_tools")
    return rest, [tool for item in adding for tool in item.get("tools") or ()]


def _translation(litellm: Any, body: dict[str, Any]) -> ResponsesTranslation:
    """Translate a request. Raises ``RequestError`` for state that only the server has."""
    for name in _STATE:
        if body.get(name) is not None:
            raise RequestError(NO_STATE.format(name=name), param=name)
    items = body.get("input")
    if not isinstance(items, str) and not (isinstance(items, list) and all(isinstance(one, dict) for one in items)):
        raise RequestError("'input' must be a string or an array of objects.", param="input")
    if any(item.get("type") == "item_reference" for item in items if isinstance(item, dict)):
        raise RequestError(NO_REFERENCES, param="input")
    return ResponsesTranslation(litellm, body)


def _error_event(fields: Mapping[str, Any], status: int, number: int) -> bytes:
    event = {
        "type": "error",
        "code": fields.get("code") or fields.get("type"),
        "message": str(fields.get("message") or "The upstream returned an error."),
        "param": fields.get("param"),
        "sequence_number": number,
    }
    return sse.encode(msgspec.json.encode(event), "error")


TRANSLATOR = chat_translator(_translation, openai_error, _error_event, "openai")
