"""Find out whether an upstream has an API, from its answers.

A server without ``/v1/messages`` or ``/v1/responses`` answers 404, 405, or 501. LM Studio answers 200 with an error.
Then the proxy sends the request as chat completions. If that gets another status, the server lacks only that API, and
the proxy remembers it for the caller. An error about a model, a file, or another resource doesn't count, and neither
does any error after the API has worked for some caller.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import msgspec
import structlog

from proxy.config.upstreams import Api
from proxy.constants import UNDECODABLE
from proxy.errors import RequestError, UpstreamError
from proxy.upstream.bridge.transport import Bridge
from proxy.upstream.transport import Answer, Outgoing, Transport

log = structlog.get_logger(__name__)

MISSING = frozenset({404, 405, 501})

REMEMBERED = 3_600.0
"""Seconds until the proxy tries again. The server may have been updated, or was starting."""

CALLERS = 10_000
"""Most pairs of a caller with its model and an API to remember as missing for each upstream."""

_ERROR_BYTES = 65_536

_GENERAL = frozenset(
    {
        *("a", "allowed", "an", "and", "api", "at", "available", "be", "cannot", "check", "code", "correct"),
        *("could", "currently", "delete", "denied", "docs", "documentation", "does", "doesn", "don"),
        *("enabled", "endpoint", "error", "exist", "exists", "for", "found", "get", "handle", "handler"),
        *("have", "http", "https", "implement", "implemented", "in", "invalid", "is", "isn", "it", "join"),
        *("kind", "match", "matched", "matches", "method", "missing", "msg", "no", "not", "notfound", "of"),
        *("on", "operation", "or", "page", "patch", "path", "please", "post", "provided", "put", "reason"),
        *("request", "requested", "resource", "route", "router", "routes", "s", "see", "serve", "served"),
        *("server", "service", "spelling", "status", "such", "support", "supported", "t", "that", "the"),
        *("there", "this", "those", "to", "typos", "unexpected", "unimplemented", "unknown", "unrecognized"),
        *("unsupported", "uri", "url", "values", "was", "we", "with", "you", "your"),
    }
)
"""Words of errors about a path. An error about a resource names its kind, such as a vector store or an item."""

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_PATHS = re.compile(r"(?<!\S)[^\s/]*/\S*")
_WITHOUT_WORDS = re.compile(r"(?:id|time|timestamp|date|instance)$", re.IGNORECASE)
"""Names of fields that don't say what is missing."""

_OF_LLAMA_CPP = "File Not Found"
"""llama.cpp's error for an unknown path. Its server also has files."""

_DENIES_PATH = re.compile(rb'\s*\{\s*"error"\s*:\s*(?:\{\s*"message"\s*:\s*)?"Unexpected endpoint or method\b')
"""LM Studio's answer to an unknown path, with status 200; github.com/lmstudio-ai/lmstudio-bug-tracker/issues/618."""

_DENIAL_BYTES = 4_096
"""Most bytes of such an answer."""

_DENIAL_START = 256
"""Bytes at the start of an answer that show whether it's such an answer."""


class MissingApis:
    """The APIs that one upstream was found not to have.

    What one caller's requests show holds for that caller and model alone, because the model, the key, or the headers
    may be the cause. ``caller`` names both.
    """

    def __init__(self, upstream: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._upstream = upstream
        self._clock = clock
        self._until: dict[tuple[Api, str], float] = {}
        self._worked: dict[Api, float] = {}

    def lacks(self, api: Api, caller: str) -> bool:
        """Return whether the API was found missing for a caller."""
        return self._until.get((api, caller), 0.0) > self._clock()

    def add(self, api: Api, caller: str) -> None:
        """Remember that a caller found the API missing, unless it has worked lately."""
        if self.works(api):
            return
        if not self.lacks(api, caller):
            log.info("upstream.api_missing", upstream=self._upstream, api=api)
        self._until.pop((api, caller), None)
        if len(self._until) >= CALLERS:
            del self._until[next(iter(self._until))]
        self._until[api, caller] = self._clock() + REMEMBERED

    def forget(self, forgotten: Callable[[str], bool]) -> None:
        """Drop what forgotten tenants found."""
        self._until = {place: end for place, end in self._until.items() if not forgotten(place[1].partition(" ")[0])}

    def works(self, api: Api) -> bool:
        """Return whether the API has worked for some caller lately."""
        return self._worked.get(api, 0.0) > self._clock()

    def worked(self, api: Api) -> None:
        """Remember that the API works."""
        self._worked[api] = self._clock() + REMEMBERED


class LearningTransport(Transport):
    """Sends requests in the client's API, and through a bridge if the upstream turns out not to have it.

    ``caller`` is the tenant and the model whose requests these are.
    """

    def __init__(
        self,
        native: Transport,
        bridge: Callable[[], Awaitable[Bridge]],
        api: Api,
        missing: MissingApis,
        caller: str,
    ) -> None:
        self._native = native
        self._bridge = bridge
        self._api: Api = api
        self._missing = missing
        self._caller = caller

    async def send(self, request: Outgoing) -> Answer:
        """Send the request. If no translation helps, return the upstream's own error unchanged."""
        answer = await self._native.send(request)
        if (answer.status in MISSING and self._missing.works(self._api)) or not (
            answer.status in MISSING or _may_deny_path(answer)
        ):
            self._note(answer)
            return answer
        try:
            read, complete = await _beginning(answer, _ERROR_BYTES if answer.status in MISSING else _DENIAL_START)
        except BaseException:
            await answer.close()
            raise
        answer.body = _Joined(read, answer.body)
        if answer.status not in MISSING:
            missing = _DENIES_PATH.match(read) is not None
        else:
            missing = complete and denies_path(read, request.model)
        if not missing:
            self._note(answer)
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
        self._missing.add(self._api, self._caller)
        return bridged

    def _note(self, answer: Answer) -> None:
        if answer.status == 200:
            self._missing.worked(self._api)


def denies_path(body: bytes, model: str) -> bool:
    """Return whether the body of an error with a status of ``MISSING`` says that the server doesn't have the path.

    An error that names the model is about the model. One with other words than those about paths is about a resource.
    """
    if model.encode() in body:
        return False
    try:
        error = msgspec.json.decode(body)
    except UNDECODABLE:
        return True  # a page or a plain text: not an error of an API
    return all(text == _OF_LLAMA_CPP or _is_general(text) for text in _texts(error))


def _is_general(text: str) -> bool:
    return all(word.lower() in _GENERAL for word in _WORD.findall(_PATHS.sub(" ", text)))


def _texts(value: object) -> Iterator[str]:
    """Yield the texts of an error."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
    elif isinstance(value, dict):
        for name, inner in value.items():
            if not _WITHOUT_WORDS.search(name):
                yield from _texts(inner)


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
