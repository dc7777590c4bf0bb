"""Requests in other APIs as chat completions that every server accepts."""

from __future__ import annotations

import asyncio
import itertools
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

import msgspec

from proxy.errors import BadBody, ErrorShape, UpstreamInterrupted
from proxy.http import sse
from proxy.upstream.bridge.completions import UNREADABLE, AnswerBuilder, Completion, Event
from proxy.upstream.bridge.transport import (
    BROKEN,
    Translation,
    Translator,
    decoded_object,
    event_data,
    without_compression,
)
from proxy.upstream.transport import CHAT_PATH, Outgoing, output_field

FIELDS = frozenset(
    {
        *("model", "messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "stop"),
        *("temperature", "top_p", "max_tokens", "stream", "stream_options", "user", "reasoning_effort"),
        *("service_tier", "safety_identifier", "prompt_cache_key"),
    }
)
"""Fields of a translated request. LiteLLM's own and the ones of hosted tools aren't for the upstream."""

_BATCH = 100
"""Events between two turns of other requests."""

_MESSAGE_FIELDS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"})
_FOR_TRANSLATION = frozenset({"thinking_blocks", "cache_control"})
_CALL_FIELDS = ("id", "type", "function")


class ChatTranslation(Translation):
    """A request in another API as a chat request, and the way back. ``request`` is LiteLLM's chat request."""

    request: Mapping[str, Any]

    @abstractmethod
    def builder(self) -> AnswerBuilder:
        """Return a builder of the answer."""

    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return the answer for a chat completion."""
        builder = self.builder()
        completion = Completion(builder)
        for _ in itertools.chain(completion.feed(answer), completion.finish()):
            pass
        return builder.answer

    async def events(self, body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the events for a chat stream. Raises ``UpstreamInterrupted`` if it has no finish reason."""
        completion = Completion(self.builder())
        sent = itertools.count(1)
        async for made in _steps(completion, body):
            for event in made:
                yield sse.encode(msgspec.json.encode(event), event["type"])
                if next(sent) % _BATCH == 0:
                    await asyncio.sleep(0)


async def _steps(completion: Completion, body: AsyncIterator[bytes]) -> AsyncIterator[Iterator[Event]]:
    """Yield the events of each chunk, and of the end."""
    try:
        async for data in event_data(body):
            if data == b"[DONE]":
                break
            yield completion.feed(decoded_object(data, UNREADABLE))
    except UpstreamInterrupted:
        if completion.reason is None:
            raise
    if completion.reason is None:
        raise UpstreamInterrupted(BROKEN)
    yield completion.finish()


def chat_translator(
    translation: Callable[[Any, dict[str, Any]], ChatTranslation],
    error: Callable[[Mapping[str, Any], int], dict[str, Any]],
    error_event: Callable[[Mapping[str, Any], int, int], bytes],
    shape: ErrorShape,
) -> Translator:
    """Return the translator of an API to chat completions.

    ``translation`` gets LiteLLM and the request's body. The others are as in ``Translator``.
    """

    def translate(litellm: Any, request: Outgoing, translated: bool) -> tuple[Outgoing, Translation]:
        made = translation(litellm, {**body_of(request), "model": request.model})
        chat = plain(made.request, request.model, translated=translated)
        if request.alternated is not None:
            chat["messages"] = request.alternated(chat["messages"])
        if request.stream:
            chat |= {"stream": True, "stream_options": {"include_usage": True}}
        else:
            chat.pop("stream", None)
            chat.pop("stream_options", None)
        headers = [pair for pair in without_compression(request.headers) if not pair[0].startswith("anthropic-")]
        body = msgspec.json.encode(chat)
        return msgspec.structs.replace(request, body=body, path=CHAT_PATH, query="", headers=headers), made

    return Translator(translate, _is_completion, error, error_event, UNREADABLE, shape)


def body_of(request: Outgoing) -> dict[str, Any]:
    """Return a request's body. Raises ``BadBody`` if it isn't a JSON object."""
    try:
        body = msgspec.json.decode(request.body if request.expanded is None else request.expanded())
    except (ValueError, RecursionError) as error:
        raise BadBody("The body isn't JSON, so the proxy can't translate it for this upstream.") from error
    if not isinstance(body, dict):
        raise BadBody("The body must be a JSON object.")
    return body


def _is_completion(value: Mapping[str, Any]) -> bool:
    return bool(value.get("choices")) and not value.get("error")


def plain(request: Mapping[str, Any], model: str, *, translated: bool) -> dict[str, Any]:
    """Return LiteLLM's chat request as one that servers accept. ``translated``: LiteLLM translates it once more.

    Servers accept images in user messages only, so those of results follow the results.
    """
    body = {name: value for name, value in request.items() if name in FIELDS and value is not None}
    body["model"] = model
    fields = _MESSAGE_FIELDS | _FOR_TRANSLATION if translated else _MESSAGE_FIELDS
    messages = [_message(message, fields) for message in request["messages"]]
    body["messages"] = messages if translated else list(_pictures_after_results(messages))
    tools = [tool for tool in body.pop("tools", ()) if tool.get("type") == "function" and "function" in tool]
    if tools:
        body["tools"] = tools
    else:
        body.pop("tool_choice", None)
        body.pop("parallel_tool_calls", None)
    if not translated and "max_tokens" in body:
        body[output_field(model)] = body.pop("max_tokens")
    return body


def _message(message: Mapping[str, Any], fields: frozenset[str]) -> dict[str, Any]:
    kept = {
        name: value for name, value in message.items() if name in fields and (value is not None or name == "content")
    }
    if kept["role"] == "developer":  # the chat templates of open models have no such role
        kept["role"] = "system"
    calls = kept.pop("tool_calls", None)
    if calls:
        kept["tool_calls"] = [{name: call[name] for name in _CALL_FIELDS if name in call} for call in calls]
    elif kept["role"] == "assistant" and kept.get("content") is None:
        kept["content"] = ""
    return kept


def _pictures_after_results(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Move the images of results to the user message after the results, or to a new one."""
    made: list[dict[str, Any]] = []
    pictures: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            content = message["content"]
            if isinstance(content, list):
                texts = [part for part in content if part.get("type") == "text"]
                pictures += [part for part in content if part.get("type") != "text"]
                message["content"] = "\n".join(part["text"] for part in texts)
        elif pictures:
            if message["role"] == "user":
                content = message["content"]
                parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
                message["content"] = [*pictures, *parts]
            else:
                made.append({"role": "user", "content": pictures})
            pictures = []
        made.append(message)
    return [*made, {"role": "user", "content": pictures}] if pictures else made
