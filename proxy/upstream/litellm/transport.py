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

from proxy.errors import NotAuthenticated, RequestError, UpstreamError, UpstreamTimeout
from proxy.upstream.litellm import answer as translate_answer
from proxy.upstream.litellm import errors as translate_errors
from proxy.upstream.litellm import library as litellm_library
from proxy.upstream.litellm.request import CREDENTIAL_FROM_ENVIRONMENT, api_base, arguments
from proxy.upstream.litellm.stream import Stream
from proxy.upstream.transport import Answer, Outgoing

OWN_CLIENT = frozenset({"anthropic", "gemini", "vertex_ai", "vertex_ai_beta"})
"""Providers for which LiteLLM accepts an HTTP client. The proxy's client lives as long as the transport."""

NO_KEY = (
    "No key for this model's provider. Send one as 'Authorization: Bearer …', or set 'api_key' of the upstream in the "
    "proxy's configuration."
)


class LiteLLMTransport:
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
        self._streams: set[Stream] = set()
        self._busy = 0
        self._retired = False

    async def send(self, request: Outgoing) -> Answer:
        """Send the request. Errors of the provider, of LiteLLM, and of this transport are answers with an error status.

        Waits for a stream's first chunk, because LiteLLM raises some providers' errors only there.
        """
        key = self._key(request)
        if key is None and self._provider not in CREDENTIAL_FROM_ENVIRONMENT:
            return _refused(NotAuthenticated(NO_KEY))
        try:
            call = arguments(self._provider, request)
        except RequestError as error:
            return _refused(error)
        call |= {"api_base": api_base(self._provider, self._base_url), "api_key": key, "timeout": request.timeout}
        call |= {"extra_headers": dict(self._headers), "max_retries": 0, "num_retries": 0, "drop_params": True}
        # Otherwise LiteLLM imports its server's MCP client for each request with tools, and fails if it is missing.
        call["_skip_mcp_handler"] = True
        litellm = await litellm_library.load()
        self._busy += 1
        if self._provider in OWN_CLIENT:
            call["client"] = self._own_client()
        try:
            async with asyncio.timeout(request.timeout):
                return await (self._stream(litellm, call) if request.stream else _whole(litellm, call))
        except TimeoutError as error:
            raise UpstreamTimeout(translate_errors.TIMEOUT) from error
        except UpstreamError:
            raise
        except Exception as error:  # noqa: BLE001 - each one becomes an answer below
            translate_errors.drop_tracebacks(error)
            # LiteLLM raises anything from OpenAI's classes to a bare KeyError. If the provider didn't return an error,
            # the client gets a 400 or 502.
            refusal = translate_errors.refusal(
                error, hidden=translate_errors.hidden_texts(self._base_url, self._api_key, key)
            )
            return Answer(refusal.status, refusal.headers, _once(refusal.body), _nothing)
        finally:
            self._busy -= 1
            await self._close_if_done()

    async def retire(self) -> None:
        """Close the client once no answer is open."""
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

    def _own_client(self) -> Any:
        if self._client is None:
            self._client = litellm_library.http_client()
        return self._client

    async def _stream(self, litellm: Any, call: dict[str, Any]) -> Answer:
        stream = Stream(litellm, call, self._streams)
        try:
            headers = await stream.start()
        except BaseException:
            await stream.close()
            raise

        async def close() -> None:
            await stream.close()
            await self._close_if_done()

        # LiteLLM's stream and its log entry refer to the messages.
        return Answer(200, headers, stream.events(), close, keeps_request=True)


async def _whole(litellm: Any, call: dict[str, Any]) -> Answer:
    response = await litellm.acompletion(**call)
    body = msgspec.json.encode(translate_answer.completion(response))
    return Answer(
        200, [("content-type", "application/json"), *translate_answer.request_id(response)], _once(body), _nothing
    )


def _refused(error: RequestError) -> Answer:
    return Answer(error.status, [("content-type", "application/json")], _once(error.body()), _nothing)


async def _once(body: bytes) -> AsyncIterator[bytes]:
    yield body


async def _nothing() -> None:
    """Do nothing, because the answer was read whole."""
