"""Send chat completions to an upstream that only has ``/v1/responses``.

LiteLLM's functions translate requests and answers, as in ``bridge.transport``. Requests in Anthropic's API become chat
completions there first. The upstream doesn't store the responses, because clients of these APIs can't refer to them.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import msgspec

from proxy.errors import BadBody, UpstreamInterrupted
from proxy.http import sse
from proxy.http.sse import EventSplitter, data_of, split_events
from proxy.overflow import recognise
from proxy.upstream.bridge.chat import BROKEN
from proxy.upstream.bridge.transport import ANSWER_BYTES, LARGE, error_fields
from proxy.upstream.litellm import answer as litellm_answer
from proxy.upstream.litellm import library as litellm_library
from proxy.upstream.litellm.request import MESSAGE_FIELDS, PARAMETERS
from proxy.upstream.relay import RelayTransport
from proxy.upstream.transport import RESPONSES_PATH, Answer, Outgoing

UNREADABLE = "The upstream's answer isn't a response of /v1/responses. Ask the operator to check the setting 'speaks'."

_MODULE = "litellm.completion_extras.litellm_responses_transformation.transformation"
_INTERNAL = frozenset({"litellm_logging_obj", "client"})
_REPLACED = frozenset({"content-type", "content-length", "content-encoding"})
_ERRORS = frozenset({"error", "response.failed"})
_ENDS = frozenset({"response.completed", "response.incomplete"})


class _Unlogged:
    """What LiteLLM expects in place of its logging object."""


class OverResponses:
    """Sends chat completions to ``/responses`` of one upstream. ``relay`` is closed by its owner."""

    def __init__(self, relay: RelayTransport) -> None:
        self._relay = relay

    async def send(self, request: Outgoing) -> Answer:
        """Send the request. A request that can't be translated gets an answer with status 400.

        The upstream's errors have the same shape in both APIs.
        """
        await litellm_library.load()
        try:
            if len(request.body) > LARGE:
                body, usage = await asyncio.to_thread(_translated, request)
            else:
                body, usage = _translated(request)
        except BadBody as error:
            return Answer(error.status, [("content-type", "application/json")], _raw(error.body()), _nothing)
        headers = [pair for pair in request.headers if pair[0] != "accept-encoding"]
        answer = await self._relay.send(
            msgspec.structs.replace(request, body=body, path=RESPONSES_PATH, query="", headers=headers)
        )
        if answer.status != 200:
            return answer
        try:
            kind = next((value for name, value in answer.headers if name == "content-type"), "")
            if request.stream and kind.lower().startswith("text/event-stream"):
                stream = _Stream(request.model, usage=usage)
                return _made(answer, "text/event-stream; charset=utf-8", stream.chunks(answer), close=answer.close)
            return await _whole(answer)
        except BaseException:
            await answer.close()
            raise

    async def retire(self) -> None:
        """Do nothing, because the relay is retired by its owner."""

    async def aclose(self) -> None:
        """Do nothing, because the relay is closed by its owner."""


def _translated(request: Outgoing) -> tuple[bytes, bool]:
    """Return the body for ``/responses``, and whether the client wants the usage of a stream. Raises ``BadBody``."""
    try:
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
        return msgspec.json.encode({**fields, "store": False}), usage
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        # LiteLLM's functions expect valid requests, and raise any of these for others.
        raise BadBody(
            "The proxy can't translate the request to /v1/responses. Check its messages and tools."
        ) from error


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool without empty fields. Functions are strict by default in this API, but not in chat completions."""
    kept = {name: value for name, value in tool.items() if value is not None}
    return {"strict": False, **kept} if kept.get("type") == "function" else kept


def _handler() -> Any:
    return importlib.import_module(_MODULE).LiteLLMResponsesTransformationHandler()


async def _whole(answer: Answer) -> Answer:
    raw = bytearray()
    async for chunk in answer.body:
        raw += chunk
        if len(raw) > ANSWER_BYTES:
            raise UpstreamInterrupted(UNREADABLE)
    await answer.close()
    value = _decoded(bytes(raw))
    if value.get("error"):
        status = 400 if recognise(200, bytes(raw), answer.headers) is not None else 502
        return _made(answer, "application/json", _once({"error": error_fields(bytes(raw))}), status=status)
    return _made(answer, "application/json", _once(await asyncio.to_thread(_completion, value)))


def _completion(response: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat completion for a response. Raises ``UpstreamInterrupted``."""
    types = importlib.import_module("litellm.types.utils")
    responses = importlib.import_module("litellm.types.llms.openai")
    try:
        made = _handler().transform_response(
            model=response["model"],
            raw_response=responses.ResponsesAPIResponse(**response),
            model_response=types.ModelResponse(created=int(response.get("created_at") or 0)),
            logging_obj=_Unlogged(),
            request_data={},
            messages=[],
            optional_params={},
            litellm_params={},
            encoding=None,
        )
        completion = litellm_answer.completion(made)
        if refusal := _refusal(response):
            completion["choices"][0]["message"]["refusal"] = refusal
        return completion | _tier(response)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UpstreamInterrupted(UNREADABLE) from error


def _tier(response: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field for the service tier, which LiteLLM drops."""
    tier = response.get("service_tier")
    return {} if tier is None else {"service_tier": tier}


def _refusal(response: Mapping[str, Any]) -> str:
    """Return the model's refusal, which LiteLLM drops."""
    parts = (part for item in response["output"] if item.get("type") == "message" for part in item["content"])
    return "".join(part["refusal"] for part in parts if part.get("type") == "refusal")


class _Stream:
    """Translates the events of one stream to chunks. ``usage``: the last chunk has the usage."""

    def __init__(self, model: str, *, usage: bool) -> None:
        self._usage = usage
        self._frame: dict[str, Any] = {"id": "", "object": "chat.completion.chunk", "created": 0, "model": model}
        self._parser = importlib.import_module(_MODULE).OpenAiResponsesToChatCompletionStreamIterator(
            None, sync_stream=False
        )

    async def chunks(self, answer: Answer) -> AsyncIterator[bytes]:
        """Yield the chunks. Raises ``UpstreamInterrupted`` if the stream ends without its last event."""
        splitter = EventSplitter()
        try:
            async for received in answer.body:
                for lines in split_events(splitter.feed(received)):
                    if not (data := data_of(lines)) or data == b"[DONE]":
                        continue
                    event = _decoded(data)
                    if event.get("type") in _ERRORS:
                        yield _event({"error": _error(event)})
                        return
                    for chunk in self._of(event):
                        yield _event(chunk)
                    if event.get("type") in _ENDS:
                        yield sse.encode(b"[DONE]")
                        return
        finally:
            await answer.close()
        raise UpstreamInterrupted(BROKEN)

    def _of(self, event: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
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
        try:
            made = litellm_answer.chunk(self._parser.chunk_parser(dict(event)))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UpstreamInterrupted(UNREADABLE) from error
        for choice in made["choices"]:
            delta = {name: value for name, value in choice["delta"].items() if value not in (None, "")}
            delta.pop("role", None)
            if delta or choice["finish_reason"]:
                yield self._chunk(delta, choice["finish_reason"])
        if self._usage and (usage := made.get("usage")):
            yield {**self._frame, "choices": [], "usage": usage}

    def _chunk(self, delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return {**self._frame, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


def _error(event: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the error of the event ``error`` or ``response.failed``."""
    holder = event.get("response") or event
    found = holder.get("error") or {name: event.get(name) for name in ("message", "code", "param")}
    return {"type": "server_error", **found}


def _decoded(data: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UpstreamInterrupted(UNREADABLE) from error
    if not isinstance(value, dict):
        raise UpstreamInterrupted(UNREADABLE)
    return value


def _event(value: Mapping[str, Any]) -> bytes:
    return sse.encode(msgspec.json.encode(value))


def _made(answer: Answer, kind: str, body: AsyncIterator[bytes], *, status: int = 200, close: Any = None) -> Answer:
    kept = [pair for pair in answer.headers if pair[0] not in _REPLACED]
    return Answer(status, [("content-type", kind), *kept], body, close or _nothing)


async def _once(value: Mapping[str, Any]) -> AsyncIterator[bytes]:
    yield msgspec.json.encode(value)


async def _raw(body: bytes) -> AsyncIterator[bytes]:
    yield body


async def _nothing() -> None:
    """Do nothing, because the answer was read whole."""
