"""The upstreams of a configuration, and the transport to each."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Literal

from proxy.config import UpstreamSettings
from proxy.config.upstreams import SPEAKS_OPENAI, Api, TransportChoice, resolve_transport
from proxy.errors import NotFound
from proxy.upstream.bridge.transport import Bridge
from proxy.upstream.learning import LearningTransport, MissingApis
from proxy.upstream.litellm.library import api_base, litellm_choice, load
from proxy.upstream.relay import Address, KeyHeader, RelayTransport, azure_address
from proxy.upstream.transport import CHAT_PATH, MESSAGES_PATH, RESPONSES_PATH, Transport

ANTHROPIC = "anthropic"

API_OF_PATH: Mapping[str, Api] = MappingProxyType(
    {CHAT_PATH: "chat", RESPONSES_PATH: "responses", MESSAGES_PATH: "messages"}
)

UpstreamApi = Api | Literal["provider"]
"""The API in which an upstream gets requests. ``provider``: one that only LiteLLM has."""

_HUBS: tuple[Api, ...] = ("chat", "messages", "responses")
"""The APIs for an upstream that doesn't have the client's, the best first."""

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
        """Return the transport for a path. ``caller`` is a tenant and its model.

        Raises ``ConfigurationError`` for an unknown provider, and ``NotFound`` for a path that needs the upstream's
        own API.
        """
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
        return LearningTransport(transport, partial(_over_chat, self, client, "chat"), client, self.missing, caller)

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
            transport = await _TRANSPORTS[pair](self, client, upstream)
            # Another task may have opened it meanwhile.
            if self._transports.setdefault(pair, transport) is transport and self._retired:
                await transport.retire()
        return self._transports[pair]

    async def relay(self, *, chat: bool = False) -> RelayTransport:
        """Return the transport for requests in the upstream's own format. Raises ``NotFound`` if there is none.

        ``chat`` is for chat completions, which Anthropic takes with another header for the key.
        """
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
                self._choice = self._choice or await self._choose()
        return self._choice

    async def _choose(self) -> TransportChoice:
        return self.resolved() or await litellm_choice(self.settings.provider, self.settings.base_url)

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


async def _relayed(upstream: _Upstream, client: Api, api: UpstreamApi) -> Transport:
    return await upstream.relay(chat=client == "chat")


async def _by_litellm(upstream: _Upstream, client: Api, api: UpstreamApi) -> Transport:
    # Imported here so that a deployment that only relays doesn't load it.
    from proxy.upstream.litellm.transport import LiteLLMTransport

    settings = upstream.settings
    if api == "messages":
        provider, base_url = ANTHROPIC, settings.base_url
    else:
        provider, base_url = settings.provider, (await upstream.choice()).base_url
    return LiteLLMTransport(provider, base_url, _key(settings), _headers(settings))


async def _over_chat(upstream: _Upstream, client: Api, api: UpstreamApi) -> Bridge:
    return Bridge(client, "chat", await upstream.open("chat", api), translated=api != "chat")


async def _over_responses(upstream: _Upstream, client: Api, api: UpstreamApi) -> Bridge:
    return Bridge("chat", "responses", await upstream.relay())


_TRANSPORTS: Mapping[tuple[Api, UpstreamApi], Callable[[_Upstream, Api, UpstreamApi], Awaitable[Transport]]] = {
    ("chat", "chat"): _relayed,
    ("chat", "messages"): _by_litellm,
    ("chat", "responses"): _over_responses,
    ("chat", "provider"): _by_litellm,
    ("messages", "messages"): _relayed,
    ("messages", "chat"): _over_chat,
    ("messages", "responses"): _over_chat,
    ("messages", "provider"): _over_chat,
    ("responses", "responses"): _relayed,
    ("responses", "chat"): _over_chat,
    ("responses", "messages"): _over_chat,
    ("responses", "provider"): _over_chat,
}
"""Opens the transport for a client's API and the upstream's."""


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
        """Return the transport for requests in an upstream's own format: OpenAI's, or Anthropic's for its API.

        Raises ``NotFound`` for providers that need translation.
        """
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
