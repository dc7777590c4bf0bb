"""Translate ``/v1/responses`` to chat completions and back, with LiteLLM's transformation."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec

from proxy.errors import ErrorShape, RequestError
from proxy.http import sse
from proxy.upstream.bridge.chat import with_reasoning

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
    "This model's upstream has no Responses API, so it keeps no items. Send the items themselves instead of "
    "'item_reference', for example with store: false."
)


class _Chunks:
    """The part of LiteLLM's stream object that its iterator uses."""

    logging_obj = None

    def __init__(self, chunks: AsyncIterator[Any]) -> None:
        self._chunks = chunks

    async def __anext__(self) -> Any:
        return await anext(self._chunks)


class ResponsesTranslation:
    """See ``translation.Translation``."""

    def __init__(self, litellm: Any, body: Mapping[str, Any]) -> None:
        self._litellm = litellm
        self._config = importlib.import_module(f"{_PACKAGE}.transformation").LiteLLMCompletionResponsesConfig
        self._model = str(body["model"])
        hoisted = importlib.import_module("litellm.responses.additional_tools").hoist_additional_tools(
            body["input"], body.get("tools")
        )
        tools = [tool for tool in hoisted.tools if tool.get("type") in _TOOLS]
        fields = {name: value for name, value in body.items() if name not in ("input", "tools", "stream")}
        self._asked = {**fields, "tools": tools} if tools else fields
        self.request: dict[str, Any] = self._config.transform_responses_api_request_to_chat_completion_request(
            model=self._model,
            input=hoisted.input,
            responses_api_request=self._asked,
            custom_llm_provider="custom_openai",
            stream=body.get("stream"),
        )
        effort = (body.get("reasoning") or {}).get("effort")
        self.request["reasoning_effort"] = effort if effort and litellm.supports_reasoning(self._model) else None

    def whole(self, completion: dict[str, Any]) -> dict[str, Any]:
        """Return the response for a chat completion. Raises ``ValueError`` if it isn't one."""
        for choice in completion["choices"]:
            with_reasoning(choice["message"])
        response = self._config.transform_chat_completion_response_to_responses_api_response(
            request_input="", responses_api_request=self._asked, chat_completion_response=completion
        )
        dumped: dict[str, Any] = response.model_dump(mode="json", exclude_none=True)
        return self._completed(dumped, str(completion.get("id")))

    def _completed(self, response: dict[str, Any], id: str) -> dict[str, Any]:
        """Add the fields that LiteLLM omits, and replace its id, which contains LiteLLM's own names."""
        response["id"] = f"resp_{id.removeprefix('resp_')}"
        response["parallel_tool_calls"] = self._asked.get("parallel_tool_calls", True)
        response["store"] = False
        for name in ("error", "incomplete_details"):
            response.setdefault(name, None)
        response["output"] = [
            item for item in response.get("output") or () if item.get("type") != "message" or _has_text(item)
        ]
        return response

    async def events(self, chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
        """Yield the events for the chunks of a chat stream."""
        ids: list[str] = []
        iterator = importlib.import_module(f"{_PACKAGE}.streaming_iterator").LiteLLMCompletionStreamingIterator(
            model=self._model,
            litellm_custom_stream_wrapper=_Chunks(self._parsed(chunks, ids)),
            request_input="",
            responses_api_request=self._asked,
        )
        numbers = itertools.count()
        async for made in iterator:
            event = made.model_dump(mode="json", exclude_none=True)
            event["sequence_number"] = next(numbers)
            if isinstance(event.get("response"), dict):
                self._completed(event["response"], ids[0] if ids else "0")
            yield sse.encode(msgspec.json.encode(event), event["type"])

    async def _parsed(self, chunks: AsyncIterator[dict[str, Any]], ids: list[str]) -> AsyncIterator[Any]:
        async for chunk in chunks:
            if not ids and chunk.get("id"):
                ids.append(str(chunk["id"]))
            yield self._litellm.types.utils.ModelResponseStream(**chunk)


class ResponsesTranslator:
    """See ``translation.Translator``."""

    errors: ErrorShape = "openai"

    def translate(self, litellm: Any, body: dict[str, Any]) -> ResponsesTranslation:
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

    def error(self, fields: Mapping[str, Any], status: int) -> dict[str, Any]:
        """Return the error, which has the same shape in both of OpenAI's APIs."""
        return {"error": dict(fields)}

    def error_event(self, fields: Mapping[str, Any]) -> bytes:
        """Return the event ``error``."""
        event = {
            "type": "error",
            "code": fields.get("code") or fields.get("type"),
            "message": str(fields.get("message") or "The upstream returned an error."),
            "param": fields.get("param"),
            "sequence_number": 0,
        }
        return sse.encode(msgspec.json.encode(event), "error")


def _has_text(item: Mapping[str, Any]) -> bool:
    return any(part.get("text") or part.get("refusal") for part in item.get("content") or ())
