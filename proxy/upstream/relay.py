"""The relay lane: the upstream speaks OpenAI's format, so bytes travel as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote, urlencode

from proxy.upstream.connections import Connections
from proxy.upstream.lane import Answer, Headers, Outgoing


@dataclass(frozen=True, slots=True)
class Address:
    """Where an OpenAI-compatible upstream is, and how it wants its key.

    ``chat_path`` may hold ``{model}``; ``key_header`` is ``authorization`` (with "Bearer ") or Azure's ``api-key``.
    """

    base_url: str
    chat_path: str = "/chat/completions"
    query: str = ""
    key_header: str = "authorization"


def azure_address(base_url: str, api_version: str | None) -> Address:
    """Azure's address: the newer one ends in ``/openai/v1`` and is as OpenAI's; the older one names the deployment
    in the path and the version in the query."""
    if base_url.endswith("/v1"):
        return Address(base_url, key_header="api-key")
    query = urlencode({"api-version": api_version}) if api_version else ""
    base = base_url if base_url.endswith("/openai") else f"{base_url}/openai"
    return Address(base, "/deployments/{model}/chat/completions", query, "api-key")


class RelayLane:
    """Sends bodies to one upstream as they are."""

    def __init__(self, address: Address, *, upstream: str, api_key: str | None, headers: Mapping[str, str]) -> None:
        """``upstream`` is the name in the configuration, for error messages."""
        self._address = address
        self._api_key = api_key
        self._extra = [(name.lower(), value) for name, value in headers.items()]
        self._replaced = {name for name, _ in self._extra}
        self._chat_url = None if "{model}" in address.chat_path else self.url(address.chat_path)
        self.connections = Connections(address.base_url, upstream)

    @property
    def base_url(self) -> str:
        """The address up to, not including, the paths of the API."""
        return self._address.base_url

    async def send(self, request: Outgoing) -> Answer:
        """See ``Lane``."""
        url = self._chat_url
        if url is None:
            url = self.url(self._address.chat_path.replace("{model}", quote(request.model, safe="")))
        headers = self.headers(request.headers, request.credential)
        return await self.connections.send("POST", url, headers, request.body, request.timeout)

    async def retire(self) -> None:
        """See ``Lane``."""
        await self.connections.retire()

    async def aclose(self) -> None:
        """See ``Lane``."""
        await self.connections.aclose()

    def url(self, path: str, query: str = "") -> str:
        """The address of a path (which begins with a slash) at the upstream."""
        queries = "&".join(filter(None, (self._address.query, query)))
        return f"{self._address.base_url}{path}{'?' if queries else ''}{queries}"

    def headers(self, headers: Headers, credential: str | None) -> Headers:
        """The client's headers, with the upstream's own key or else the caller's, and the configured headers."""
        key = self._api_key or credential
        merged = [pair for pair in headers if pair[0] not in self._replaced]
        if key is not None:
            bearer = self._address.key_header == "authorization"
            merged.append((self._address.key_header, f"Bearer {key}" if bearer else key))
        return merged + self._extra
