"""Relay requests unchanged to an upstream that uses the client's format."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import SplitResult, quote, urlencode, urljoin, urlsplit

from proxy.errors import UnknownModel
from proxy.http.headers import Credential
from proxy.upstream.bridge.returned import cleaned
from proxy.upstream.connections import Connections
from proxy.upstream.transport import CHAT_PATH, MESSAGES_PATH, RESPONSES_PATH, Answer, Headers, Outgoing, Transport

KeyHeader = Literal["authorization", "api-key", "x-api-key"]

ANTHROPIC_VERSION = "2023-06-01"  # if the client sends none; https://docs.claude.com/en/api/versioning

# Operations that Azure's older addresses have below a deployment. All other paths are below /openai itself.
_OF_A_DEPLOYMENT = frozenset(
    {
        *("/chat/completions", "/completions", "/embeddings", "/images/generations", "/images/edits"),
        *("/audio/speech", "/audio/transcriptions", "/audio/translations"),
    }
)

_REDIRECTS = frozenset({"location", "content-location"})

# A token of Entra ID is a JSON Web Token; Azure takes it as a Bearer token only, and its own keys as api-key only.
_JSON_WEB_TOKEN = re.compile(r"eyJ[\w-]*\.[\w-]+\.[\w-]*")


@dataclass(frozen=True, slots=True)
class Address:
    """The address of an upstream, and the header in which it takes keys."""

    base_url: str
    query: str = ""
    key_header: KeyHeader = "authorization"  # `authorization` has "Bearer " before the key
    deployments: bool = False  # operations on a model have the path `/deployments/{model}/…`
    official: bool = False  # the provider's own. Others may take keys in Anthropic's header on Anthropic's paths.
    short_ids: bool = False  # ids of calls have nine letters and digits

    @property
    def prefix(self) -> str:
        """Return the path under which the proxy serves this address to its clients."""
        return "/openai" if self.deployments else "/v1"


def azure_address(base_url: str, api_version: str | None) -> Address:
    """Return Azure's address: the newer one, which ends in ``/openai/v1``, or the older one with deployments."""
    if base_url.endswith("/v1"):
        return Address(base_url, key_header="api-key")
    query = urlencode({"api-version": api_version}) if api_version else ""
    base = base_url if base_url.endswith("/openai") else f"{base_url}/openai"
    return Address(base, query, "api-key", deployments=True)


class RelayTransport(Transport):
    """Sends bodies to one upstream, unchanged unless a bridge wrote a part of them."""

    def __init__(self, address: Address, *, upstream: str, api_key: str | None, headers: Mapping[str, str]) -> None:
        """``upstream`` is the name in the configuration, for error messages."""
        self._address = address
        self._api_key = api_key
        self._extra = [(name.lower(), value) for name, value in headers.items()]
        self._replaced = {name for name, _ in self._extra}
        paths = () if address.deployments else (CHAT_PATH, RESPONSES_PATH, MESSAGES_PATH)
        self._urls = {path: self.url(path) for path in paths}
        self.connections = Connections(address.base_url, upstream)

    @property
    def base_url(self) -> str:
        """Return the address without the API's paths."""
        return self._address.base_url

    @property
    def azure(self) -> bool:
        """Return whether the upstream is Azure's, so that `api-version` in a query is for it."""
        return self._address.key_header == "api-key"

    def names_model(self, path: str) -> bool:
        """Return whether the upstream's address for a path names the model."""
        return self._address.deployments and path in _OF_A_DEPLOYMENT

    async def send(self, request: Outgoing) -> Answer:
        verifies, short_ids = self._address.key_header == "x-api-key", self._address.short_ids
        request = await cleaned(request, verifies=verifies, short_ids=short_ids)
        url = None if request.query else self._urls.get(request.path)
        if url is None:
            url = self.url(request.path, request.query, model=request.model)
        headers = self.headers(request.headers, request.credential, anthropic=request.path == MESSAGES_PATH)
        within = None if request.bounded else request.timeout
        answer = await self.connections.send("POST", url, headers, request.body, within, again=True)
        return self._without_bypass(answer, url)

    async def request(
        self, method: str, url: str, headers: Headers, body: bytes | AsyncIterator[bytes] | None, within: float | None
    ) -> Answer:
        """Send a request, and turn a redirect to the upstream into one to the proxy. See ``Connections.send``."""
        return self._without_bypass(await self.connections.send(method, url, headers, body, within), url)

    def _without_bypass(self, answer: Answer, url: str) -> Answer:
        for name, _ in answer.headers:
            if name in _REDIRECTS:
                break
        else:
            return answer
        answer.headers = [
            (name, value)
            for name, sent in answer.headers
            if (value := self._at_proxy(url, sent) if name in _REDIRECTS else sent) is not None
        ]
        return answer

    async def retire(self) -> None:
        await self.connections.retire()

    async def aclose(self) -> None:
        await self.connections.aclose()

    def url(self, path: str, query: str = "", *, model: str | None = None) -> str:
        """Return the upstream's address of a path. Raises ``UnknownModel`` for a name that would change the path."""
        if model is not None and self.names_model(path):
            if model in ("", ".", ".."):
                raise UnknownModel("The model's name isn't valid for a deployment. Correct 'model'.", param="model")
            path = f"/deployments/{quote(model, safe='')}{path}"
        configured = self._address.query
        if configured:
            # The configured version overrides the one that clients send on every request.
            query = without_api_version(query)
        queries = "&".join(filter(None, (configured, query)))
        return f"{self._address.base_url}{path}{'?' if queries else ''}{queries}"

    def headers(self, headers: Headers, credential: Credential | None, *, anthropic: bool = False) -> Headers:
        """Return the client's headers with the upstream's key or else the caller's, and the configured ones."""
        merged = [pair for pair in headers if pair[0] not in self._replaced] if self._replaced else list(headers)
        wanted = self._address.key_header
        key = self._api_key
        if key is None and credential is not None:
            key = credential.key
            wanted = self._forwarded(credential, anthropic)
        if key is not None and wanted not in self._replaced:
            merged.append((wanted, f"Bearer {key}" if wanted == "authorization" else key))
        merged += self._extra
        if self._address.key_header == "x-api-key" and not any(name == "anthropic-version" for name, _ in merged):
            merged.append(("anthropic-version", ANTHROPIC_VERSION))
        return merged

    def _forwarded(self, credential: Credential, anthropic: bool) -> KeyHeader:
        """Return the header in which a caller's key goes to the upstream: the client's own if the upstream takes it."""
        bearer = credential.header == "authorization"
        match self._address.key_header:
            case "x-api-key":  # Anthropic's clients know which keys are Bearer tokens (OAuth's only are); others don't
                return "authorization" if bearer and anthropic else "x-api-key"
            case "api-key":
                return "authorization" if bearer and _JSON_WEB_TOKEN.fullmatch(credential.key) else "api-key"
            case _:
                as_sent = anthropic and not self._address.official and credential.header == "x-api-key"
                return "x-api-key" if as_sent else "authorization"

    def _at_proxy(self, url: str, location: str) -> str | None:
        """Return the proxy's address for the upstream's ``location``.

        Addresses of other hosts stay. An address of the upstream's host outside its API has no equivalent: ``None``.
        Following it would bypass the proxy.
        """
        try:
            target, base = urlsplit(urljoin(url, location)), urlsplit(self._address.base_url)
            elsewhere = (target.hostname or "") != (base.hostname or "")
            same = (target.scheme, _port(target)) == (base.scheme, _port(base))
        except ValueError:
            return None
        if elsewhere:
            return location
        below = target.path.removeprefix(base.path)
        if not same or not target.path.startswith(base.path) or below[:1] not in ("", "/"):
            return None
        rest = "".join(f"{mark}{part}" for mark, part in (("?", target.query), ("#", target.fragment)) if part)
        return f"{self._address.prefix}{below}{rest}"


def _port(address: SplitResult) -> int | None:
    return address.port or {"http": 80, "https": 443}.get(address.scheme)


def without_api_version(query: str) -> str:
    """Return a query string without `api-version`, the parameter of Azure's clients."""
    return "&".join(part for part in query.split("&") if part and part.partition("=")[0].lower() != "api-version")
