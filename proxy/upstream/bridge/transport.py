"""Send requests in an API that the upstream doesn't have as chat completions.

LiteLLM's functions translate the request and the answer. The request itself goes through the upstream's transport for
chat completions, so keys, addresses, time limits, and the upstream's own errors stay as they are. LiteLLM's own calls,
such as ``aresponses``, would open connections of their own and wrap errors in LiteLLM's words.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec

from proxy.errors import BadBody, RequestError, UpstreamInterrupted
from proxy.overflow import recognise
from proxy.upstream.bridge.calls import ordered, with_ids
from proxy.upstream.bridge.chat import UNREADABLE, Failed, chunks, plain
from proxy.upstream.bridge.translation import Translation, Translator
from proxy.upstream.litellm import library as litellm_library
from proxy.upstream.transport import CHAT_PATH, MESSAGES_PATH, RESPONSES_PATH, Answer, Headers, Outgoing, Transport

TRANSLATORS: Mapping[str, tuple[str, str]] = {
    MESSAGES_PATH: ("proxy.upstream.bridge.messages", "MessagesTranslator"),
    RESPONSES_PATH: ("proxy.upstream.bridge.responses", "ResponsesTranslator"),
}
"""The translator of each path, by module and class."""

LARGE = 262_144
"""A body of more bytes is translated in a thread."""

ANSWER_BYTES = 16_000_000
"""The longest answer that the proxy translates as a whole."""

_REPLACED = frozenset({"content-type", "content-length", "content-encoding"})
_EVENTS = ("content-type", "text/event-stream; charset=utf-8")
_JSON = ("content-type", "application/json")


class Bridge:
    """Sends the requests of one path over an upstream's transport for chat completions.

    ``translated`` says that LiteLLM translates the chat request once more, for example to Gemini's format.
    """

    def __init__(self, path: str, chat: Transport, *, translated: bool) -> None:
        module, name = TRANSLATORS[path]
        self._translator: Translator = getattr(importlib.import_module(module), name)()
        self._chat = chat
        self._translated = translated

    async def send(self, request: Outgoing) -> Answer:
        """Send the request. A request that can't be translated gets an answer with status 400."""
        try:
            ready, translation = await self.translate(request)
        except RequestError as error:
            return Answer(error.status, [_JSON], _once(error.body(self._translator.errors)), _nothing)
        return await self.exchange(ready, translation)

    async def translate(self, request: Outgoing) -> tuple[Outgoing, Translation]:
        """Return the chat request, and the translation of its answer. Raises ``RequestError``."""
        litellm = await litellm_library.load()
        if len(request.body) > LARGE or request.expanded is not None:
            return await asyncio.to_thread(self._outgoing, litellm, request)
        return self._outgoing(litellm, request)

    def _outgoing(self, litellm: Any, request: Outgoing) -> tuple[Outgoing, Translation]:
        try:
            body = msgspec.json.decode(request.body if request.expanded is None else request.expanded())
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadBody("The body isn't JSON, so the proxy can't translate it for this upstream.") from error
        if not isinstance(body, dict):
            raise BadBody("The body must be a JSON object.")
        try:
            translation = self._translator.translate(litellm, {**body, "model": request.model})
            chat = plain(translation.request, request.model, translated=self._translated)
            if request.alternated is not None:
                chat["messages"] = request.alternated(chat["messages"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            # LiteLLM's functions expect valid requests, and raise any of these for others.
            raise BadBody(
                "The proxy can't translate the request to chat completions. Check its messages and tools."
            ) from error
        if request.stream:
            chat |= {"stream": True, "stream_options": {"include_usage": True}}
        else:
            chat.pop("stream", None)
            chat.pop("stream_options", None)
        sent = msgspec.structs.replace(
            request, body=msgspec.json.encode(chat), path=CHAT_PATH, query="", headers=_for_chat(request.headers)
        )
        return sent, translation

    async def exchange(self, request: Outgoing, translation: Translation) -> Answer:
        """Send a translated request, and translate its answer."""
        answer = await self._chat.send(request)
        try:
            if answer.status >= 400:
                return await self._error(answer, await _read(answer))
            if request.stream and _is_stream(answer):
                body = self._events(answer, translation)
                return Answer(200, [_EVENTS, *_kept(answer)], body, answer.close, answer.keeps_request)
            return await self._whole(answer, translation)
        except BaseException:
            await answer.close()
            raise

    async def _whole(self, answer: Answer, translation: Translation) -> Answer:
        raw = await _read(answer)
        try:
            completion = msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UpstreamInterrupted(UNREADABLE) from error
        if not isinstance(completion, dict) or completion.get("error") or not completion.get("choices"):
            if recognise(answer.status, raw, answer.headers) is None and not _has_error(completion):
                raise UpstreamInterrupted(UNREADABLE)
            return await self._error(answer, raw)
        try:
            with_ids(completion)
            made = await asyncio.to_thread(translation.whole, completion)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UpstreamInterrupted(UNREADABLE) from error
        await answer.close()
        return Answer(200, [_JSON, *_kept(answer)], _once(msgspec.json.encode(made)), _nothing)

    async def _error(self, answer: Answer, raw: bytes) -> Answer:
        """Return an error in the shape of the client's API. An error with a success status gets 400 or 502."""
        await answer.close()
        status = answer.status
        if status < 400:
            status = 400 if recognise(status, raw, answer.headers) is not None else 502
        body = msgspec.json.encode(self._translator.error(error_fields(raw), status))
        return Answer(status, [_JSON, *_kept(answer)], _once(body), _nothing)

    async def _events(self, answer: Answer, translation: Translation) -> AsyncIterator[bytes]:
        try:
            async for event in translation.events(ordered(chunks(answer.body))):
                yield event
        except Failed as failed:
            yield self._translator.error_event(failed.error)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UpstreamInterrupted(UNREADABLE) from error
        finally:
            await answer.close()

    async def retire(self) -> None:
        """Do nothing, because the transport for chat completions is retired by its owner."""

    async def aclose(self) -> None:
        """Do nothing, because the transport for chat completions is closed by its owner."""


def error_fields(raw: bytes) -> dict[str, Any]:
    """Return the fields of an upstream's error: those of OpenAI's shape, or a message with the text."""
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {"message": raw.decode("utf-8", "replace").strip(), "type": "upstream_error"}
    found = value.get("error", value) if isinstance(value, dict) else value
    if isinstance(found, dict):
        return found if found.get("message") else {**found, "message": msgspec.json.encode(found).decode()}
    return {"message": found if isinstance(found, str) else raw.decode(), "type": "upstream_error"}


def _has_error(completion: object) -> bool:
    return isinstance(completion, dict) and bool(completion.get("error"))


def _for_chat(headers: Headers) -> Headers:
    """Return a client's headers without those of Anthropic's API. The answer must not be compressed."""
    return [pair for pair in headers if pair[0] != "accept-encoding" and not pair[0].startswith("anthropic-")]


def _kept(answer: Answer) -> Headers:
    return [pair for pair in answer.headers if pair[0] not in _REPLACED]


def _is_stream(answer: Answer) -> bool:
    return any(
        name == "content-type" and value.lower().startswith("text/event-stream") for name, value in answer.headers
    )


async def _read(answer: Answer) -> bytes:
    read = bytearray()
    async for chunk in answer.body:
        read += chunk
        if len(read) > ANSWER_BYTES:
            raise UpstreamInterrupted(UNREADABLE)
    return bytes(read)


async def _once(body: bytes) -> AsyncIterator[bytes]:
    yield body


async def _nothing() -> None:
    """Do nothing, because the answer was read whole."""
