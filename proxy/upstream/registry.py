"""The upstreams of a configuration, and the transport to each."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

from proxy.config import UpstreamSettings
from proxy.config.upstreams import SPEAKS_OPENAI, Api, TransportChoice, resolve_transport
from proxy.errors import NotFound
from proxy.upstream.bridge.over_responses import OverResponses
from proxy.upstream.bridge.transport import Bridge
from proxy.upstream.learning import LearningTransport, MissingApis
from proxy.upstream.litellm.providers import litellm_choice
from proxy.upstream.litellm.request import api_base
from proxy.upstream.relay import Address, RelayTransport, azure_address
from proxy.upstream.transport import CHAT_PATH, MESSAGES_PATH, RESPONSES_PATH, Transport

ANTHROPIC = "anthropic"

API_OF_PATH: Mapping[str, Api] = MappingProxyType(
    {CHAT_PATH: "chat", RESPONSES_PATH: "responses", MESSAGES_PATH: "messages"}
)

NOT_TRANSLATED = (
    "This path needs an upstream with the same API. For this one, the proxy only translates POST /v1/chat/completions, "
    "/v1/responses, and /v1/messages."
)


class _Upstream:
    """One upstream and its transports, each created at first use.

    ``chat`` sends chat completions in any way: relayed, or translated by LiteLLM. ``native`` is for Anthropic's API.
    """

    def __init__(self, name: str, settings: UpstreamSettings) -> None:
        self.name = name
        self.settings = settings
        self.missing = MissingApis(name)
        self._chat: Transport | None = None
        self._relay: RelayTransport | None = None
        self._bridges: dict[str, Bridge] = {}
        self._lock = asyncio.Lock()
        self._retired = False

    async def chat(self) -> Transport:
        """Return the transport for chat completions.

        Raises ``ConfigurationError`` for an unknown provider.
        """
        if self._chat is None:
            async with self._lock:
                if self._chat is None:
                    transport = await self._open_chat()
                    if self._retired:
                        await transport.retire()
                    self._chat = transport
        return self._chat

    async def _open_chat(self) -> Transport:
        settings, apis = self.settings, self.settings.certain_apis
        if apis is None or "chat" in apis:
            return await _open_transport(self.name, settings)
        if "messages" not in apis:
            return OverResponses(await self.relay())
        # Imported here so that a deployment that only relays doesn't load it.
        from proxy.upstream.litellm.transport import LiteLLMTransport

        return LiteLLMTransport(ANTHROPIC, settings.base_url, _key(settings), _headers(settings))

    async def to(self, path: str, caller: str) -> Transport:
        """Return the transport for a path: the upstream's own, or a bridge. ``caller`` is a tenant and its model.

        Raises ``ConfigurationError`` for an unknown provider, and ``NotFound`` for a path that needs the upstream's
        own API.
        """
        api = API_OF_PATH.get(path)
        if api == "chat":
            return await self.chat()
        if api is None or await self.has(api, caller):
            relay = await self.relay()
            if api is None or self.settings.certain_apis is not None:
                return relay
            return LearningTransport(relay, partial(self._bridge, path), api, self.missing, caller)
        return await self._bridge(path)

    async def has(self, api: Api, caller: str) -> bool:
        """Return whether the upstream has an API, or nothing has shown a caller yet that it doesn't."""
        apis = self.settings.certain_apis
        if apis is not None:
            return api in apis
        return not self.missing.lacks(api, caller) and isinstance(await self.chat(), RelayTransport)

    async def _bridge(self, path: str) -> Bridge:
        if path not in self._bridges:
            chat = await self.chat()
            self._bridges[path] = Bridge(path, chat, translated=not isinstance(chat, RelayTransport))
        return self._bridges[path]

    async def relay(self) -> RelayTransport:
        """Return the transport for requests in the upstream's own format. Raises ``NotFound`` if there is none."""
        apis = self.settings.certain_apis
        if apis is None or ("chat" in apis and self.settings.provider != ANTHROPIC):
            transport = await self.chat()
            if not isinstance(transport, RelayTransport):
                raise NotFound(NOT_TRANSLATED)
            return transport
        if self._relay is None:
            own = self.settings.provider == ANTHROPIC
            self._relay = _anthropic(self.name, self.settings) if own else _relay(self.name, self.settings)
            if self._retired:
                await self._relay.retire()
        return self._relay

    async def retire(self) -> None:
        self._retired = True
        for transport in filter(None, (self._chat, self._relay)):
            await transport.retire()

    async def aclose(self) -> None:
        for transport in filter(None, (self._chat, self._relay)):
            await transport.aclose()


class Upstreams:
    """Transports by upstream name. Each is created at first use and kept until the upstream's settings change."""

    def __init__(self, settings: Mapping[str, UpstreamSettings], before: Upstreams | None = None) -> None:
        """``before`` are the upstreams of the previous configuration. Unchanged ones keep their transports."""
        known: Mapping[str, _Upstream] = {} if before is None else before._upstreams
        self._upstreams: dict[str, _Upstream] = {
            name: known[name] if name in known and known[name].settings == own else _Upstream(name, own)
            for name, own in settings.items()
        }
        # Only requests that began under an earlier configuration still refer to its transports.
        self._retired: weakref.WeakSet[_Upstream] = weakref.WeakSet() if before is None else before._retired
        self.kept = frozenset(name for name, upstream in self._upstreams.items() if upstream is known.get(name))
        """The names of the upstreams that didn't change."""

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
        transport = await upstream.chat() if api == "chat" else await upstream.relay()
        return transport if isinstance(transport, RelayTransport) else None

    def missing(self, name: str) -> MissingApis:
        """Return the APIs that an upstream was found not to have."""
        return self._upstreams[name].missing

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


async def _open_transport(upstream: str, settings: UpstreamSettings) -> Transport:
    where = f"upstreams.{upstream}"
    lane = settings.lane
    if settings.speaks is not None:  # certainly with chat completions
        lane = "relay"
    found = resolve_transport(settings.provider, settings.base_url, lane, where=where)
    if found is None:
        found = await litellm_choice(settings.provider, settings.base_url)
    key, headers = _key(settings), _headers(settings)
    if found.kind == "relay" and settings.provider == ANTHROPIC:  # https://docs.claude.com/en/api/openai-sdk
        address = Address(f"{api_base(ANTHROPIC, settings.base_url)}/v1", known=True)
        return RelayTransport(address, upstream=upstream, api_key=key, headers=headers)
    if found.kind == "translate":
        # Imported here so that a deployment that only relays doesn't load it.
        from proxy.upstream.litellm.transport import LiteLLMTransport

        return LiteLLMTransport(settings.provider, found.base_url, key, headers)
    return RelayTransport(_address(settings, found), upstream=upstream, api_key=key, headers=headers)


def _relay(upstream: str, settings: UpstreamSettings) -> RelayTransport:
    """Return the transport to an upstream that has the API of a request. Raises ``ConfigurationError``."""
    found = resolve_transport(settings.provider, settings.base_url, "relay", where=f"upstreams.{upstream}")
    assert found is not None  # noqa: S101 - a relay always has a choice
    address = _address(settings, found)
    return RelayTransport(address, upstream=upstream, api_key=_key(settings), headers=_headers(settings))


def _anthropic(upstream: str, settings: UpstreamSettings) -> RelayTransport:
    """Return the transport to Anthropic's own API. Its `base_url` may end in the version or not."""
    address = Address(f"{api_base(ANTHROPIC, settings.base_url)}/v1", key_header="x-api-key", known=True)
    return RelayTransport(address, upstream=upstream, api_key=_key(settings), headers=_headers(settings))


def _key(settings: UpstreamSettings) -> str | None:
    return settings.api_key.get_secret_value() if settings.api_key else None


def _headers(settings: UpstreamSettings) -> dict[str, str]:
    return {name: value.get_secret_value() for name, value in settings.headers.items()}


def _address(settings: UpstreamSettings, found: TransportChoice) -> Address:
    base_url = (found.base_url or "").rstrip("/")
    if settings.provider == "azure":
        return azure_address(base_url, settings.api_version)
    return Address(base_url, known=base_url == SPEAKS_OPENAI.get(settings.provider))
