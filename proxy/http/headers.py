"""Select the headers to forward, find the caller's key in them, and read the names in ``Host``."""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Iterable, Iterator, Sequence, Set
from enum import StrEnum
from itertools import chain, islice
from urllib.parse import quote

import msgspec
from starlette.types import Scope

# RFC 9110, section 7.6.1, and headers of older software with the same meaning.
HOP_BY_HOP = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer"),
        *("transfer-encoding", "upgrade"),
    }
)
CREDENTIALS = frozenset({"authorization", "api-key", "x-api-key", "x-goog-api-key", "cookie"})

VIA = "x-compaction-via"  # The ids of the proxies that a request has passed. Each proxy creates its id when it starts.


class Own(StrEnum):
    """The proxy's own response headers. Web pages may read all of them (``web_origins.EXPOSED``)."""

    VERDICT = "x-compaction"
    """`none`, `compacted`, `shadow`, `off`, `failed`, `pending`, or `unsupported` (only forwarded)."""
    ID = "x-compaction-id"
    """The id of the request's record. Paths that the proxy only forwards have it, too."""
    POLICY = "x-compaction-policy"
    """The name of the policy."""
    RETRIES = "x-compaction-retries"
    """The number of retries: after an overflow or an early end, or without a part that the upstream refused."""
    TOKENS_BEFORE = "x-compaction-tokens-before"
    """Input tokens as received. Omitted if the request is so small that counting isn't needed."""
    TOKENS_AFTER = "x-compaction-tokens-after"
    """Input tokens as sent."""
    STEPS = "x-compaction-steps"
    """The applied steps: those of the stages, `summary`, `fit`, or `server_state`."""
    OUTPUT = "x-compaction-output"
    """`clamped` if the proxy lowered the requested output to the space left in the window."""
    SUMMARY = "x-compaction-summary"
    """`stored`, `made`, or `digest` (extracts made without a model)."""
    SUMMARY_CAUSE = "x-compaction-summary-cause"
    """The cause of a digest."""
    BREAKER = "x-compaction-breaker"
    """`open` if the proxy didn't call the summary model because it failed too often."""
    SPENDING_REMAINING = "x-compaction-budget-remaining"
    """The rest of the team's budget, such as `12.3400 USD` or `15000 tokens`."""
    ADVICE = "x-compaction-advice"
    """How to make a request fit that the upstream rejects as too long."""
    RECALL = "x-compaction-recall"
    """How often the model read archived messages during the response. Streams don't have it."""


# Headers that the proxy itself sets, reads, or removes.
_OWN_REQUEST = frozenset({"host", "content-length", "content-encoding", "expect", "x-compaction", VIA})
_FORWARDED = frozenset({"forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip"})

# The proxy decides which web pages may call. Some upstreams refuse requests that have these headers.
_OF_BROWSERS = frozenset({"origin", "sec-fetch-dest", "sec-fetch-mode", "sec-fetch-site", "sec-fetch-user"})
_CORS = frozenset(
    f"access-control-{name}"
    for name in (
        *("allow-credentials", "allow-headers", "allow-methods", "allow-origin", "allow-private-network"),
        *("expose-headers", "max-age"),
    )
)

# Some servers take the method from these. The proxy decides by the method of the request itself.
_OF_METHODS = frozenset({"x-http-method-override", "x-http-method", "x-method-override"})

_NOT_FOR_UPSTREAM = HOP_BY_HOP | _OWN_REQUEST | CREDENTIALS | _FORWARDED | _OF_BROWSERS | _OF_METHODS
_NOT_FOR_CLIENT = HOP_BY_HOP | _CORS | {"server", "date", "alt-svc"}

Headers = list[tuple[str, str]]

RawHeaders = Iterable[tuple[bytes, bytes]]

KEY_HEADERS = ("authorization", "x-api-key", "api-key")
"""Headers that carry a caller's key. If several do, the first in this order counts and the others are dropped."""

_KEY_HEADERS = frozenset(name.encode() for name in KEY_HEADERS)


class Credential(msgspec.Struct, frozen=True):
    """A caller's key, and the header in `KEY_HEADERS` that it came in (in `authorization` as a Bearer token)."""

    key: str
    header: str

    def __repr__(self) -> str:
        """Leave the key out."""
        return f"Credential(header={self.header!r})"


def credential(raw: RawHeaders) -> tuple[Credential | None, str | None]:
    """Return the key that identifies a caller, and the first `Authorization` header if it's no Bearer token."""
    found: dict[bytes, str] = {}
    for name, value in raw:
        if name in _KEY_HEADERS:
            found.setdefault(name, value.decode("latin-1").strip())
    if not found:
        return None, None
    authorization = found.get(b"authorization", "")
    scheme, _, token = authorization.partition(" ")
    if scheme.lower() == "bearer" and (key := token.strip()):
        return Credential(key, "authorization"), None
    for header in KEY_HEADERS[1:]:
        if key := found.get(header.encode(), ""):
            return Credential(key, header), None
    return None, authorization or None


MOST_COOKIES = 1_000  # Cookies of a request that the proxy looks at. Browsers keep about 180 for a site.


def cookies(raw: RawHeaders, name: str) -> Iterator[str]:
    """Yield the values that a request's cookies of a name have, as they were sent.

    ``http.cookies``, which Starlette uses, unquotes in quadratic time before Python 3.11.10 and 3.12.6. The proxy
    never quotes its cookies.
    """
    sent = (cookie for header, value in raw if header == b"cookie" for cookie in value.split(b";", MOST_COOKIES))
    for cookie in islice(sent, MOST_COOKIES):
        named, equals, value = cookie.decode("latin-1").partition("=")
        if equals and named.strip() == name:
            yield value.strip()


def for_upstream(raw: RawHeaders) -> list[tuple[str, str]]:
    """Return the client's headers to forward: without connection headers, credentials, and forwarding headers."""
    pairs = []
    named: set[str] = set()
    for raw_name, raw_value in raw:
        name = _forwarded_as.get(raw_name)
        if name is None:
            name = _forward_as(raw_name)
        if name:
            pairs.append((name, _text(raw_value)))
        elif raw_name == b"connection":
            named.update(part.strip().lower() for part in _text(raw_value).split(","))
    return pairs if named <= HOP_BY_HOP else _without(pairs, named)


# Parts of names of headers by which gateways choose a model, a provider, or an address.
_CHOOSES = (
    *("model", "fallback", "deployment", "provider", "rout", "config", "target", "destination"),
    *("apibase", "baseurl", "customhost", "virtualkey", "byok", "xbf", "litellmtags"),
)


def without_choices(raw: RawHeaders) -> list[tuple[bytes, bytes]]:
    """Return headers without those by which a gateway would choose another model, provider, or address."""
    return [pair for pair in raw if not _chooses(pair[0])]


def _chooses(name: bytes) -> bool:
    letters = "".join(filter(str.isalnum, name.decode("latin-1").lower()))
    return any(part in letters for part in _CHOOSES)


def for_other_request(headers: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return a request's headers for another request of the proxy about the same conversation."""
    return [(name, _BY_THE_PROXY.get(name, value)) for name, value in headers if name not in _OF_ONE_REQUEST]


def client_query(scope: Scope) -> str:
    """Return the query string to forward."""
    return quote(scope["query_string"], safe="/?:@!$&'()*+,;=%-._~")


_OF_ONE_REQUEST = frozenset({"accept-encoding", "idempotency-key"})
"""A server may answer a repeated idempotency key with its first response."""

_BY_THE_PROXY = {"x-initiator": "agent"}
"""Headers whose values say that the proxy makes a request. GitHub Copilot bills each one of a user."""

_REMEMBERED_NAMES = 1_000
_forwarded_as: dict[bytes, str] = {}
"""The names of headers that clients send, as they are forwarded; empty if they aren't."""


def _forward_as(raw_name: bytes) -> str:
    name = raw_name.decode("latin-1").lower()
    if _unspelled(name) in _NOT_FOR_UPSTREAM or name in _NOT_FOR_UPSTREAM:
        name = ""
    if len(_forwarded_as) < _REMEMBERED_NAMES and len(raw_name) <= 100:
        _forwarded_as[raw_name] = name
    return name


def for_client(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the upstream's headers to forward, in lower case: without connection headers."""
    kept = []
    named: set[str] = set()
    for sent, value in pairs:
        name = _returned_as.get(sent)
        if name is None:
            name = _return_as(sent)
        if name:
            kept.append((name, value))
        elif sent.lower() == "connection":
            named.update(part.strip().lower() for part in value.split(","))
    return kept if named <= HOP_BY_HOP else _without(kept, named)


_returned_as: dict[str, str] = {}
"""The names of headers that upstreams send, as they are returned; empty if they aren't."""


def _return_as(sent: str) -> str:
    name = sent.lower()
    if name in _NOT_FOR_CLIENT or _unspelled(name) in _NOT_FOR_CLIENT:
        name = ""
    if len(_returned_as) < _REMEMBERED_NAMES and len(sent) <= 100:
        _returned_as[str(sent)] = name
    return name


def _without(pairs: list[tuple[str, str]], dropped: Set[str]) -> list[tuple[str, str]]:
    return [pair for pair in pairs if pair[0] not in dropped and _unspelled(pair[0]) not in dropped]


def _unspelled(name: str) -> str:
    """Return a name with hyphens in place of underscores, because many servers take one for the other."""
    return name.replace("_", "-")


def encoded(pairs: Sequence[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    """Return headers for ASGI. An upstream's headers keep their original bytes, in any encoding."""
    joined = "\n".join(chain.from_iterable(pairs)).encode("utf-8", "surrogateescape")
    parts = joined.split(b"\n")
    if len(parts) == 2 * len(pairs):
        return list(zip(parts[::2], parts[1::2], strict=True))
    return [(name.encode(), value.encode("utf-8", "surrogateescape")) for name, value in pairs]


def _text(value: bytes) -> str:
    """Return a header's value as text for the client library, which encodes it as UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


def on_loopback(host: str) -> bool:
    """Return whether a server that listens on this address takes connections of its own machine only."""
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


def without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and (port.isdigit() or not port) else host


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def key_digest(text: str) -> str:
    """Return the hexadecimal SHA-256 of a header's original bytes. The server decodes headers as Latin-1."""
    try:
        sent = text.encode("latin-1")
    except UnicodeEncodeError:
        sent = text.encode("utf-8", "surrogatepass")
    return hashlib.sha256(sent).hexdigest()
