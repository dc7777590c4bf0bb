"""Translate requests for providers that don't use OpenAI's wire format, through ``litellm.acompletion``.

Of the body, the transport sends the fields of ``request.PARAMETERS`` and the messages. It sends the configured headers
but none of the client's, which are for OpenAI's API and would only identify the client. LiteLLM drops OpenAI's
parameters that a provider doesn't have (``drop_params``), so an application that sets ``seed`` works with Anthropic.

The answer is OpenAI's JSON or server-sent events, without LiteLLM's additions. A stream that ends without the
provider's own end is an interruption, although LiteLLM reports ``stop``.

LiteLLM changes the statuses of errors (529 becomes 500), wraps the provider's JSON in its own words, and raises the
same class for a refused connection as for a bug. So this module reads the provider's status and headers, or the
network's error, from the chain of causes.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import msgspec
import structlog

from proxy import litellm_package
from proxy.errors import (
    NotAuthenticated,
    RequestError,
    UpstreamError,
    UpstreamInterrupted,
    UpstreamTimeout,
    UpstreamUnreachable,
    error_body,
)
from proxy.http import sse
from proxy.overflow import recognise
from proxy.overflow.patterns import excluded
from proxy.upstream.litellm.request import CREDENTIAL_FROM_ENVIRONMENT, api_base, arguments
from proxy.upstream.traits import RefusedRequest
from proxy.upstream.transport import EVENT_STREAM, HELD_SECONDS, JSON, Answer, Headers, Outgoing, Transport

CLIENT_PROVIDERS = frozenset({"anthropic", "gemini", "vertex_ai", "vertex_ai_beta"})
"""Providers for which LiteLLM accepts an HTTP client. The proxy's client lives as long as the transport."""

NO_KEY = (
    "No key for this model's provider. Send one as 'Authorization: Bearer …', or set 'api_key' of the upstream in the "
    "proxy's configuration."
)


_AHEAD = 8  # chunks to read ahead of the client


class LiteLLMTransport(Transport):
    """Sends requests to one upstream through LiteLLM.

    ``provider`` is LiteLLM's name for it. ``base_url`` may end in the API's version or not (``https://host``,
    ``https://host/v1``); ``None`` is the provider's own address. ``headers`` are added to each request.
    """

    def __init__(self, provider: str, base_url: str | None, api_key: str | None, headers: Mapping[str, str]) -> None:
        self._provider = provider
        self._base_url = base_url
        self._api_key = api_key
        self._headers = dict(headers)
        self._client: Any = None
        self._streams: set[LiteLLMStream] = set()
        self._busy = 0
        self._retired = False

    async def send(self, request: Outgoing) -> Answer:
        """Send the request. Errors of the provider, of LiteLLM, and of this transport are answers with an error status.

        Waits for a stream's first chunk for ``HELD_SECONDS``, because LiteLLM raises some providers' errors only there.
        """
        key = self._key(request)
        if key is None and self._provider not in CREDENTIAL_FROM_ENVIRONMENT:
            return _refused(NotAuthenticated(NO_KEY))
        try:
            call, edited = arguments(self._provider, request)
        except RequestError as error:
            return _refused(error)
        sent = call.copy()
        call |= {"api_base": api_base(self._provider, self._base_url), "api_key": key, "timeout": request.timeout}
        call |= {"extra_headers": dict(self._headers), **litellm_package.CALL}
        litellm = await litellm_package.load()
        self._busy += 1
        if self._provider in CLIENT_PROVIDERS:
            call["client"] = self._http_client()
        try:
            async with asyncio.timeout(request.timeout):
                made = await (self._stream(litellm, call) if request.stream else _whole(litellm, call))
                made.edited = edited
                return made
        except TimeoutError as error:
            raise UpstreamTimeout(TIMEOUT) from error
        except UpstreamError:
            raise
        except Exception as error:  # noqa: BLE001 - each one becomes an answer below
            drop_tracebacks(error)
            # LiteLLM raises anything from OpenAI's classes to a bare KeyError. If the provider didn't return an error,
            # the client gets a 400 or 502.
            refusal = refusal_of(error, hidden=hidden_texts(self._base_url, self._api_key, key))
            made = Answer.whole(refusal.status, refusal.headers, refusal.body)
            made.edited, made.refused = edited, RefusedRequest(refusal.status, refusal.body, msgspec.json.encode(sent))
            return made
        finally:
            self._busy -= 1
            await self._close_if_done()

    async def retire(self) -> None:
        self._retired = True
        await self._close_if_done()

    async def _close_if_done(self) -> None:
        if self._retired and not self._busy and not self._streams:
            await self.aclose()

    async def aclose(self) -> None:
        """End open streams, and close this transport's own connections."""
        await asyncio.gather(*(stream.close() for stream in tuple(self._streams)))
        if self._client is not None:
            client, self._client = self._client, None
            await client.close()

    def _key(self, request: Outgoing) -> str | None:
        if self._api_key:
            return self._api_key
        if self._provider in CREDENTIAL_FROM_ENVIRONMENT or request.credential is None:
            return None
        return request.credential.key

    def _http_client(self) -> Any:
        if self._client is None:
            self._client = litellm_package.http_client()
        return self._client

    async def _stream(self, litellm: Any, call: dict[str, Any]) -> Answer:
        stream = LiteLLMStream(litellm, call, self._streams)
        try:
            headers = await stream.start()
        except BaseException:
            await stream.close()
            raise

        async def close() -> None:
            await stream.close()
            await self._close_if_done()

        # LiteLLM's stream and its log entry refer to the messages.
        return Answer(200, headers, stream, close, keeps_request=True, start_time=stream.start_time)


async def _whole(litellm: Any, call: dict[str, Any]) -> Answer:
    response = await litellm.acompletion(**call)
    body = msgspec.json.encode(completion(response))
    return Answer.whole(200, [JSON, *request_id(response)], body)


def _refused(error: RequestError) -> Answer:
    return Answer.whole(error.status, [JSON], error.body())


class LiteLLMStream:
    """A streamed answer. One task owns the upstream's request from start to end, so canceling it ends the request.

    Yields server-sent events up to ``[DONE]``. Raises ``UpstreamInterrupted`` if the provider breaks off. It isn't a
    generator, because a client that leaves would end it, and the usage comes last.
    """

    def __init__(self, litellm: Any, call: dict[str, Any], open_streams: set[LiteLLMStream]) -> None:
        self._litellm = litellm
        self._call = call
        self._open = open_streams
        self._head: asyncio.Future[Headers] = asyncio.get_running_loop().create_future()
        self._chunks: asyncio.Queue[bytes | UpstreamInterrupted | None] = asyncio.Queue(_AHEAD)
        self._task: asyncio.Task[None] | None = None
        self.start_time: float | None = None

    async def start(self) -> Headers:
        """Return the headers after the first chunk, or ``HELD_SECONDS``. Raises LiteLLM's exceptions."""
        self._open.add(self)
        self._task = asyncio.create_task(self._run())
        return await self._head

    async def close(self) -> None:
        """End the upstream's request, and with it the events."""
        self._open.discard(self)
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._head.done() and not self._head.cancelled():
            self._head.exception()  # Mark the exception as retrieved, because no caller awaits it now.

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        event = await self._chunks.get()
        if isinstance(event, bytes):
            return event
        await self.close()
        try:
            raise StopAsyncIteration if event is None else event
        finally:
            del event  # avoid a reference cycle through its traceback

    async def _run(self) -> None:
        response = None
        try:
            response = await self._litellm.acompletion(**self._call)
            loop = asyncio.get_running_loop()
            self.start_time = loop.time()
            late = loop.call_later(HELD_SECONDS, self._open_head, response)
            try:
                await self._read(response)
            finally:
                late.cancel()
        except asyncio.CancelledError:
            self._cut()  # don't reraise: a canceled task would keep the error, which refers to this stream
        except Exception as error:  # noqa: BLE001 - each one is passed on below
            drop_tracebacks(error)
            # Before the first chunk, the caller handles the error. After it, the answer is broken.
            if not self._head.done():
                self._head.set_exception(error)
                return
            broken = UpstreamInterrupted(INTERRUPTED)
            broken.__cause__ = error
            await self._chunks.put(broken)
        finally:
            self._open.discard(self)
            if response is not None:
                await response.aclose()

    async def _read(self, response: Any) -> None:
        async for part in response:
            chunk = chunk_of(part)
            finished = any(choice["finish_reason"] for choice in chunk["choices"])
            if finished and not (response.received_finish_reason or response.intermittent_finish_reason):
                raise UpstreamInterrupted(INTERRUPTED)
            self._open_head(response)
            if "usage" in chunk and not chunk["choices"]:  # LiteLLM's sum lacks the calls in it
                calls = [getattr(getattr(one, "usage", None), "iterations", None) for one in response.chunks]
                chunk["usage"] |= next(({"iterations": one} for one in reversed(calls) if one), {})
            await self._chunks.put(sse.encode(msgspec.json.encode(chunk)))
        if not self._head.done():
            raise UpstreamInterrupted(INTERRUPTED)
        await self._chunks.put(sse.encode(b"[DONE]"))
        await self._chunks.put(None)

    def _open_head(self, response: Any) -> None:
        if not self._head.done():
            self._head.set_result([EVENT_STREAM, *request_id(response)])

    def _cut(self) -> None:
        """Report the interruption to a waiting reader, and drop the chunks that it hasn't read."""
        self._head.cancel()
        while not self._chunks.empty():
            self._chunks.get_nowait()
        self._chunks.put_nowait(UpstreamInterrupted(INTERRUPTED))


log = structlog.get_logger(__name__)

UNREACHABLE = "Cannot reach the model's provider. Try again later, or ask the operator to check the upstream."
TIMEOUT = "The model's provider did not answer in time. Try again, or send a smaller request."
INTERRUPTED = "The model's provider broke off in the middle of its answer. Send the request again."
UNUSABLE = "The model's provider returned an unreadable answer. Try again later."
UNTRANSLATABLE = "The proxy can't translate the request for this model's provider"

OVERFLOW_CODE = "context_length_exceeded"

# (type, code) that OpenAI's clients expect with a status.
_KINDS: Mapping[int, tuple[str, str | None]] = {
    400: ("invalid_request_error", None),
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", None),
    404: ("invalid_request_error", "model_not_found"),
    413: ("invalid_request_error", "request_too_large"),
    422: ("invalid_request_error", None),
    429: ("rate_limit_error", "rate_limit_exceeded"),
}
_SERVER_KIND = ("server_error", None)
_CLIENT_KIND = ("invalid_request_error", None)

_REQUEST_IDS = ("x-request-id", "request-id", "x-amzn-requestid")  # headers in which providers send the request id

_LONGEST_MESSAGE = 4_000
_CHAIN = 10
_PREFIXES = re.compile(r"^(?:(?:litellm\.)?\w*(?:Error|Exception)\b(?: - |: ))++")
_ADDED = re.compile(
    r"\.? ?Handle with `litellm\.|\n?Received M(?:odel Group|essages)=|\nAvailable Model Group| LiteLLM Retried:"
    r"|\nTraceback | Arguments: |, Original Response:"
)
_SECRETS = re.compile(r"\b(?:sk|key|AIza)[-_]?[A-Za-z0-9_-]{16,}")

_TOP = ("id", "object", "created", "model", "choices", "usage", "system_fingerprint", "service_tier")
_CHOICE = ("index", "finish_reason", "logprobs")
_MESSAGE = (
    *("role", "content", "refusal", "tool_calls", "function_call", "audio", "annotations", "images"),
    *("reasoning_content", "thinking_blocks"),  # clients must send them back, or tools after reasoning fail
)
_TOOL_CALL = ("index", "id", "type", "function")
_USAGE = (
    *("prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details", "completion_tokens_details"),
    *("inference_geo", "iterations", "server_tool_use", "service_tier", "speed"),  # the price depends on them
)

_KEPT_NULLS = frozenset({"content", "finish_reason"})  # fields that OpenAI always writes, even as null


def completion(response: Any) -> dict[str, Any]:
    """Convert a LiteLLM ``ModelResponse`` to a ``chat.completion``."""
    return _clean(response.model_dump(warnings=False), part="message")


def chunk_of(response: Any) -> dict[str, Any]:
    """Convert a LiteLLM ``ModelResponseStream`` to a ``chat.completion.chunk``."""
    cleaned = _clean(response.model_dump(warnings=False), part="delta")
    if "usage" in cleaned and not any(choice["delta"] or choice["finish_reason"] for choice in cleaned["choices"]):
        cleaned["choices"] = []  # OpenAI's usage chunk has no choices.
    return cleaned


def request_id(response: Any) -> Headers:
    """Return ``x-request-id``, the provider's request id, from LiteLLM's copy of the headers."""
    headers = answer_headers(litellm_package.copied_headers(response))
    return [header for header in headers if header[0] == "x-request-id"]


def _clean(answer: Mapping[str, Any], *, part: str) -> dict[str, Any]:
    cleaned = _only(answer, _TOP)
    cleaned["choices"] = [_choice(choice, part) for choice in answer.get("choices") or ()]
    usage = answer.get("usage")
    # LiteLLM reports a prompt of 0 tokens if the provider reported nothing.
    if usage and usage.get("prompt_tokens"):
        cleaned["usage"] = {key: _present(value) for key, value in _only(usage, _USAGE).items()}
    else:
        cleaned.pop("usage", None)
    return cleaned


def _choice(choice: Mapping[str, Any], part: str) -> dict[str, Any]:
    cleaned = _only(choice, _CHOICE)
    cleaned.setdefault("finish_reason", None)
    message = choice.get(part) or {}
    cleaned[part] = _only(message, _MESSAGE)
    if part == "message":
        cleaned[part].setdefault("content", None)
    if calls := message.get("tool_calls"):
        cleaned[part]["tool_calls"] = [_only(call, _TOOL_CALL) for call in calls]
        if part == "message":
            for call in cleaned[part]["tool_calls"]:
                call.pop("index", None)
    return cleaned


def _only(value: Mapping[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    return {name: _present(value[name]) for name in fields if value.get(name) not in (None, [])}


def _present(value: Any) -> Any:
    """Remove nulls, which LiteLLM writes for every field that the provider omits."""
    if isinstance(value, dict):
        return {key: _present(item) for key, item in value.items() if item is not None or key in _KEPT_NULLS}
    if isinstance(value, list):
        return [_present(item) for item in value]
    return value


class ErrorAnswer(NamedTuple):
    """An error status with headers and body, in OpenAI's format."""

    status: int
    headers: Headers
    body: bytes


def refusal_of(error: Exception, *, hidden: tuple[str, ...]) -> ErrorAnswer:
    """Return the provider's error response in a LiteLLM exception.

    ``hidden`` are texts to hide from clients: keys and addresses. Raises ``UpstreamUnreachable``, ``UpstreamTimeout``,
    or ``UpstreamInterrupted`` if the provider sent no response.
    """
    _raise_network_error(error)
    status, headers = _head(error)
    if status is None:
        return _without_provider(error, hidden)
    reply = _provider_message(error)
    message = _hide(reply.message, hidden) or UNUSABLE
    kind, code = _KINDS.get(status, _SERVER_KIND if status >= 500 else _CLIENT_KIND)
    code = reply.code or code
    if _is_overflow(error, status, message):
        status, (kind, code) = (400 if status >= 500 else status), (_CLIENT_KIND[0], OVERFLOW_CODE)
    return ErrorAnswer(status, answer_headers(headers), error_body(message, type=kind, code=code))


def _raise_network_error(error: BaseException) -> None:
    """Raise the network error behind an exception. A variable for it would make a reference cycle."""
    for cause in _chain(error):
        if isinstance(cause, TimeoutError | httpx.TimeoutException) or type(cause).__name__ == "Timeout":
            raise UpstreamTimeout(TIMEOUT) from error
        if isinstance(cause, httpx.ConnectError | httpx.UnsupportedProtocol | httpx.ProxyError):
            raise UpstreamUnreachable(UNREACHABLE) from error
        if isinstance(cause, httpx.TransportError):
            raise UpstreamInterrupted(INTERRUPTED) from error


def drop_tracebacks(error: BaseException) -> None:
    """Remove the tracebacks of an exception, of its causes, and of exceptions in its attributes.

    LiteLLM keeps exceptions in variables of frames that are in their own tracebacks. These reference cycles include
    the request.
    """
    dropped: set[int] = set()
    waiting: list[object] = [error]
    while waiting:
        one = waiting.pop()
        if isinstance(one, BaseException) and id(one) not in dropped:
            dropped.add(id(one))
            one.__traceback__ = None
            waiting += [one.__cause__, one.__context__, *vars(one).values()]


def _without_provider(error: Exception, hidden: tuple[str, ...]) -> ErrorAnswer:
    """Return the response if LiteLLM itself failed: on the request (400), or on the provider's response (502)."""
    log.error("translation.failed", of="request or response", errors=[type(cause).__name__ for cause in _chain(error)])
    if getattr(error, "status_code", 500) in (400, 422):
        reason = _hide(_provider_message(error).message, hidden)[:200]
        message = f"{UNTRANSLATABLE}: {reason}" if " " in reason else f"{UNTRANSLATABLE}. Check its messages and tools."
        return ErrorAnswer(400, [JSON], error_body(message, type=_CLIENT_KIND[0], code="untranslatable_request"))
    return ErrorAnswer(502, [JSON], UpstreamError(UNUSABLE).body())


def answer_headers(headers: Mapping[str, str]) -> Headers:
    """Return those of a provider's headers that OpenAI's clients use."""
    kept: Headers = [JSON]
    if retry_after := headers.get("retry-after"):
        kept.append(("retry-after", retry_after))
    if request_id := next(filter(None, map(headers.get, _REQUEST_IDS)), None):
        kept.append(("x-request-id", request_id))
    return kept


def _chain(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    for _ in range(_CHAIN):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__ or cause.__context__


def _head(error: Exception) -> tuple[int | None, Mapping[str, str]]:
    """Return status and headers of the provider's error response; no status if there was none.

    LiteLLM's own status replaces the 200 of a stream with an error event, and a 400 that LiteLLM recognizes as a bad
    key. Other statuses of a provider stay.
    """
    mapped = getattr(error, "status_code", None)
    for cause in _chain(error):
        if isinstance(cause, httpx.HTTPStatusError):
            status = cause.response.status_code
            if status <= 400 and isinstance(mapped, int) and 400 <= mapped < 500:
                status = mapped
            return (status if status >= 400 else 502), cause.response.headers
    if isinstance(mapped, int) and type(error).__name__ == "MidStreamFallbackError":
        return mapped, {}
    return None, {}


class _ProviderMessage(NamedTuple):
    message: str
    code: str | None = None


def _provider_message(error: Exception) -> _ProviderMessage:
    """Return the provider's message and error code, without LiteLLM's additions."""
    text = _PREFIXES.sub("", str(getattr(error, "message", None) or error))
    inner = _json_in(text)
    if inner is None:
        text = _ADDED.split(text, maxsplit=1)[0]
        return _ProviderMessage(text.strip()[:_LONGEST_MESSAGE])
    fields = inner.get("error", inner)
    if isinstance(fields, str):
        return _ProviderMessage(fields[:_LONGEST_MESSAGE])
    code = next((fields[key] for key in ("type", "status") if isinstance(fields.get(key), str)), None)
    message = fields.get("message") or fields.get("detail") or json.dumps(fields)
    return _ProviderMessage(str(message)[:_LONGEST_MESSAGE], None if code == "invalid_request_error" else code)


def _json_in(text: str) -> dict[str, Any] | None:
    """Return the first JSON object in a text, also within an array or the repr of Python's ``bytes``."""
    start = text.find("{")
    if start < 0 or start > 200:
        return None
    for candidate in (text, text.replace("\\'", "'").replace("\\\\", "\\"), text.replace("\\n", " ")):
        try:
            value, _ = json.JSONDecoder().raw_decode(candidate, candidate.find("{"))
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and isinstance(value.get("error", value), dict | str):
            return value
    return None


def _is_overflow(error: Exception, status: int, message: str) -> bool:
    if recognise(status, error_body(message, type="", code=None)) is not None:
        return True
    recognized = type(error).__name__ == "ContextWindowExceededError"
    return recognized and not excluded((), (message,))


def _hide(message: str, hidden: tuple[str, ...]) -> str:
    for secret in hidden:
        message = message.replace(secret, "[hidden]")
    return _SECRETS.sub("[hidden]", message)


def hidden_texts(base_url: str | None, *keys: str | None) -> tuple[str, ...]:
    """Return the texts to hide in messages: keys, base URL, host with and without the port. Longest first."""
    parts = urlsplit(base_url or "")
    texts = {base_url, parts.netloc, parts.hostname, *keys}
    return tuple(sorted((text for text in texts if text), key=len, reverse=True))
