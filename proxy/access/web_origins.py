"""Protect the proxy from web pages: decide which browser requests it serves, and which origins may read responses.

A web page can send requests to any address that its reader's machine can reach, loopback included. The proxy must not
spend an operator's key, or return stored data, because someone opened such a page. Two checks prevent this:

- **Host.** With DNS rebinding, a page's own host name resolves to the proxy, so the browser treats the proxy as part
  of that page. The ``Host`` header still has the page's name.
- **Origin.** A page of another origin can send "simple" requests without asking first. Browsers mark them with
  ``Origin`` or ``Sec-Fetch-Site``.

CORS headers come from Starlette's middleware.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import structlog
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Scope

from proxy.config import Settings
from proxy.errors import HostNotAllowed, OriginNotAllowed, ProxyError
from proxy.http.headers import KEY_HEADERS, Own, is_address, on_loopback, without_port
from proxy.telemetry.metrics import refused

log = structlog.get_logger(__name__)

OPEN = frozenset({"/livez"})
"""Paths without any check. They return nothing about the proxy, its callers, or its upstreams."""

UNKEYED = OPEN | {"/", "/readyz", "/metrics"}
"""Paths that return the same with any key or none. All others need a key with ``auth.mode: keys``."""

LINKED = frozenset({"/"})
"""Paths that a link on another site may lead to. They change nothing and hold nothing private."""

OWN_FORMS = frozenset({"/compaction/sign-in", "/compaction/sign-out"})
"""Paths that start or end a browser's session. Only the proxy's own pages may post to them, with any ``auth.mode``.

Otherwise, another page could sign a browser in with a key that its author knows, or end a session.
"""

LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})

EXPOSED = (*Own, "x-request-id", "retry-after", "*")
"""Response headers that a page may read. Without credentials, browsers read ``*`` as every header, so upstreams'
rate limits work, too."""

PREFLIGHT_SECONDS = 600  # how long a browser may cache a preflight response

_KEYS = frozenset(name.encode() for name in KEY_HEADERS)
_TELLING = frozenset({b"host", b"origin", b"sec-fetch-site"})
_READ = _KEYS | _TELLING | {b"access-control-request-method"}
_REMEMBERED = 100  # remember at most this many spellings of `Host` that are fine
_REPORTED = 100
"""Log at most this many different names of refused hosts and origins, so that a page can't flood the log."""


@dataclass(slots=True)
class Sender:
    """What shows who sent a request. ``keyed``: it has a key that a browser doesn't add itself."""

    hosts: list[str]
    origin: str | None = None
    site: str | None = None
    keyed: bool = False
    preflight: bool = False
    posts: bool = False


class WebRules:
    """The checks for one configuration."""

    def __init__(self, settings: Settings) -> None:
        server = settings.server
        self._origins = frozenset(server.cors_origins)
        self._local = on_loopback(server.host)
        self._hosts = LOOPBACK_HOSTS.union(server.hosts) if server.hosts or self._local else None
        self._verified = settings.auth.mode == "keys"
        # A rebound page can add any key to its requests. If the upstream gets the operator's key, that proves nothing.
        self._key_suffices = not any(upstream.spends for upstream in settings.upstreams.values())
        self._reported: set[str] = set()
        self._fine: set[bytes] = set()

    def judge(self, scope: Scope) -> tuple[str | None, ProxyError | None]:
        """Return the configured origin that a request comes from, and the error if the proxy must refuse it.

        The origin is ``None`` for requests from elsewhere, or if they don't come from a page.
        """
        for name, value in scope["headers"]:
            if name in _TELLING and (name != b"host" or value not in self._fine):
                return self._judged(scope)
        return None, None

    def _judged(self, scope: Scope) -> tuple[str | None, ProxyError | None]:
        sender = _sender(scope)
        path = scope["path"]
        origin = sender.origin if self._configured(sender.origin) else None
        if sender.preflight:
            return origin, None if origin is not None else self._refused_origin(sender)
        # "*" permits calls with a key. It doesn't make every page on the web one of the proxy's own.
        if path in OWN_FORMS and sender.posts and _cross_site(sender) and sender.origin not in self._origins:
            return None, self._refused_origin(sender)
        takes_key = path not in UNKEYED
        unknown = [host for host in sender.hosts if not self._is_expected(host)]
        if path in OPEN or (takes_key and self._verified):
            return origin, None
        if unknown and not (takes_key and sender.keyed and self._key_suffices):
            return origin, self._refused_host(unknown[0])
        # A page needs a preflight to send a key to another origin, and only configured origins get one.
        if origin is None and not sender.keyed and path not in LINKED and _cross_site(sender):
            return None, self._refused_origin(sender)
        return origin, None

    def cors(self, app: ASGIApp, origin: str) -> ASGIApp:
        """Wrap an application so that its responses allow a configured origin. Preflights are answered here."""
        return CORSMiddleware(
            app,
            allow_origins=["*"] if "*" in self._origins else [origin],
            allow_methods=["*"],
            allow_headers=["*"],
            allow_private_network=True,
            expose_headers=EXPOSED,
            max_age=PREFLIGHT_SECONDS,
        )

    def _configured(self, origin: str | None) -> bool:
        return origin is not None and (origin in self._origins or "*" in self._origins)

    def _is_expected(self, host: str) -> bool:
        name = without_port(host.lower())
        # DNS rebinding needs a name, so addresses are safe.
        expected = self._hosts is None or name in self._hosts or (not self._local and is_address(name))
        if expected and len(self._fine) < _REMEMBERED:
            self._fine.add(host.encode("latin-1"))
        return expected

    def _refused_host(self, host: str) -> ProxyError:
        refused("host").inc()
        self._report("host.refused", host, "server.hosts")
        key = "send your API key, " if self._key_suffices else ""
        return HostNotAllowed(
            f"This proxy doesn't serve the host name {host[:100]!r}. "
            f"Use localhost or 127.0.0.1, {key}or have the operator add the name to server.hosts."
        )

    def _refused_origin(self, sender: Sender) -> ProxyError:
        refused("origin").inc()
        origin = sender.origin or sender.site or ""
        self._report("origin.refused", origin, "server.cors_origins")
        return OriginNotAllowed(
            f"This proxy doesn't serve web pages of other origins (this one: {origin[:100]!r}). "
            "Have the operator add the page's origin to server.cors_origins."
        )

    def _report(self, event: str, name: str, setting: str) -> None:
        key = f"{event} {name[:100]}"
        if key not in self._reported and len(self._reported) < _REPORTED:
            self._reported.add(key)
            log.warning(event, name=name[:100], setting=setting)


def _sender(scope: Scope) -> Sender:
    headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
    sender = Sender([], posts=scope["method"] == "POST")
    asks = False
    for name, value in headers:
        if name not in _READ:
            continue
        text = value.decode("latin-1").strip()
        if name == b"host":
            sender.hosts.append(text)
        elif name == b"origin":
            # The configuration can't contain two origins as one.
            sender.origin = text if sender.origin is None else f"{sender.origin}, {text}"
        elif name == b"sec-fetch-site":
            sender.site = text.lower()
        elif name == b"access-control-request-method":
            asks = True
        else:
            sender.keyed = sender.keyed or bool(_is_bearer(text) if name == b"authorization" else text)
    sender.preflight = asks and scope["method"] == "OPTIONS" and sender.origin is not None
    return sender


def _is_bearer(authorization: str) -> bool:
    """Return whether it holds a key. Browsers add passwords (Basic, Negotiate) to a page's requests themselves."""
    scheme, _, key = authorization.partition(" ")
    return scheme.lower() == "bearer" and bool(key.strip())


def _cross_site(sender: Sender) -> bool:
    if sender.site in ("cross-site", "same-site"):
        return True
    if sender.origin is None or sender.site == "same-origin":
        return False
    scheme, _, authority = sender.origin.lower().partition("://")
    return scheme not in ("http", "https") or [authority] != [host.lower() for host in sender.hosts]
