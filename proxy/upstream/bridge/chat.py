"""Chat completions as the bridges send and read them: requests that every server accepts, and streams in chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec

from proxy.errors import UpstreamInterrupted
from proxy.http.sse import EventSplitter, data_of, split_events
from proxy.upstream.transport import output_field

BROKEN = "The upstream broke off in the middle of its answer. Send the request again."
UNREADABLE = "The upstream's answer isn't a chat completion. Ask the operator to check the setting 'speaks'."

FIELDS = frozenset(
    {
        *("model", "messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "stop"),
        *("temperature", "top_p", "max_tokens", "stream", "stream_options", "user", "reasoning_effort"),
        *("service_tier", "safety_identifier", "prompt_cache_key"),
    }
)
"""Fields of a translated request. LiteLLM's own and the ones of hosted tools aren't for the upstream."""

_MESSAGE_FIELDS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"})
_FOR_TRANSLATION = frozenset({"thinking_blocks", "cache_control"})
_CALL_FIELDS = ("id", "type", "function")


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
                own = message["content"]
                message["content"] = [*pictures, *([{"type": "text", "text": own}] if isinstance(own, str) else own)]
            else:
                made.append({"role": "user", "content": pictures})
            pictures = []
        made.append(message)
    return [*made, {"role": "user", "content": pictures}] if pictures else made


def with_reasoning(part: dict[str, Any]) -> None:
    """Rename ``reasoning`` of a message or delta, as vLLM and OpenRouter write it, to LiteLLM's name."""
    if isinstance(part.get("reasoning"), str) and not part.get("reasoning_content"):
        part["reasoning_content"] = part["reasoning"]
    part.pop("reasoning", None)


class Failed(Exception):
    """A stream contains an error. ``error`` is the upstream's object."""

    def __init__(self, error: Mapping[str, Any]) -> None:
        super().__init__("the stream contains an error")
        self.error = error


async def chunks(body: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """Yield the chunks of a chat stream up to its end.

    Raises ``Failed`` at an error, and ``UpstreamInterrupted`` if the stream ends without a finish reason.
    """
    splitter = EventSplitter()
    finished = False
    async for received in body:
        for lines in split_events(splitter.feed(received)):
            data = data_of(lines)
            if data == b"[DONE]":
                return
            if not data:
                continue
            chunk = _decoded(data)
            if isinstance(error := chunk.get("error"), Mapping | str):
                raise Failed(error if isinstance(error, Mapping) else {"message": error})
            for choice in chunk.get("choices") or ():
                finished = finished or choice.get("finish_reason") is not None
                with_reasoning(choice.setdefault("delta", {}))
            yield chunk
    if not finished:
        raise UpstreamInterrupted(BROKEN)


def _decoded(data: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UpstreamInterrupted(UNREADABLE) from error
    if not isinstance(value, dict):
        raise UpstreamInterrupted(UNREADABLE)
    return value
