"""Sessions of the dashboard: a signed cookie with the digest of a key.

The key is looked up again for each request, so a key that the configuration no longer has ends its sessions.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Callable

from starlette.requests import cookie_parser

from proxy.access.admin import from_own_page, key_digest
from proxy.http.headers import RawHeaders

SECRET = "COMPACTION_PROXY_SESSION_SECRET"  # noqa: S105 - the name of an environment variable
"""The environment variable by which the workers of one server share the secret that signs cookies."""

COOKIE = "compaction_session"

PATH = "/compaction"

SECONDS = 12 * 3600
"""Lifetime of a session."""


class Sessions:
    """Signs and verifies the cookies of one server."""

    def __init__(self, secret: str | None = None, clock: Callable[[], float] = time.time) -> None:
        """Default for the secret: the one in the environment, or else a random one. ``clock`` returns seconds."""
        self._secret = (secret or os.environ.get(SECRET) or secrets.token_hex(32)).encode()
        self._clock = clock

    def cookie(self, key: str) -> str:
        """Return the ``set-cookie`` value that starts a session for a key."""
        text = f"{key_digest(key)}.{int(self._clock()) + SECONDS}"
        return f"{COOKIE}={text}.{self._signature(text)}; Path={PATH}; Max-Age={SECONDS}; HttpOnly; SameSite=Strict"

    def digest(self, headers: RawHeaders) -> str | None:
        """Return the digest of the key whose session a request belongs to; ``None`` without a valid session."""
        headers = list(headers)
        if not from_own_page(headers):
            return None
        for name, value in headers:
            if name == b"cookie" and (found := self._verified(cookie_parser(value.decode("latin-1")).get(COOKIE, ""))):
                return found
        return None

    def _verified(self, cookie: str) -> str | None:
        text, _, signature = cookie.rpartition(".")
        digest, _, ends = text.partition(".")
        if not hmac.compare_digest(signature.encode(), self._signature(text).encode()):
            return None
        return digest if self._clock() < int(ends) else None

    def _signature(self, text: str) -> str:
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()


def ended() -> str:
    """Return the ``set-cookie`` value that ends a session."""
    return f"{COOKIE}=; Path={PATH}; Max-Age=0; HttpOnly; SameSite=Strict"
