"""Requests in other APIs as chat completions that every server accepts."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import msgspec

from proxy.dialects.parts import SILENT, Table
from proxy.dialects.units import encode
from proxy.dialects.walk import TEXT_FILE, file_text, row_of
from proxy.errors import ErrorShape, RequestError, UpstreamInterrupted
from proxy.http import sse
from proxy.upstream.bridge.completions import UNREADABLE, AnswerBuilder, Bounded, Completion, Event
from proxy.upstream.bridge.returned import Writer, restored
from proxy.upstream.bridge.transport import (
    BROKEN,
    Translation,
    Translator,
    body_of,
    decoded_object,
    event_data,
    without_compression,
)
from proxy.upstream.traits import apply, known
from proxy.upstream.transport import CHAT_PATH, Answer, Outgoing, output_field

FIELDS = frozenset(
    {
        *("model", "messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "stop"),
        *("temperature", "top_p", "max_tokens", "stream", "stream_options", "user", "reasoning_effort"),
        *("service_tier", "safety_identifier", "prompt_cache_key"),
    }
)
"""Fields of a translated request."""

_BATCH = 100  # events between two turns of other requests

_ROLES = ("user", "assistant", "system", "developer")
NO_ROLE = "{path}.role: must be user, assistant, system, or developer (got {got})."
NO_RESULT = "[no result]"
NO_CALL = "[result without a call]"
LOST = (
    "{place}: the upstream has chat completions only, and the proxy can't translate all of this. "
    "Fix: send an image or a PDF in base64, and anything else as text."
)

_TEXTS = frozenset({"text", "refusal"})
_MESSAGE_FIELDS = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "thinking_blocks"}
)
_CALL_FIELDS = ("id", "type", "function")


class ChatTranslation(Translation):
    """A request in another API as a chat request, and the way back."""

    table: Table
    silent: frozenset[str] = SILENT  # fields of these parts that need not leave
    reads_whole = True
    request: Mapping[str, Any]  # the chat request
    given: Mapping[str, Any]  # parts of the body whose texts must leave with it, except reasoning
    names: Mapping[str, str]  # the client's names of tools by the ones sent
    writer: Writer
    unsent: tuple[Sequence[str], bool] = ((), False)  # stop sequences, and `single` calls, that an edit left out

    @abstractmethod
    def builder(self) -> AnswerBuilder:
        """Return a builder of the answer."""

    def _completion(self, builder: AnswerBuilder) -> Completion:
        stops, single = self.unsent
        return Completion(Bounded(builder, stops, single=single) if stops or single else builder, self.writer)

    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        builder = self.builder()
        completion = self._completion(builder)
        deque(itertools.chain(completion.feed(answer), completion.finish()), maxlen=0)
        return builder.answer

    async def joined(self, stream: bytes) -> dict[str, Any]:
        """Return the answer for a chat stream. Raises ``UpstreamInterrupted`` if it has no finish reason."""
        builder = self.builder()
        async for made in _steps(self._completion(builder), Answer.whole(200, [], stream).body):
            deque(made, maxlen=0)
        return builder.answer

    async def events(self, body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the events for a chat stream. Raises ``UpstreamInterrupted`` if it has no finish reason."""
        completion = self._completion(self.builder())
        sent = itertools.count(1)
        async for made in _steps(completion, body):
            for event in made:
                yield sse.encode(msgspec.json.encode(event), event["type"])
                if next(sent) % _BATCH == 0:
                    await asyncio.sleep(0)


async def _steps(completion: Completion, body: AsyncIterator[bytes]) -> AsyncIterator[Iterator[Event]]:
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
    translation: Callable[..., ChatTranslation],
    error: Callable[[Mapping[str, Any], int], dict[str, Any]],
    error_event: Callable[[Mapping[str, Any], int, int], bytes],
    shape: ErrorShape,
) -> Translator:
    """Return the translator to chat completions. ``translation`` also gets if models take efforts."""

    def translate(request: Outgoing, translated: bool) -> tuple[Outgoing, Translation]:
        made = translation({**body_of(request), "model": request.model}, reasons=request.reasons)
        chat = plain(made.request, request, translated=translated)
        _refuse_loss(made, chat)
        chat["messages"] = restored(map(_joined, chat["messages"]), request.model, signed=translated)
        calls = (call["id"] for message in made.request["messages"] for call in message.get("tool_calls") or ())
        made.writer = Writer(request.model, calls)
        if request.stream:
            chat |= {"stream": True, "stream_options": {"include_usage": True}}
        else:
            chat.pop("stream", None)
            chat.pop("stream_options", None)
        headers = [pair for pair in without_compression(request.headers) if not pair[0].startswith("anthropic-")]
        stops, single = chat.get("stop") or [], chat.get("parallel_tool_calls") is False
        stops = [stops] if isinstance(stops, str) else stops
        edited = apply(chat, (*known(request.family or request.model), *request.edits))
        stops = [stop for stop in stops if stop and stop not in (chat.get("stop") or ())]
        made.unsent = stops, single and "parallel_tool_calls" not in chat
        body = encode(chat)
        sent = msgspec.structs.replace(request, body=body, path=CHAT_PATH, query="", headers=headers, edited=edited)
        return sent, made

    return Translator(translate, _is_completion, error, error_event, UNREADABLE, shape)


def check_role(message: Mapping[str, Any], path: str) -> None:
    """Raise ``RequestError`` if a message has another role."""
    if message.get("role") not in _ROLES:
        raise RequestError(NO_ROLE.format(path=path, got=message.get("role")), param=f"{path}.role")


def _is_completion(value: Mapping[str, Any]) -> bool:
    return bool(value.get("choices")) and not value.get("error")


def plain(request: Mapping[str, Any], going: Outgoing, *, translated: bool) -> dict[str, Any]:
    """Return a chat request as one that servers accept. ``translated``: LiteLLM translates it once more.

    Results follow their calls, and the images and files of results follow the results.
    """
    body = {name: value for name, value in request.items() if name in FIELDS and value is not None}
    body["model"] = going.model
    fields = _MESSAGE_FIELDS | {"cache_control"} if translated else _MESSAGE_FIELDS
    messages = _in_pairs(_message(message, fields) for message in request["messages"])
    body["messages"] = list(messages if translated else _media_after_results(messages))
    tools = [tool for tool in body.pop("tools", ()) if tool.get("type") == "function" and "function" in tool]
    if tools:
        body["tools"] = tools
    else:
        body.pop("tool_choice", None)
        body.pop("parallel_tool_calls", None)
    if not translated and "max_tokens" in body:
        body[output_field(going.family or going.model)] = body.pop("max_tokens")
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


def _in_pairs(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with each result right behind its call. A result without a call becomes the user's."""
    groups: list[list[dict[str, Any]]] = []
    waiting: dict[str, tuple[list[dict[str, Any]], list[int]]] = {}
    for message in messages:
        calls = message.get("tool_calls", ())
        group = [message, *({"role": "tool", "tool_call_id": call["id"], "content": NO_RESULT} for call in calls)]
        waiting |= {call["id"]: (group, []) for call in calls}
        for place, call in enumerate(calls, 1):
            waiting[call["id"]][1].append(place)
        if message["role"] != "tool":
            groups.append(group)
        elif (found := waiting.get(message["tool_call_id"])) and found[1]:
            found[0][found[1].pop(0)] = message
        else:
            groups.append([{"role": "user", "content": [{"type": "text", "text": NO_CALL}, *_parts_of(message)]}])
    return [message for group in groups for message in group]


def _parts_of(message: Mapping[str, Any]) -> list[Any]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content or []


def _media_after_results(messages: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Move media that aren't the user's to the user message after the results, or to a new one."""
    media: list[dict[str, Any]] = []
    for message in messages:
        if isinstance(message["content"], str) and not media:
            yield message
            continue
        parts = _parts_of(message)
        if message["role"] == "user":
            yield {**message, "content": [*media, *parts]}
            media = []
            continue
        if media and message["role"] != "tool":
            yield {"role": "user", "content": media}
            media = []
        media += [part for part in parts if part["type"] not in _TEXTS]
        yield {**message, "content": [part for part in parts if part["type"] in _TEXTS]}
    if media:
        yield {"role": "user", "content": media}


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its texts as one string, which every server accepts."""
    parts = _parts_of(message)
    if isinstance(message["content"], str) or any(part["type"] not in _TEXTS for part in parts):
        return message
    between = "" if message["role"] == "assistant" else "\n"
    text = between.join(part[part["type"]] for part in parts)
    return {**message, "content": text or (None if message.get("tool_calls") else "")}


def encoded(value: Any) -> str:
    return encode(value).decode()


def _refuse_loss(made: ChatTranslation, chat: Mapping[str, Any]) -> None:
    """Raise ``RequestError`` if a text of the client's request isn't in the chat request."""
    sent = {*_strings([chat["messages"], chat.get("tools")]), *made.names.values()}
    unsent = set(_unsent(made.given, made, sent))
    pieces = {piece for text in sent for piece in _pieces(text)} if unsent else set()
    for text in unsent - pieces:
        if not pieces.issuperset(text.split("\n")):
            place = next(_places(made.given, text, made.silent), "a file")
            raise RequestError(LOST.format(place=place), param=place)


def _unsent(value: Any, made: ChatTranslation, sent: Set[str]) -> Iterator[str]:
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            if value and value not in sent:
                yield value
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, dict) and (row := row_of(value, made.table)) is TEXT_FILE:
            waiting.append(file_text(value))
        elif isinstance(value, dict) and row.plays != "reasoning":
            called = value.get(row.arguments)
            known = (row.arguments,) if isinstance(called, dict) and encoded(called) in sent else ()
            waiting += [inner for name, inner in value.items() if name not in made.silent and name not in known]


def _places(value: Any, text: str, silent: Set[str], path: str = "", kind: str = "message") -> Iterator[str]:
    """Yield each path to a text, with the type of the part that has it."""
    if value == text:
        yield f"{path[1:]} ({kind})"
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from _places(inner, text, silent, f"{path}[{place}]", kind)
    elif isinstance(value, dict):
        for name in value.keys() - silent:
            yield from _places(value[name], text, silent, f"{path}.{name}", value.get("type", kind))


def _strings(value: Any) -> Iterator[str]:
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, list | dict):
            waiting += value.values() if isinstance(value, dict) else value


def _pieces(text: str) -> Iterator[str]:
    """Yield the data of a file, or the lines of a text and the strings in lines that are JSON."""
    if text.startswith("data:"):
        yield text[text.find(",") + 1 :]
        return
    for line in text.split("\n"):
        yield line
        if line.startswith(("{", "[")):
            with contextlib.suppress(ValueError, RecursionError):
                yield from _strings(msgspec.json.decode(line))
