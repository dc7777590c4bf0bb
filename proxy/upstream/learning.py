"""Find out whether an upstream has an API, from its answers.

A server without ``/v1/messages`` or ``/v1/responses`` answers 404, 405, or 501. LM Studio answers 200 with an error.
Then the proxy sends the request as chat completions. If that gets another status, the server lacks only that API, and
the proxy remembers it.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import structlog

from proxy.config.upstreams import Api
from proxy.errors import RequestError, UpstreamError
from proxy.upstream.bridge.transport import Bridge
from proxy.upstream.relay import RelayTransport
from proxy.upstream.transport import Answer, Outgoing

log = structlog.get_logger(__name__)

MISSING = frozenset({404, 405, 501})

REMEMBERED = 3_600.0
"""Seconds until the proxy tries again. The server may have been updated, or was starting."""

_ERROR_BYTES = 65_536

_DENIES_PATH = re.compile(rb'\s*\{\s*"error"\s*:\s*(?:\{\s*"message"\s*:\s*)?"Unexpected endpoint or method\b')
"""LM Studio's answer to an unknown path, with status 200; github.com/lmstudio-ai/lmstudio-bug-tracker/issues/618."""

_DENIAL_BYTES = 4_096
"""Most bytes of such an answer."""

_DENIAL_START = 256
"""Bytes at the start of an answer that show whether it's such an answer."""


class MissingApis:
    """The APIs that one upstream was found not to have."""

    def __init__(self, upstream: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._upstream = upstream
        self._clock = clock
        self._until: dict[Api, float] = {}

    def __contains__(self, api: Api) -> bool:
        return self._until.get(api, 0.0) > self._clock()

    def add(self, api: Api) -> None:
        """Remember that the upstream doesn't have an API."""
        if api not in self:
            log.info("upstream.api_missing", upstream=self._upstream, api=api)
        self._until[api] = self._clock() + REMEMBERED


class LearningTransport:
    """Sends requests in the client's API, and through a bridge if the upstream turns out not to have it."""

    def __init__(
        self, native: RelayTransport, bridge: Callable[[], Awaitable[Bridge]], api: Api, missing: MissingApis
    ) -> None:
        self._native = native
        self._bridge = bridge
        self._api: Api = api
        self._missing = missing

    async def send(self, request: Outgoing) -> Answer:
        """Send the request. If no translation helps, return the upstream's own error unchanged."""
        answer = await self._native.send(request)
        if answer.status not in MISSING and not _may_deny_path(answer):
            return answer
        try:
            read, complete = await _beginning(answer, _ERROR_BYTES if answer.status in MISSING else _DENIAL_START)
        except BaseException:
            await answer.close()
            raise
        answer.body = _Joined(read, answer.body)
        if answer.status not in MISSING:
            missing = _DENIES_PATH.match(read) is not None
        else:  # if the error names the model, the model is missing, not the path
            missing = complete and request.model.encode() not in read
        if not missing:
            return answer
        try:
            bridge = await self._bridge()
            bridged = await bridge.exchange(*await bridge.translate(request))
        except (RequestError, UpstreamError):
            return answer
        except BaseException:
            await answer.close()
            raise
        if bridged.status in MISSING:
            await bridged.close()
            return answer
        await answer.close()
        self._missing.add(self._api)
        return bridged

    async def retire(self) -> None:
        """Do nothing, because the upstream's own transports are retired by their owner."""

    async def aclose(self) -> None:
        """Do nothing, because the upstream's own transports are closed by their owner."""


def _may_deny_path(answer: Answer) -> bool:
    """Return whether an answer with status 200 is as short as LM Studio's error."""
    length = next((value for name, value in answer.headers if name == "content-length"), "")
    return answer.status == 200 and length.isdigit() and int(length) <= _DENIAL_BYTES


async def _beginning(answer: Answer, most: int) -> tuple[bytes, bool]:
    """Read until there are more than ``most`` bytes. Return them, and whether they are the whole body."""
    read = bytearray()
    async for chunk in answer.body:
        read += chunk
        if len(read) > most:
            return bytes(read), False
    return bytes(read), True


class _Joined:
    """Yields the bytes that were read, and then the rest. This is faster than an asynchronous generator."""

    def __init__(self, first: bytes, rest: AsyncIterator[bytes]) -> None:
        self._first: bytes | None = first
        self._rest = rest

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if (first := self._first) is not None:
            self._first = None
            return first
        return await anext(self._rest)
