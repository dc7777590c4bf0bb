"""The upstreams of a configuration, and the lane to each."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from proxy.config import UpstreamSettings
from proxy.errors import NotFound
from proxy.upstream.lane import Lane
from proxy.upstream.providers import Reach, asked_litellm, reach
from proxy.upstream.relay import Address, RelayLane, azure_address


class Upstreams:
    """Lanes by upstream name, each opened when it is first used and kept for life."""

    def __init__(self, settings: Mapping[str, UpstreamSettings]) -> None:
        self._settings = settings
        self._lanes: dict[str, Lane] = {}
        self._opening = asyncio.Lock()

    async def lane(self, name: str) -> Lane:
        """The lane to an upstream. Raises ``ConfigurationError`` if there is no way to its provider."""
        lane = self._lanes.get(name)
        if lane is None:
            async with self._opening:
                lane = self._lanes.get(name)
                if lane is None:
                    lane = self._lanes[name] = await self._open(name)
        return lane

    async def relay(self, name: str) -> RelayLane:
        """The lane of an upstream that speaks OpenAI's format; ``NotFound`` for all others."""
        lane = await self.lane(name)
        if not isinstance(lane, RelayLane):
            raise NotFound(
                "This path needs an upstream that speaks OpenAI's API; only chat completions are translated."
            )
        return lane

    async def aclose(self) -> None:
        """Close all lanes."""
        for lane in self._lanes.values():
            await lane.aclose()

    async def _open(self, name: str) -> Lane:
        settings = self._settings[name]
        found = reach(settings.provider, settings.base_url, settings.lane, where=f"upstreams.{name}")
        if found is None:
            found = await asked_litellm(settings.provider, settings.base_url)
        key = settings.api_key.get_secret_value() if settings.api_key else None
        headers = {name: value.get_secret_value() for name, value in settings.headers.items()}
        if found.lane == "translate":
            # Imported here: a deployment that only relays never pays for it.
            from proxy.upstream.translate import TranslateLane

            return TranslateLane(settings.provider, found.base_url, key, headers)
        return RelayLane(_address(settings, found), api_key=key, headers=headers)


def _address(settings: UpstreamSettings, found: Reach) -> Address:
    base_url = (found.base_url or "").rstrip("/")
    if settings.provider == "azure":
        return azure_address(base_url, settings.api_version)
    return Address(base_url)
