"""Translate requests for providers that don't use OpenAI's wire format, through ``litellm.acompletion``.

Of the body, the transport sends the fields of ``request.PARAMETERS`` and the messages. It sends the configured headers
but none of the client's, which are for OpenAI's API and would only identify the client. LiteLLM drops OpenAI's
parameters that a provider doesn't have (``drop_params``), so an application that sets ``seed`` works with Anthropic.

The answer is OpenAI's JSON or server-sent events, without LiteLLM's additions. A stream that ends without the
provider's own end is an interruption, although LiteLLM reports ``stop``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec

from proxy.errors import NotAuthenticated, RequestError, UpstreamError, UpstreamInterrupted, UpstreamTimeout
from proxy.http import sse
from proxy.upstream.litellm import answers
from proxy.upstream.litellm import library as litellm_library
from proxy.upstream.litellm.library import CREDENTIAL_FROM_ENVIRONMENT, api_base, arguments
from proxy.upstream.traits import Refused
from proxy.upstream.transport import EVENT_STREAM, HELD_SECONDS, JSON, Answer, Headers, Outgoing, Transport

CLIENT_PROVIDERS = frozenset({"anthropic", "gemini", "vertex_ai", "vertex_ai_beta"})
"""Providers for which LiteLLM accepts an HTTP client. The proxy's client lives as long as the transport."""

NO_KEY = (
    "No key for this model's provider. Send one as 'Authorization: Bearer …', or set 'api_key' of the upstream in the "
    "proxy's configuration."
)


_AHEAD = 8
"""Chunks to read ahead of the client."""


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
        call |= {"extra_headers": dict(self._headers), "max_retries": 0, "num_retries": 0, "drop_params": True}
        # Otherwise LiteLLM imports its server's MCP client for each request with tools, and fails if it is missing.
        call["_skip_mcp_handler"] = True
        litellm = await litellm_library.load()
        self._busy += 1
        if self._provider in CLIENT_PROVIDERS:
            call["client"] = self._http_client()
        try:
            async with asyncio.timeout(request.timeout):
                made = await (self._stream(litellm, call) if request.stream else _whole(litellm, call))
                made.edited = edited
                return made
        except TimeoutError as error:
            raise UpstreamTimeout(answers.TIMEOUT) from error
        except UpstreamError:
            raise
        except Exception as error:  # noqa: BLE001 - each one becomes an answer below
            answers.drop_tracebacks(error)
            # LiteLLM raises anything from OpenAI's classes to a bare KeyError. If the provider didn't return an error,
            # the client gets a 400 or 502.
            refusal = answers.refusal(error, hidden=answers.hidden_texts(self._base_url, self._api_key, key))
            made = Answer.whole(refusal.status, refusal.headers, refusal.body)
            made.edited, made.refused = edited, Refused(refusal.status, refusal.body, msgspec.json.encode(sent))
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
            self._client = litellm_library.http_client()
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
    body = msgspec.json.encode(answers.completion(response))
    return Answer.whole(200, [JSON, *answers.request_id(response)], body)


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
        """Return the headers once the first chunk has come, or the stream has been silent for ``HELD_SECONDS``.

        Raises LiteLLM's exception if one comes first.
        """
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
            answers.drop_tracebacks(error)
            # Before the first chunk, the caller handles the error. After it, the answer is broken.
            if not self._head.done():
                self._head.set_exception(error)
                return
            broken = UpstreamInterrupted(answers.INTERRUPTED)
            broken.__cause__ = error
            await self._chunks.put(broken)
        finally:
            self._open.discard(self)
            if response is not None:
                await response.aclose()

    async def _read(self, response: Any) -> None:
        async for part in response:
            chunk = answers.chunk(part)
            finished = any(choice["finish_reason"] for choice in chunk["choices"])
            if finished and not (response.received_finish_reason or response.intermittent_finish_reason):
                raise UpstreamInterrupted(answers.INTERRUPTED)
            self._open_head(response)
            await self._chunks.put(sse.encode(msgspec.json.encode(chunk)))
        if not self._head.done():
            raise UpstreamInterrupted(answers.INTERRUPTED)
        await self._chunks.put(sse.encode(b"[DONE]"))
        await self._chunks.put(None)

    def _open_head(self, response: Any) -> None:
        if not self._head.done():
            self._head.set_result([EVENT_STREAM, *answers.request_id(response)])

    def _cut(self) -> None:
        """Report the interruption to a waiting reader, and drop the chunks that it hasn't read."""
        self._head.cancel()
        while not self._chunks.empty():
            self._chunks.get_nowait()
        self._chunks.put_nowait(UpstreamInterrupted(answers.INTERRUPTED))
