"""The upstreams of a configuration, and the transport to each."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Mapping

from proxy.config import UpstreamSettings
from proxy.config.providers import SPEAKS_OPENAI, TransportChoice, resolve_transport
from proxy.errors import NotFound
from proxy.upstream.litellm.providers import litellm_choice
from proxy.upstream.litellm.request import api_base
from proxy.upstream.relay import Address, RelayTransport, azure_address
from proxy.upstream.transport import CHAT_PATH, Transport

ANTHROPIC = "anthropic"


class _Upstream:
    """One upstream, and its transport, which is created at first use."""

    def __init__(self, name: str, settings: UpstreamSettings) -> None:
        self.name = name
        self.settings = settings
        self._transport: Transport | None = None
        self._native: RelayTransport | None = None
        self._lock = asyncio.Lock()
        self._retired = False

    async def transport(self) -> Transport:
        """Return the transport. Raises ``ConfigurationError`` for an unknown provider."""
        if self._transport is None:
            async with self._lock:
                if self._transport is None:
                    transport = await _open_transport(self.name, self.settings)
                    if self._retired:
                        await transport.retire()
                    self._transport = transport
        return self._transport

    async def relay(self) -> RelayTransport:
        """Return the transport for requests in the provider's own format. Raises ``NotFound`` if there is none."""
        if self.settings.provider == ANTHROPIC:
            if self._native is None:
                self._native = _anthropic(self.name, self.settings)
                if self._retired:
                    await self._native.retire()
            return self._native
        transport = await self.transport()
        if not isinstance(transport, RelayTransport):
            raise NotFound(
                "This path needs an upstream that speaks OpenAI's API; only chat completions are translated."
            )
        return transport

    async def retire(self) -> None:
        self._retired = True
        for transport in filter(None, (self._transport, self._native)):
            await transport.retire()

    async def aclose(self) -> None:
        for transport in filter(None, (self._transport, self._native)):
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

    async def transport(self, name: str, path: str = CHAT_PATH) -> Transport:
        """Return the transport to an upstream for a path, such as ``/messages``.

        Raises ``ConfigurationError`` for an unknown provider, and ``NotFound`` if the upstream doesn't serve the path.
        """
        upstream = self._upstreams[name]
        return await upstream.transport() if path == CHAT_PATH else await upstream.relay()

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
    found = resolve_transport(settings.provider, settings.base_url, settings.lane, where=f"upstreams.{upstream}")
    if found is None:
        found = await litellm_choice(settings.provider, settings.base_url)
    key, headers = _key(settings), _headers(settings)
    if found.kind == "translate":
        # Imported here so that a deployment that only relays doesn't load it.
        from proxy.upstream.litellm.transport import LiteLLMTransport

        return LiteLLMTransport(settings.provider, found.base_url, key, headers)
    return RelayTransport(_address(settings, found), upstream=upstream, api_key=key, headers=headers)


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
