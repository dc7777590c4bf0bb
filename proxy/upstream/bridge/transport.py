"""Send requests in an API that the upstream doesn't have, in one that it has.

LiteLLM's functions translate the request and the answer. The request itself goes through the upstream's transport for
the other API, so keys, addresses, time limits, and the upstream's own errors stay as they are. LiteLLM's own calls,
such as ``aresponses``, would open connections of their own and wrap errors in LiteLLM's words.
"""

from __future__ import annotations

import asyncio
import importlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog

from proxy.config.upstreams import Api
from proxy.errors import BadBody, ErrorShape, RequestError, UpstreamInterrupted
from proxy.http.sse import EventSplitter, data_of, split_events
from proxy.overflow import recognise
from proxy.upstream.litellm import library as litellm_library
from proxy.upstream.transport import EVENT_STREAM, JSON, Answer, Headers, Held, Outgoing, Transport

log = structlog.get_logger(__name__)

TRANSLATORS: Mapping[tuple[Api, Api], str] = {
    ("messages", "chat"): "proxy.upstream.bridge.messages",
    ("responses", "chat"): "proxy.upstream.bridge.responses",
    ("chat", "responses"): "proxy.upstream.bridge.over_responses",
}
"""The modules with a ``TRANSLATOR``, by the client's API and the upstream's. Chat completions are the hub."""

BROKEN = "The upstream broke off in the middle of its answer. Send the request again."

LARGE = 262_144
"""A body of more bytes is translated in a thread."""

ANSWER_BYTES = 16_000_000
"""The longest answer that the proxy translates as a whole."""

_REPLACED = frozenset({"content-type", "content-length", "content-encoding"})

# LiteLLM's functions expect valid requests and answers, and raise any of these for others.
_INVALID = (KeyError, TypeError, ValueError, AttributeError, RecursionError)


class Translation(ABC):
    """The way back for the answer to one translated request."""

    @abstractmethod
    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return the answer in the client's API. May raise any error for an answer that isn't valid."""

    @abstractmethod
    def events(self, body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the events of a stream in the client's API. Raises ``ErrorInStream``, as well as any other error."""


@dataclass(frozen=True, slots=True)
class Translator:
    """Translates requests of one API to another.

    ``translate`` gets LiteLLM, the request, and whether LiteLLM translates the result once more. It raises
    ``RequestError`` for a request that the other API can't express, and may raise any error for one that isn't valid.
    ``is_answer`` returns whether a JSON object is an answer and not an error. ``error`` returns an error in the
    client's API for the fields of the upstream's error and a status, and ``error_event`` the event for one in a stream.
    ``untranslatable`` and ``unreadable`` are the messages for requests and answers that aren't valid. ``shape`` is the
    shape of the client's errors. ``same_errors`` says that both APIs have the same shape, so that errors stay as sent.
    """

    translate: Callable[[Any, Outgoing, bool], tuple[Outgoing, Translation]]
    is_answer: Callable[[Mapping[str, Any]], bool]
    error: Callable[[Mapping[str, Any], int], dict[str, Any]]
    error_event: Callable[[Mapping[str, Any]], bytes]
    untranslatable: str
    unreadable: str
    shape: ErrorShape = "openai"
    same_errors: bool = False


class ErrorInStream(Exception):
    """A stream contains an error. ``error`` is the upstream's object."""

    def __init__(self, error: Mapping[str, Any]) -> None:
        super().__init__("the stream contains an error")
        self.error = error


class Bridge(Transport):
    """Sends requests of the API ``client`` over ``transport``, which sends those of the API ``upstream``.

    ``translated`` says that LiteLLM translates these requests once more, for example to Gemini's format.
    """

    def __init__(self, client: Api, upstream: Api, transport: Transport, *, translated: bool = False) -> None:
        # Imported here so that a deployment that only relays doesn't load it.
        self._translator: Translator = importlib.import_module(TRANSLATORS[client, upstream]).TRANSLATOR
        self._transport = transport
        self._translated = translated

    async def send(self, request: Outgoing) -> Answer:
        """Send the request. A request that can't be translated gets an answer with status 400."""
        try:
            ready, translation = await self.translate(request)
        except RequestError as error:
            return Answer.whole(error.status, [JSON], error.body(self._translator.shape))
        return await self.exchange(ready, translation)

    async def translate(self, request: Outgoing) -> tuple[Outgoing, Translation]:
        """Return the translated request, and the translation of its answer. Raises ``RequestError``."""
        litellm = await litellm_library.load()
        if len(request.body) > LARGE or request.expanded is not None:
            return await asyncio.to_thread(self._translate, litellm, request)
        return self._translate(litellm, request)

    def _translate(self, litellm: Any, request: Outgoing) -> tuple[Outgoing, Translation]:
        try:
            return self._translator.translate(litellm, request, self._translated)
        except _INVALID as error:
            log.exception("translation.failed", of="request")
            raise BadBody(self._translator.untranslatable) from error

    async def exchange(self, request: Outgoing, translation: Translation) -> Answer:
        """Send a translated request, and translate its answer."""
        answer = await self._transport.send(request)
        if self._translator.same_errors and answer.status != 200:
            return answer
        try:
            if answer.status >= 400:
                return await self._error(answer, await self._read(Held(answer)))
            if request.stream and _is_stream(answer):
                events = self._events(answer, translation)
                return Answer(
                    200, [EVENT_STREAM, *_kept(answer)], events, answer.close, answer.keeps_request, answer.begun
                )
            return await self._whole(answer, translation)
        except BaseException:
            await answer.close()
            raise

    async def _whole(self, answer: Answer, translation: Translation) -> Answer:
        raw = await self._read(answer.body)
        try:
            value = msgspec.json.decode(raw)
        except (ValueError, RecursionError) as error:
            raise self._unreadable() from error
        if not isinstance(value, dict) or not self._translator.is_answer(value):
            has_error = isinstance(value, dict) and bool(value.get("error"))
            if not has_error and recognise(answer.status, raw, answer.headers) is None:
                raise self._unreadable()
            return await self._error(answer, raw)
        try:
            translated = await asyncio.to_thread(translation.whole, value)
        except _INVALID as error:
            log.exception("translation.failed", of="response")
            raise self._unreadable() from error
        await answer.close()
        return Answer.whole(200, [JSON, *_kept(answer)], msgspec.json.encode(translated))

    async def _error(self, answer: Answer, raw: bytes) -> Answer:
        """Return an error in the shape of the client's API. An error with a success status gets 400 or 502."""
        await answer.close()
        status = answer.status
        if status < 400:
            status = 400 if recognise(status, raw, answer.headers) is not None else 502
        body = msgspec.json.encode(self._translator.error(_error_fields(raw), status))
        return Answer.whole(status, [JSON, *_kept(answer)], body)

    async def _events(self, answer: Answer, translation: Translation) -> AsyncIterator[bytes]:
        try:
            async for event in translation.events(answer.body):
                yield event
        except ErrorInStream as error:
            yield self._translator.error_event(error.error)
        except _INVALID as error:
            log.exception("translation.failed", of="stream")
            raise self._unreadable() from error
        finally:
            await answer.close()

    async def _read(self, body: AsyncIterator[bytes]) -> bytes:
        read = bytearray()
        async for chunk in body:
            read += chunk
            if len(read) > ANSWER_BYTES:
                raise self._unreadable()
        return bytes(read)

    def _unreadable(self) -> UpstreamInterrupted:
        return UpstreamInterrupted(self._translator.unreadable)


async def event_data(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the data of each event in a stream."""
    splitter = EventSplitter()
    async for received in body:
        for lines in split_events(splitter.feed(received)):
            if data := data_of(lines):
                yield data


def decoded_object(data: bytes, unreadable: str) -> dict[str, Any]:
    """Return a JSON object. Raises ``UpstreamInterrupted`` with the message ``unreadable`` for anything else."""
    try:
        value = msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:
        raise UpstreamInterrupted(unreadable) from error
    if not isinstance(value, dict):
        raise UpstreamInterrupted(unreadable)
    return value


def openai_error(fields: Mapping[str, Any], status: int) -> dict[str, Any]:
    """Return an error in the shape of OpenAI's APIs, for ``Translator.error``."""
    return {"error": dict(fields)}


def without_compression(headers: Headers) -> Headers:
    """Return headers for a request whose answer the proxy reads."""
    return [pair for pair in headers if pair[0] != "accept-encoding"]


def _error_fields(raw: bytes) -> dict[str, Any]:
    """Return the fields of an upstream's error: those of OpenAI's shape, or a message with the text."""
    try:
        value = msgspec.json.decode(raw)
    except (ValueError, RecursionError):
        return {"message": raw.decode("utf-8", "replace").strip(), "type": "upstream_error"}
    error = value.get("error", value) if isinstance(value, dict) else value
    if isinstance(error, dict):
        return error if error.get("message") else {**error, "message": msgspec.json.encode(error).decode()}
    return {"message": error if isinstance(error, str) else raw.decode(), "type": "upstream_error"}


def _kept(answer: Answer) -> Headers:
    return [pair for pair in answer.headers if pair[0] not in _REPLACED]


def _is_stream(answer: Answer) -> bool:
    return any(
        name == "content-type" and value.lower().startswith("text/event-stream") for name, value in answer.headers
    )
