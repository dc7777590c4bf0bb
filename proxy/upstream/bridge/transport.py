"""Send requests in an API that the upstream doesn't have, in one that it has.

The proxy translates the request and the answer. The request itself goes through the upstream's transport for
the other API, so keys, addresses, time limits, and the upstream's own errors stay as they are. LiteLLM's own calls,
such as ``aresponses``, would open connections of their own and wrap errors in LiteLLM's words.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog

from proxy.config.upstreams import Api
from proxy.dialects.request import without_lone_surrogates
from proxy.errors import BadBody, ErrorShape, RequestError, TranslationFailed, UpstreamInterrupted
from proxy.http import sse
from proxy.http.decompression import Unpacking
from proxy.http.sse import EventSplitter, data_of, split_events
from proxy.overflow import recognise
from proxy.overflow.errors import page_text, read_errors
from proxy.upstream.traits import RefusedRequest
from proxy.upstream.transport import EVENT_STREAM, JSON, Answer, Headers, Held, Outgoing, Transport, read_most

log = structlog.get_logger(__name__)

TRANSLATORS: Mapping[tuple[Api, Api], str] = {
    ("messages", "chat"): "proxy.upstream.bridge.messages",
    ("responses", "chat"): "proxy.upstream.bridge.responses",
    ("chat", "responses"): "proxy.upstream.bridge.over_responses",
}
"""The modules with a ``TRANSLATOR``, by the client's API and the upstream's. Chat completions are the hub."""

BROKEN = "The upstream broke off in the middle of its answer. Send the request again."

LARGE = 262_144  # a body of more bytes is translated in a thread
ANSWER_BYTES = 16_000_000  # the longest answer that the proxy translates as a whole

_REPLACED = frozenset({"content-type", "content-length", "content-encoding"})

_STATUSES = (
    (429, re.compile(r"rate_limit|quota|too_many|exhausted|429")),
    (503, re.compile(r"overload|unavailable|slow_down|capacity|503|529")),
    (504, re.compile(r"timeout|timed_out|504")),
    (400, re.compile(r"prompt|image|exceeded|policy|400")),
    (401, re.compile(r"authentication|api_key|unauthorized|401")),
    (403, re.compile(r"permission|forbidden|403")),
    (404, re.compile(r"not_found|404")),
    (413, re.compile(r"too_large|413")),
    (400, re.compile(r"invalid|unsupported|bad_request|422")),
)
"""Statuses of errors in answers with status 200, by their codes and types. The first one that matches holds."""

_OPENS = re.compile(
    rb'"type":"(?:message_start|ping|response\.created|response\.in_progress)"|"delta":\{"role":"assistant","content":""\}'
)
"""An event before the first content. An error behind it still has its own status."""

_WORDS = (
    *("message", "Message", "msg", "detail", "error", "errors", "error_message", "errorMessage", "description"),
    *("faultstring", "fault", "title", "reason"),
)
"""Fields with the words of an error, or with an error inside."""

_KINDS: Mapping[type, str] = {str: "a string", list: "an array", dict: "an object"}
_BODY: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("messages", "tools", "functions"), (list,)),
    **dict.fromkeys(("input", "system"), (str, list)),
    "tool_choice": (str, dict),
    **dict.fromkeys(("metadata", "output_config", "output_format", "reasoning", "stream_options"), (dict,)),
    **dict.fromkeys(("text", "thinking"), (dict,)),
    "instructions": (str,),
}
_INSIDE: Mapping[str, tuple[type, ...]] = {
    "content": (str, list, dict),
    **dict.fromkeys(("role", "type", "name", "text", "thinking", "description", "detail", "namespace"), (str,)),
    **dict.fromkeys(("id", "call_id", "tool_use_id", "tool_call_id"), (str,)),
    **dict.fromkeys(("images", "summary", "tool_calls", "tools"), (list,)),
    **dict.fromkeys(("allowed_tools", "file", "format", "function", "input_schema", "parameters"), (dict,)),
}
"""Types of the fields of a body, and of the objects inside."""
_NEEDED: Mapping[str, tuple[str, ...]] = {
    **{kind: (kind,) for kind in ("file", "image_url", "text")},
    **dict.fromkeys(("custom", "tools"), ("name",)),
    "content": ("type",),
    "messages": ("role",),
    "tool_result": ("tool_use_id",),
    "tool_use": ("id", "name"),
}
"""Fields that an object needs, by its type or the list that has it."""

UNDECODABLE = "The upstream's answer isn't compressed as its header 'content-encoding' says, or is too long. Try again."

FAILED = (
    "The proxy failed to translate the {of}. This is the proxy's fault. Fix: report it to the operator. The log line "
    "'translation.failed' has the cause."
)


class Translation(ABC):
    """The way back for the answer to one translated request."""

    counts = False  # a stream begins with the tokens of the prompt, which are in `prompt`
    reads_whole = False  # `events` also reads a whole answer, and `joined` reads a stream
    prompt = 0

    @abstractmethod
    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return the answer in the client's API. May raise any error for an answer that isn't valid."""

    async def joined(self, stream: bytes) -> dict[str, Any]:
        """Return the answer in the client's API for a stream."""
        raise NotImplementedError

    @abstractmethod
    def events(self, body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the events of a stream in the client's API. Raises ``ErrorInStream``, as well as any other error."""


@dataclass(frozen=True, slots=True)
class Translator:
    """Translates requests of one API to another. ``translate`` raises ``RequestError`` for what it can't express."""

    translate: Callable[[Outgoing, bool], tuple[Outgoing, Translation]]  # also gets if LiteLLM translates again
    is_answer: Callable[[Mapping[str, Any]], bool]  # whether an object is an answer and not an error
    error: Callable[[Mapping[str, Any], int], dict[str, Any]]  # in the client's API, for fields and a status
    error_event: Callable[[Mapping[str, Any], int, int], bytes]  # also gets the number of the events before it
    unreadable: str  # the message for an answer that isn't valid
    shape: ErrorShape = "openai"  # that of the client's errors


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
        if len(request.body) > LARGE or request.expanded is not None:
            return await asyncio.to_thread(self._translate, request)
        return self._translate(request)

    def _translate(self, request: Outgoing) -> tuple[Outgoing, Translation]:
        try:
            return self._translator.translate(request, self._translated)
        except RequestError:
            raise
        except Exception as error:
            if where := _misshapen(body_of(request)):
                raise BadBody(f"The proxy can't translate the request: {where}. Fix: correct it.") from error
            log.exception("translation.failed", of="request")
            raise TranslationFailed(FAILED.format(of="request")) from error

    async def exchange(self, request: Outgoing, translation: Translation) -> Answer:
        """Send a translated request, and translate its answer."""
        answer = await self._transport.send(request)
        if request.watch is not None and not isinstance(self._transport, Bridge):
            request.watch(answer, request.path)
        answer = _decompressed(answer)
        try:
            if answer.status >= 400:
                made = await self._error(answer, await self._read(Held(answer)), request)
            elif request.stream and answer.is_stream:
                made = await self._stream(answer, translation, request)
            else:
                made = await self._whole(answer, translation, request)
            made.edited = answer.edited or request.edited
            return made
        except BaseException:
            await answer.close()
            raise

    async def _whole(self, answer: Answer, translation: Translation, request: Outgoing) -> Answer:
        """Return the translated answer of a server that sent none of the stream that the client may have wanted."""
        raw = await self._read(answer.body)
        if answer.is_stream and translation.reads_whole:  # some servers always stream
            return await self._answered(answer, translation.joined(raw), request)
        try:
            value = decoded(raw)
        except (ValueError, RecursionError) as error:
            raise self._unreadable() from error
        if not isinstance(value, dict) or not self._translator.is_answer(value):
            has_error = isinstance(value, dict) and bool(value.get("error"))
            if not has_error and recognise(answer.status, raw, answer.headers) is None:
                raise self._unreadable()
            return await self._error(answer, raw, request)
        if request.stream and translation.reads_whole:
            event = sse.encode(msgspec.json.encode(value))
            return await self._stream(Answer.whole(200, answer.headers, event), translation, request)
        return await self._answered(answer, asyncio.to_thread(translation.whole, value), request)

    async def _answered(self, answer: Answer, translating: Awaitable[dict[str, Any]], request: Outgoing) -> Answer:
        try:
            translated = await translating
        except ErrorInStream as error:
            return await self._error(answer, _error_bytes(error), request)
        except UpstreamInterrupted:
            raise
        except Exception as error:
            log.exception("translation.failed", of="response")
            raise TranslationFailed(FAILED.format(of="answer")) from error
        await answer.close()
        return Answer.whole(200, [JSON, *_kept(answer)], msgspec.json.encode(translated))

    async def _error(self, answer: Answer, raw: bytes, request: Outgoing) -> Answer:
        """Return an error in the shape of the client's API. An error with a success status gets one that it names."""
        await answer.close()
        status = answer.status
        if status < 400:
            status = 400 if recognise(status, raw, answer.headers) is not None else _stated(raw)
        body = msgspec.json.encode(self._translator.error(_error_fields(raw), status))
        made = Answer.whole(status, [JSON, *_kept(answer)], body)
        made.refused = answer.refused or RefusedRequest(status, raw, request.body)
        return made

    async def _stream(self, answer: Answer, translation: Translation, request: Outgoing) -> Answer:
        """Return a translated stream, or an error with its own status if the stream has nothing before it."""
        if request.count is not None and translation.counts:
            translation.prompt = await request.count() or 0
        events, begun = self._events(answer, translation), answer.start_time or asyncio.get_running_loop().time()
        made = Answer(200, [EVENT_STREAM, *_kept(answer)], events, answer.close, answer.keeps_request, begun)
        first: list[bytes] = []
        try:
            async for event in Held(made):
                first.append(event)
                if not _OPENS.search(event):
                    break
        except ErrorInStream as error:
            return await self._error(answer, _error_bytes(error), request)
        made.body = self._reported(first, made.body)
        return made

    async def _reported(self, first: list[bytes], events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield events. An error in the stream becomes the last one."""
        count = len(first)
        try:
            for event in first:
                yield event
            async for event in events:
                count += 1
                yield event
        except ErrorInStream as error:
            raw = _error_bytes(error)
            yield self._translator.error_event(_error_fields(raw), _stated(raw), count)

    async def _events(self, answer: Answer, translation: Translation) -> AsyncIterator[bytes]:
        try:
            async for event in translation.events(answer.body):
                yield event
        except (ErrorInStream, UpstreamInterrupted):
            raise
        except Exception as error:
            log.exception("translation.failed", of="stream")
            raise TranslationFailed(FAILED.format(of="answer")) from error

    async def _read(self, body: AsyncIterator[bytes]) -> bytes:
        read, whole = await read_most(body, ANSWER_BYTES)
        if not whole:
            raise self._unreadable()
        return read

    def _unreadable(self) -> UpstreamInterrupted:
        return UpstreamInterrupted(self._translator.unreadable)


async def event_data(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the data of each event in a stream."""
    splitter = EventSplitter()
    async for received in body:
        for lines in split_events(splitter.feed(received)):
            if data := data_of(lines):
                yield data


def decoded(data: bytes) -> Any:
    """Return JSON. Others also write halves of surrogate pairs, ``-Infinity``, and numbers that no double can hold."""
    try:
        return msgspec.json.decode(data)
    except ValueError:
        data = without_lone_surrogates(data)
        value = json.loads(data, parse_constant=lambda _: None, parse_float=_bounded, parse_int=_bounded)
        return msgspec.json.decode(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))


def _bounded(number: str) -> float:
    if len(number) < 300 and "." not in number and "e" not in number.lower():
        return int(number)
    return max(-sys.float_info.max, min(float(number), sys.float_info.max))


def body_of(request: Outgoing) -> dict[str, Any]:
    """Return a request's body. Raises ``BadBody`` if it isn't a JSON object."""
    try:
        body = decoded(request.body if request.expanded is None else request.expanded())
    except (ValueError, RecursionError) as error:
        raise BadBody("The body isn't JSON, so the proxy can't translate it for this upstream.") from error
    if not isinstance(body, dict):
        raise BadBody("The body must be a JSON object.")
    return body


def decoded_object(data: bytes, unreadable: str) -> dict[str, Any]:
    """Return a JSON object. Raises ``UpstreamInterrupted`` with the message ``unreadable`` for anything else."""
    try:
        value = decoded(data)
    except (ValueError, RecursionError) as error:
        raise UpstreamInterrupted(unreadable) from error
    value = value[0] if isinstance(value, list) and value else value  # Google's errors
    if not isinstance(value, dict):
        raise UpstreamInterrupted(unreadable)
    return value


def openai_error(fields: Mapping[str, Any], status: int) -> dict[str, Any]:
    """Return an error in the shape of OpenAI's APIs, for ``Translator.error``."""
    return {"error": dict(fields)}


def without_compression(headers: Headers) -> Headers:
    """Return headers for a request whose answer the proxy reads."""
    return [*(pair for pair in headers if pair[0] != "accept-encoding"), ("accept-encoding", "identity")]


def _decompressed(answer: Answer) -> Answer:
    """Return an answer without compression. Some servers and CDNs compress although the request asks for none."""
    encoding = ",".join(value for name, value in answer.headers if name == "content-encoding")
    if encoding.strip().lower() in ("", "identity"):
        return answer
    headers = [pair for pair in answer.headers if pair[0] not in ("content-encoding", "content-length")]
    return msgspec.structs.replace(answer, headers=headers, body=_unpacked(answer.body, encoding))


async def _unpacked(body: AsyncIterator[bytes], encoding: str) -> AsyncIterator[bytes]:
    """Decompress a body. One that isn't compressed as its header says is yielded as it is."""
    unpacking, begun = Unpacking(encoding, ANSWER_BYTES), False
    async for chunk in body:
        unpacking.feed(chunk)
        piece = unpacking.take()
        if not unpacking.ended:
            yield piece
        elif begun:
            raise UpstreamInterrupted(UNDECODABLE)
        else:
            yield chunk
            async for rest in body:
                yield rest
        begun = True


def _misshapen(value: Mapping[str, Any], path: str = "", needed: Sequence[str] = ()) -> str | None:
    """Return what is wrong with the form of a body, or of an object inside it at ``path``."""
    for name, kinds in (_INSIDE if path else _BODY).items():
        inner, here = value.get(name), f"{path}.{name}" if path else name
        if inner is not None and not isinstance(inner, kinds):
            return f"'{here}' must be {' or '.join(_KINDS[kind] for kind in kinds)}"
        objects: list[Any] = inner if isinstance(inner, list) else [inner] if isinstance(inner, dict) else []
        for number, one in enumerate(objects):
            place = f"{here}[{number}]" if objects is inner else here
            if not isinstance(one, dict):
                return f"'{place}' must be an object"
            if where := _misshapen(one, place, _NEEDED.get(str(one.get("type") or name), ())):
                return where
    lacking = next((name for name in needed if value.get(name) is None), None)
    return f"'{path}' needs '{lacking}'" if lacking else None


def _stated(raw: bytes) -> int:
    """Return the status that an error in an answer with status 200 names, by default 502."""
    codes = {code for error in read_errors(200, raw) for code in error.codes}
    return next((status for status, named in _STATUSES if any(map(named.search, codes))), 502)


def _error_bytes(error: ErrorInStream) -> bytes:
    return msgspec.json.encode({"error": error.error})


def _error_fields(raw: bytes) -> dict[str, Any]:
    """Return the fields of an upstream's error: those of OpenAI's shape, or a message with the text."""
    try:
        value = msgspec.json.decode(raw)
    except (ValueError, RecursionError):
        text = raw.decode("utf-8", "replace").strip()
        return {
            "message": " ".join(page_text(text).split()) if text.startswith("<") else text,
            "type": "upstream_error",
        }
    first = value[0] if isinstance(value, list) and value else value  # Google's compatible endpoint sends an array
    error = first.get("error", first) if isinstance(first, dict) else first
    fields = error if isinstance(error, dict) else {"type": "upstream_error"}
    return {**fields, "message": _said(value) or raw.decode("utf-8", "replace")}


def _said(value: Any) -> str:
    """Return the words of an error, such as those of a list of faults with their places."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "; ".join(filter(None, map(_said, value)))
    if not isinstance(value, dict):
        return ""
    said = next(filter(None, (_said(value.get(name)) for name in _WORDS)), "")
    place = ".".join(map(str, value["loc"])) if isinstance(value.get("loc"), list) else ""
    return f"{place}: {said}" if place and said else said


def _kept(answer: Answer) -> Headers:
    return [pair for pair in answer.headers if pair[0] not in _REPLACED]
