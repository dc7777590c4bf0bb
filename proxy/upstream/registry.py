"""The upstreams of a configuration, and the transport to each."""

from __future__ import annotations

import asyncio
import re
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Literal

import msgspec
import structlog

from proxy.config import UpstreamSettings
from proxy.config.upstreams import SPEAKS_OPENAI, Api, TransportChoice, resolve_transport
from proxy.constants import UNDECODABLE
from proxy.errors import NotFound, RequestError, UpstreamError
from proxy.litellm_package import load
from proxy.upstream.bridge.transport import Bridge
from proxy.upstream.litellm.request import api_base, litellm_choice
from proxy.upstream.relay import Address, KeyHeader, RelayTransport, azure_address
from proxy.upstream.transport import CHAT_PATH, MESSAGES_PATH, RESPONSES_PATH, Answer, Outgoing, Transport, read_most

log = structlog.get_logger(__name__)

MISSING = frozenset({404, 405, 501})

REMEMBERED = 3_600.0  # Seconds until the proxy tries again. The server may have been updated, or was starting.
CALLERS = 10_000  # most pairs of a caller with its model and an API to remember as missing for each upstream

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

_OF_LLAMA_CPP = "File Not Found"  # llama.cpp's error for an unknown path. Its server also has files.

_DENIES_PATH = re.compile(rb'\s*\{\s*"error"\s*:\s*(?:\{\s*"message"\s*:\s*)?"Unexpected endpoint or method\b')
"""LM Studio's answer to an unknown path, with status 200; github.com/lmstudio-ai/lmstudio-bug-tracker/issues/618."""

_DENIAL_BYTES = 4_096  # most bytes of such an answer
_DENIAL_START = 256  # bytes at the start of an answer that show whether it's such an answer


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


@dataclass(eq=False)
class LearningTransport(Transport):
    """Sends requests in the client's API, and through a bridge if the upstream turns out not to have it.

    ``_caller`` is the tenant and the model whose requests these are.
    """

    _native: Transport
    _bridge: Callable[[], Awaitable[Bridge]]
    _api: Api
    _missing: MissingApis
    _caller: str

    async def send(self, request: Outgoing) -> Answer:
        """Send the request. If no translation helps, return the upstream's own error unchanged."""
        answer = await self._native.send(request)
        if (answer.status in MISSING and self._missing.works(self._api)) or not (
            answer.status in MISSING or _may_deny_path(answer)
        ):
            self._note(answer)
            return answer
        try:
            most = _ERROR_BYTES if answer.status in MISSING else _DENIAL_START
            read, complete = await read_most(answer.body, most)
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
    texts = [text for text in _texts(error) if text != _OF_LLAMA_CPP]
    return all(word.lower() in _GENERAL for text in texts for word in _WORD.findall(_PATHS.sub(" ", text)))


def _texts(value: object) -> Iterator[str]:
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
    length = answer.header("content-length")
    return answer.status == 200 and length.isdigit() and int(length) <= _DENIAL_BYTES


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


ANTHROPIC = "anthropic"

API_OF_PATH: Mapping[str, Api] = MappingProxyType(
    {CHAT_PATH: "chat", RESPONSES_PATH: "responses", MESSAGES_PATH: "messages"}
)

UpstreamApi = Api | Literal["provider"]  # what an upstream gets. `provider`: an API that only LiteLLM has.
_HUBS: tuple[Api, ...] = ("chat", "messages", "responses")  # for an upstream without the client's API, the best first

NOT_TRANSLATED = (
    "This path needs an upstream with the same API. For this one, the proxy only translates POST /v1/chat/completions, "
    "/v1/responses, and /v1/messages."
)


class _Upstream:
    """One upstream and its transports, each created at first use."""

    def __init__(self, name: str, settings: UpstreamSettings) -> None:
        self.name = name
        self.settings = settings
        self.missing = MissingApis(name)
        self._certain = settings.certain_apis
        self._choice: TransportChoice | None = None
        self._lock = asyncio.Lock()
        self._transports: dict[tuple[Api, UpstreamApi], Transport] = {}
        self._relays: dict[KeyHeader | None, RelayTransport] = {}
        """Relays by the header for keys, ``None`` if the provider has one for all paths."""
        self._settled: dict[str, Transport] = {}
        """Transports by path that don't depend on what responses show."""
        self._retired = False

    async def to(self, path: str, caller: str) -> Transport:
        """Return the transport for a path. ``caller`` is a tenant and its model. Raises as ``Upstreams.transport``."""
        settled = self._settled.get(path)
        if settled is not None:
            return settled
        client = API_OF_PATH.get(path)
        if client is None:
            return await self.relay()
        upstream = await self.api_for(client, caller)
        transport = await self.open(client, upstream)
        if client == "chat" or self._certain is not None:
            self._settled[path] = transport
            return transport
        if upstream != client or self.missing.works(client):
            return transport
        return LearningTransport(transport, partial(self._over_chat, client, "chat"), client, self.missing, caller)

    async def api_for(self, client: Api, caller: str) -> UpstreamApi:
        """Return the API in which the upstream gets a caller's requests.

        It's the client's API if the upstream has it, or if no response has shown yet that it doesn't. Chat completions
        have no second way, so those without that API are sent in it nevertheless.
        """
        apis = self._certain
        if (apis is None or "chat" in apis) and (await self.choice()).kind == "translate":
            return "provider"
        if apis is None:
            return "chat" if self.missing.lacks(client, caller) else client
        return client if client in apis else next(api for api in _HUBS if api in apis)

    async def has(self, api: Api, caller: str) -> bool:
        """Return whether the upstream has an API, or no response has shown a caller yet that it doesn't."""
        if self._certain is None and self.missing.lacks(api, caller):
            return False
        return await self.api_for(api, caller) == api

    async def open(self, client: Api, upstream: UpstreamApi) -> Transport:
        """Return the transport from a client's API to the upstream's. Raises ``ConfigurationError``."""
        pair = (client, upstream)
        if pair not in self._transports:
            transport = await self._made(client, upstream)
            # Another task may have opened it meanwhile.
            if self._transports.setdefault(pair, transport) is transport and self._retired:
                await transport.retire()
        return self._transports[pair]

    async def _made(self, client: Api, upstream: UpstreamApi) -> Transport:
        if client == upstream:
            return await self.relay(chat=client == "chat")
        if client != "chat":
            return await self._over_chat(client, upstream)
        if upstream == "responses":
            return Bridge("chat", "responses", await self.relay())
        # Imported here so that a deployment that only relays doesn't load it.
        from proxy.upstream.litellm.transport import LiteLLMTransport

        provider, base_url = ANTHROPIC, self.settings.base_url
        if upstream != "messages":
            provider, base_url = self.settings.provider, (await self.choice()).base_url
        return LiteLLMTransport(provider, base_url, _key(self.settings), _headers(self.settings))

    async def _over_chat(self, client: Api, upstream: UpstreamApi) -> Bridge:
        return Bridge(client, "chat", await self.open("chat", upstream), translated=upstream != "chat")

    async def relay(self, *, chat: bool = False) -> RelayTransport:
        """Return the transport for the upstream's own format. Raises ``NotFound`` if it needs translation."""
        header: KeyHeader | None = None
        if self.settings.provider == ANTHROPIC:
            header = "authorization" if chat else "x-api-key"
        if header not in self._relays:
            address, headers = await self._address(header), _headers(self.settings)
            relay = RelayTransport(address, upstream=self.name, api_key=_key(self.settings), headers=headers)
            # Another task may have opened it meanwhile.
            if self._relays.setdefault(header, relay) is relay and self._retired:
                await relay.retire()
        return self._relays[header]

    async def _address(self, header: KeyHeader | None) -> Address:
        settings = self.settings
        if header is not None:
            # The `base_url` may end in the version or not. Source: https://docs.claude.com/en/api/openai-sdk
            return Address(f"{api_base(ANTHROPIC, settings.base_url)}/v1", key_header=header, official=True)
        choice = await self.choice()
        if choice.kind == "translate":
            raise NotFound(NOT_TRANSLATED)
        base_url = (choice.base_url or "").rstrip("/")
        if settings.provider == "azure":
            return azure_address(base_url, settings.api_version)
        official = base_url == SPEAKS_OPENAI.get(settings.provider)
        return Address(base_url, official=official, short_ids=settings.provider == "mistral")

    async def choice(self) -> TransportChoice:
        """Return whether to relay to the upstream, and its address. Raises ``ConfigurationError``."""
        if self._choice is None:
            async with self._lock:
                choice = self._choice or self.resolved()
                self._choice = choice or await litellm_choice(self.settings.provider, self.settings.base_url)
        return self._choice

    def resolved(self) -> TransportChoice | None:
        """Return the choice, or ``None`` if only LiteLLM's registry lists the provider."""
        settings, apis = self.settings, self._certain
        relays = settings.speaks is not None or (apis is not None and "chat" not in apis)
        lane = "relay" if relays else settings.lane
        return resolve_transport(settings.provider, settings.base_url, lane, where=f"upstreams.{self.name}")

    async def retire(self) -> None:
        """Close each transport once its last answer has ended."""
        self._retired = True
        for transport in {*self._transports.values(), *self._relays.values()}:
            await transport.retire()

    async def aclose(self) -> None:
        """Close all transports."""
        for transport in {*self._transports.values(), *self._relays.values()}:
            await transport.aclose()


class Upstreams:
    """Transports by upstream name. Each is created at first use and kept until the upstream's settings change."""

    def __init__(self, settings: Mapping[str, UpstreamSettings], before: Upstreams | None = None) -> None:
        """``before`` are the upstreams of the previous configuration. Unchanged ones keep their transports."""
        earlier: Mapping[str, _Upstream] = {} if before is None else before._upstreams
        self._upstreams: dict[str, _Upstream] = {
            name: earlier[name] if name in earlier and earlier[name].settings == now else _Upstream(name, now)
            for name, now in settings.items()
        }
        # Only requests that began under an earlier configuration still refer to its transports.
        self._retired: weakref.WeakSet[_Upstream] = weakref.WeakSet() if before is None else before._retired
        self.unchanged = frozenset(name for name, upstream in self._upstreams.items() if upstream is earlier.get(name))
        """The names of the upstreams that didn't change."""

    async def prepare(self) -> None:
        """Import LiteLLM if an upstream needs it. That takes seconds, which no request should wait."""
        choices = [upstream.resolved() for upstream in self._upstreams.values()]
        if any(choice is None or choice.kind == "translate" for choice in choices):
            await load()

    async def transport(self, name: str, path: str = CHAT_PATH, caller: str = "") -> Transport:
        """Return the transport to an upstream for a path, such as ``/messages``, and a caller's tenant.

        If the upstream doesn't have the path's API, the transport translates. Raises ``ConfigurationError`` for an
        unknown provider, and ``NotFound`` for another path that the upstream doesn't serve.
        """
        return await self._upstreams[name].to(path, caller)

    async def native(self, name: str, path: str, caller: str) -> RelayTransport | None:
        """Return the transport for a path if the upstream itself has the path's API, for a tenant and its model."""
        upstream, api = self._upstreams[name], API_OF_PATH[path]
        if not await upstream.has(api, caller):
            return None
        return await upstream.relay(chat=api == "chat")

    def missing(self, name: str) -> MissingApis:
        """Return the APIs that an upstream was found not to have."""
        return self._upstreams[name].missing

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        """Drop the missing APIs that forgotten tenants found. They are in no store, so none is returned."""
        for upstream in self._upstreams.values():
            upstream.missing.forget(forgotten)
        return set()

    async def retire(self, successor: Upstreams) -> None:
        """Close transports that the successor doesn't use, each when its last answer has ended."""
        kept = successor._upstreams
        replaced = [upstream for name, upstream in self._upstreams.items() if upstream is not kept.get(name)]
        self._retired.update(replaced)
        for upstream in replaced:
            await upstream.retire()

    async def relay(self, name: str) -> RelayTransport:
        """Return the transport for the upstream's own format. Raises ``NotFound`` if it needs translation."""
        return await self._upstreams[name].relay()

    def first(self, *, anthropic: bool) -> str:
        """Return the first upstream with Anthropic's API, or with OpenAI's. Without one, return the first upstream."""
        serving = (name for name, one in self._upstreams.items() if (one.settings.provider == ANTHROPIC) is anthropic)
        return next(serving, next(iter(self._upstreams)))

    async def aclose(self) -> None:
        """Close all transports, including those of replaced configurations."""
        for upstream in (*self._upstreams.values(), *self._retired):
            await upstream.aclose()


def _key(settings: UpstreamSettings) -> str | None:
    return settings.api_key.get_secret_value() if settings.api_key else None


def _headers(settings: UpstreamSettings) -> dict[str, str]:
    return {name: value.get_secret_value() for name, value in settings.headers.items()}
