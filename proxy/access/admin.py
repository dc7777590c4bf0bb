"""Identify administrators by a key or a one-time link, and visitors of the dashboard by their session.

The link is for a server on loopback without admin keys. The server's parent process makes it, and all workers accept
it. It works once, in one of them: the worker that deletes the file named by the token's digest starts the session. That
worker writes the next link to a file that only the server's user can read.

A session with a key is a signed cookie with the key's digest. The proxy looks up the key for each request, so removing
a key from the configuration ends its sessions.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Self

import msgspec
import structlog

from proxy.config.settings import Settings
from proxy.config.teams import AdminKeySettings
from proxy.errors import NotAuthenticated
from proxy.http.headers import LOOPBACK, RawHeaders, cookies, key_digest
from proxy.http.headers import credential as credential_in
from proxy.telemetry.metrics import refused

log = structlog.get_logger(__name__)

LINK = "COMPACTION_PROXY_ADMIN_LINK"  # the environment variable by which the workers of one server share the link

LINK_PATH = "/compaction/"

LINK_COOKIE = "compaction_admin"

_FOLDER, _FILE = "compaction-proxy-", "link"
"""The start of the name of a server's private folder, and the name of the file with the link in it."""

_BYTES = 32

_SHOWN = 12  # digits of a key's hash in logs, for a key without a name


class Admin(msgspec.Struct, frozen=True):
    """An administrator who sent a request. ``content`` is false if its key may not read messages."""

    name: str
    content: bool = True


class AdminLink:
    """The one-time link of one server, and the session that it starts.

    ``folder`` is private. It has a file for each token that is still valid, and the file ``link``.
    """

    def __init__(self, session: str, folder: Path, page: str) -> None:
        """``page`` is the URL of the dashboard."""
        self.file = folder / _FILE
        self.session = session
        self._folder = folder
        self._page = page

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Self | None:
        """Return the link that the parent process made, or ``None`` if there is none."""
        if not (text := environ.get(LINK)):
            return None
        session, folder, page = json.loads(text)
        return cls(session, Path(folder), page)

    @property
    def address(self) -> str:
        return self.file.read_text(encoding="utf-8").strip()

    def renew(self) -> None:
        """Make a link with a new token, and write it to the file. Raises ``OSError``."""
        token = secrets.token_urlsafe(_BYTES)
        (self._folder / key_digest(token)).touch(0o600)
        fresh = self._folder / f"{key_digest(token)}.link"
        fresh.touch(0o600)
        fresh.write_text(f"{self._page}?token={token}\n", encoding="utf-8")
        fresh.replace(self.file)

    def redeem(self, token: str) -> str | None:
        """Return the session's cookie, the first time that this is called with a valid token."""
        try:
            (self._folder / key_digest(token)).unlink()
        except FileNotFoundError:  # used, wrong, or the system has cleaned up the folder
            return None
        try:
            self.renew()
        except OSError as error:
            log.warning("admin.no_link", reason=error.strerror or type(error).__name__)
        return f"{LINK_COOKIE}={self.session}; Path={LINK_PATH.rstrip('/')}; HttpOnly; SameSite=Strict"

    def started(self, headers: RawHeaders) -> bool:
        """Return whether a request belongs to the session, and doesn't come from a page of another origin.

        For browsers, all ports of a host are one site, so they send the cookie for pages of other local servers, too.
        """
        headers = list(headers)
        if not from_own_page(headers):
            return False
        return any(
            hmac.compare_digest(cookie.encode(), self.session.encode()) for cookie in cookies(headers, LINK_COOKIE)
        )


def from_own_page(headers: RawHeaders) -> bool:
    """Return whether a request comes from the proxy's own pages, or from the user, by what the browser states."""
    return not any(name == b"sec-fetch-site" and value not in (b"none", b"same-origin") for name, value in headers)


@contextlib.contextmanager
def admin_link(settings: Settings, environ: MutableMapping[str, str], page: str) -> Iterator[AdminLink | None]:
    """Make the link of a server, valid until the block ends. Yield ``None`` if the settings don't permit one.

    ``page`` is the URL of the dashboard.
    """
    environ.pop(LINK, None)
    if not linked(settings):
        yield None
        return
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=_FOLDER))
            link = AdminLink(secrets.token_urlsafe(_BYTES), Path(folder), page)
            link.renew()
        except OSError as error:
            log.warning("admin.no_link", reason=error.strerror or type(error).__name__)
            yield None
            return
        environ[LINK] = json.dumps([link.session, folder, page])
        stack.callback(environ.pop, LINK, None)
        yield link


class Admins:
    """The administrators of one configuration. See ``Authenticator`` for the look-up of keys."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.time) -> None:
        """``clock`` returns seconds since 1970."""
        self._clock = clock
        self._linked = linked(settings)
        keys = () if settings.admin is None else settings.admin.keys
        self.keys = {key.hash.removeprefix("sha256:"): key for key in keys}
        """The admin keys by their digests, expired or not."""

    def sender(self, headers: RawHeaders, link: AdminLink | None) -> Admin | None:
        """Return the administrator who sent a request, or ``None``. Raises ``NotAuthenticated`` for an expired key.

        A key takes precedence over a session, so that a tool in a signed-in browser can use the key of a team.
        """
        credential, other = credential_in(headers)
        if credential is None:
            known = other is None and self._linked and link is not None and link.started(headers)
            return Admin("one-time link") if known else None
        key = self.keys.get(key_digest(credential.key))
        if key is not None and self._clock() >= key.ends:
            raise not_authenticated(f"This admin key expired on {key.expires} (UTC). List a new one under admin.keys.")
        return None if key is None else _admin(key)

    def holder(self, digest: str) -> Admin | None:
        key = self.keys.get(digest)
        return _admin(key) if key is not None and self._clock() < key.ends else None

    def redeem(self, link: AdminLink | None, token: str) -> str:
        """Return the cookie of the session that a link starts. Raises ``NotAuthenticated``."""
        cookie = link.redeem(token) if link is not None and self._linked else None
        if cookie is None:
            raise not_authenticated(
                "This link isn't valid, or it was used before. "
                + (f"The next one is in {link.file}. " if link is not None and link.file.exists() else "")
                + "You can also list a key under admin.keys in the configuration, and sign in with it."
            )
        return cookie


def not_authenticated(message: str) -> NotAuthenticated:
    refused("key").inc()
    return NotAuthenticated(message)


def _admin(key: AdminKeySettings) -> Admin:
    return Admin(key.name or key.hash[: len("sha256:") + _SHOWN], key.content)


def linked(settings: Settings) -> bool:
    """Return whether the dashboard has a one-time link: on loopback, unless ``admin`` is set."""
    return settings.admin is None and settings.server.host in LOOPBACK


SESSION_SECRET = "COMPACTION_PROXY_SESSION_SECRET"  # noqa: S105 - the name of an environment variable
"""The environment variable by which the workers of one server share the secret that signs cookies."""

SESSION_COOKIE = "compaction_session"

SESSION_PATH = "/compaction"

SESSION_SECONDS = 12 * 3600  # lifetime of a session


class Sessions:
    """Signs and verifies the cookies of one server."""

    def __init__(self, secret: str | None = None, clock: Callable[[], float] = time.time) -> None:
        """Default for the secret: the one in the environment, or else a random one. ``clock`` returns seconds."""
        self._secret = (secret or os.environ.get(SESSION_SECRET) or secrets.token_hex(32)).encode()
        self._clock = clock

    def cookie(self, key: str) -> str:
        """Return the ``set-cookie`` value that starts a session for a key."""
        text = f"{key_digest(key)}.{int(self._clock()) + SESSION_SECONDS}"
        return _session_cookie(f"{text}.{self._signature(text)}", SESSION_SECONDS)

    def digest(self, headers: RawHeaders) -> str | None:
        """Return the digest of the key whose session a request belongs to; ``None`` without a valid session."""
        headers = list(headers)
        if not from_own_page(headers):
            return None
        verified = (self._verified(cookie) for cookie in cookies(headers, SESSION_COOKIE))
        return next((digest for digest in verified if digest is not None), None)

    def _verified(self, cookie: str) -> str | None:
        text, _, signature = cookie.rpartition(".")
        digest, _, ends = text.partition(".")
        if not hmac.compare_digest(signature.encode(), self._signature(text).encode()):
            return None
        return digest if self._clock() < int(ends) else None

    def _signature(self, text: str) -> str:
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()


def end_session() -> str:
    return _session_cookie("", 0)


def _session_cookie(value: str, seconds: int) -> str:
    return f"{SESSION_COOKIE}={value}; Path={SESSION_PATH}; Max-Age={seconds}; HttpOnly; SameSite=Strict"
