"""Translate chat completions to ``/v1/responses`` and back, for an upstream that has nothing else.

Requests in Anthropic's API become chat completions first. The upstream doesn't store the responses, because clients of
these APIs can't refer to them.
"""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import msgspec

from proxy.errors import UpstreamInterrupted
from proxy.http import sse
from proxy.upstream.bridge.transport import (
    BROKEN,
    ErrorInStream,
    Translation,
    Translator,
    decoded_object,
    event_data,
    openai_error,
    without_compression,
)
from proxy.upstream.litellm import answers
from proxy.upstream.litellm.library import MESSAGE_FIELDS, PARAMETERS
from proxy.upstream.transport import RESPONSES_PATH, Outgoing

UNREADABLE = "The upstream's answer isn't a response of /v1/responses. Ask the operator to check the setting 'speaks'."

_MODULE = "litellm.completion_extras.litellm_responses_transformation.transformation"
_INTERNAL = frozenset({"litellm_logging_obj", "client"})
_ERRORS = frozenset({"error", "response.failed"})
_ENDS = frozenset({"response.completed", "response.incomplete"})


class _Unlogged:
    """Replaces LiteLLM's logging object."""


class ChatOverResponses(Translation):
    """The way back to chat completions. ``usage``: the last chunk of a stream has the usage."""

    def __init__(self, model: str, *, usage: bool) -> None:
        self._usage = usage
        self._frame: dict[str, Any] = {"id": "", "object": "chat.completion.chunk", "created": 0, "model": model}
        self._parser = importlib.import_module(_MODULE).OpenAiResponsesToChatCompletionStreamIterator(
            None, sync_stream=False
        )

    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return the chat completion for a response."""
        types = importlib.import_module("litellm.types.utils")
        responses = importlib.import_module("litellm.types.llms.openai")
        made = _handler().transform_response(
            model=answer["model"],
            raw_response=responses.ResponsesAPIResponse(**answer),
            model_response=types.ModelResponse(created=int(answer.get("created_at") or 0)),
            logging_obj=_Unlogged(),
            request_data={},
            messages=[],
            optional_params={},
            litellm_params={},
            encoding=None,
        )
        completion = answers.completion(made)
        if refusal := _refusal(answer):
            completion["choices"][0]["message"]["refusal"] = refusal
        return completion | _tier(answer)

    async def events(self, body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the chunks. Raises ``UpstreamInterrupted`` if the stream ends without its last event."""
        async for data in event_data(body):
            if data == b"[DONE]":
                continue
            event = decoded_object(data, UNREADABLE)
            if event.get("type") in _ERRORS:
                raise ErrorInStream(_error_in(event))
            for chunk in self._chunks(event):
                yield _event(chunk)
            if event.get("type") in _ENDS:
                yield sse.encode(b"[DONE]")
                return
        raise UpstreamInterrupted(BROKEN)

    def _chunks(self, event: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        match event.get("type"):
            case "response.created":
                response = event["response"]
                self._frame |= {"id": response["id"], "created": int(response.get("created_at") or 0)}
                yield self._chunk({"role": "assistant", "content": ""}, None)
                return
            case "response.refusal.delta":
                yield self._chunk({"refusal": event["delta"]}, None)
                return
            case str(name) if name.endswith(".delta") and not event.get("delta"):
                return
            case str(name) if name in _ENDS:
                self._frame |= _tier(event["response"])
        made = answers.chunk(self._parser.chunk_parser(dict(event)))
        for choice in made["choices"]:
            delta = {name: value for name, value in choice["delta"].items() if value not in (None, "")}
            delta.pop("role", None)
            if delta or choice["finish_reason"]:
                yield self._chunk(delta, choice["finish_reason"])
        if self._usage and (usage := made.get("usage")):
            yield {**self._frame, "choices": [], "usage": usage}

    def _chunk(self, delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return {**self._frame, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


def _translate(litellm: Any, request: Outgoing, translated: bool) -> tuple[Outgoing, Translation]:
    body = msgspec.json.decode(request.body)
    chosen = {name: value for name, value in body.items() if name in PARAMETERS and value is not None}
    usage = bool((chosen.pop("stream_options", None) or {}).get("include_usage"))
    messages = [
        {name: value for name, value in message.items() if name in MESSAGE_FIELDS} for message in body["messages"]
    ]
    made: Mapping[str, Any] = _handler().transform_request(
        model=request.model,
        messages=messages,
        optional_params=chosen | {"stream": request.stream},
        litellm_params={},
        headers={},
        litellm_logging_obj=_Unlogged(),
    )
    fields = {name: value for name, value in made.items() if name not in _INTERNAL and value is not None}
    if tools := fields.get("tools"):
        fields["tools"] = [_tool(tool) for tool in tools]
    sent = msgspec.structs.replace(
        request,
        body=msgspec.json.encode({**fields, "store": False}),
        path=RESPONSES_PATH,
        query="",
        headers=without_compression(request.headers),
    )
    return sent, ChatOverResponses(request.model, usage=usage)


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool without empty fields. Functions are strict by default in this API, but not in chat completions."""
    kept = {name: value for name, value in tool.items() if value is not None}
    return {"strict": False, **kept} if kept.get("type") == "function" else kept


def _handler() -> Any:
    return importlib.import_module(_MODULE).LiteLLMResponsesTransformationHandler()


def _tier(response: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field for the service tier, which LiteLLM drops."""
    tier = response.get("service_tier")
    return {} if tier is None else {"service_tier": tier}


def _refusal(response: Mapping[str, Any]) -> str:
    """Return the model's refusal, which LiteLLM drops."""
    parts = (part for item in response["output"] if item.get("type") == "message" for part in item["content"])
    return "".join(part["refusal"] for part in parts if part.get("type") == "refusal")


def _error_in(event: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the error of the event ``error`` or ``response.failed``."""
    holder = event.get("response") or event
    stated = holder.get("error") or {name: event.get(name) for name in ("message", "code", "param")}
    return {"type": "server_error", **stated}


def _event(value: Mapping[str, Any]) -> bytes:
    return sse.encode(msgspec.json.encode(value))


def _is_response(value: Mapping[str, Any]) -> bool:
    return not value.get("error")


def _error_event(fields: Mapping[str, Any], status: int, number: int) -> bytes:
    return _event(openai_error(fields, status))


TRANSLATOR = Translator(
    translate=_translate,
    is_answer=_is_response,
    error=openai_error,
    error_event=_error_event,
    unreadable=UNREADABLE,
)
