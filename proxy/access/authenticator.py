"""Who is calling, and which policy applies."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Literal

import msgspec
from msgspec.structs import replace

from proxy.config.policy import Policy
from proxy.config.settings import KeySettings, LimitSettings, Settings
from proxy.errors import NotAuthenticated
from proxy.http.headers import Credential, RawHeaders
from proxy.http.headers import credential as credential_in
from proxy.http.hosts import LOOPBACK
from proxy.store.tenants import SHARED_TENANT, UNSTORED_TENANT
from proxy.telemetry.metrics import refused

EXPIRED = "This API key expired on {day} (UTC). Ask the operator of this proxy for a new one."


class Caller(msgspec.Struct, frozen=True, eq=False):
    """Where a request comes from.

    ``tenant`` is the unit of isolation: nothing that is stored under one is ever seen by another. ``credential`` is
    the key to pass on to an upstream that has none of its own: the caller's, or ``None`` where keys are this proxy's
    own. ``models`` are the globs of what the team may use; ``None`` for everything. ``paths`` is `teams.NAME.paths`.
    ``limits`` is how much of it.
    """

    tenant: str
    team: str | None
    policy: Policy
    credential: Credential | None
    models: tuple[str, ...] | None
    paths: Literal["all", "models", "chat"] = "all"
    limits: LimitSettings | None = None

    @property
    def kept(self) -> bool:
        """Whether summaries and the archive may be stored for the caller."""
        return self.tenant != UNSTORED_TENANT


class Authenticator:
    """The teams of one configuration.

    Keys are known as SHA-256 digests only, and looked up by the whole digest of what was sent. How long that takes
    could tell something of a digest at most; nobody can make a key for a digest, so it is of no use. The match is
    confirmed in constant time over the whole digest, never over a part of a key.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.time) -> None:
        """``clock`` gives seconds since 1970."""
        self._settings = settings
        self._clock = clock
        self._open = settings.auth.mode == "open"
        self._keyless = SHARED_TENANT if _shared(settings) else UNSTORED_TENANT
        self._known = {
            key.hash.removeprefix("sha256:"): (key, name) for name, team in settings.teams.items() for key in team.keys
        }

    def identify(self, headers: RawHeaders) -> Caller:
        """Return the caller of a request with these headers. See ``headers.credential`` for the key that counts.

        With ``auth.mode: open`` every key is a tenant of its own, and a key listed under a team brings that team's
        policy. Callers without any key are "anonymous", one tenant, between whom nothing is isolated, or "nobody", as
        ``auth.keyless`` says. With ``auth.mode: keys`` the tenant is the team. Raises ``errors.NotAuthenticated`` there
        for any other key, and with either mode for one of a team's that has expired: it must not get around the team's
        limits.
        """
        credential, other = credential_in(headers)
        digest = None if credential is None else _digest(credential.key)
        key, team = (None, None) if digest is None else _known(self._known, digest)
        if key is not None and self._clock() >= key.ends:
            refused("key").inc()
            raise NotAuthenticated(EXPIRED.format(day=key.expires))
        if self._open:
            return self._caller(_open_tenant(digest, other) or self._keyless, team, credential)
        if team is None:
            refused("key").inc()
            raise NotAuthenticated(_refusal(credential))
        return self._caller(f"team:{team}", team, None)

    def _caller(self, tenant: str, team: str | None, credential: Credential | None) -> Caller:
        if team is None:
            return Caller(tenant, None, self._settings.policies["default"], credential, None)
        known = self._settings.teams[team]
        paths = known.paths or ("all" if known.models is None else "models")
        return Caller(
            tenant, team, self._settings.policies[known.policy], credential, known.models, paths, known.limits
        )


def for_model(caller: Caller, model: str) -> Caller:
    """The caller with the policy that is in force for a model, by the name the request gives.

    Nothing is archived for callers of whom nothing is kept.
    """
    policy = caller.policy.for_model(model)
    policy = policy if caller.kept else policy.unarchived
    return caller if policy is caller.policy else replace(caller, policy=policy)


def may_use(caller: Caller, model: str) -> bool:
    """Whether the caller's team may use a model, by the name the request gives. Case matters."""
    return caller.models is None or any(fnmatchcase(model, glob) for glob in caller.models)


def _digest(text: str) -> str:
    """SHA-256 (hex) of the bytes that came over the wire, which a server hands over decoded as Latin-1."""
    try:
        sent = text.encode("latin-1")
    except UnicodeEncodeError:
        sent = text.encode("utf-8", "surrogatepass")
    return hashlib.sha256(sent).hexdigest()


def _known(known: Mapping[str, tuple[KeySettings, str]], digest: str) -> tuple[KeySettings, str] | tuple[None, None]:
    """The key that has this digest, and the name of its team."""
    found = known.get(digest)
    if found is not None and hmac.compare_digest(found[0].hash.removeprefix("sha256:"), digest):
        return found
    return None, None


def _open_tenant(digest: str | None, authorization: str | None) -> str | None:
    if digest is not None:
        return f"key:{digest}"
    # Another scheme (Basic, …) is no key to pass on, but still tells callers apart.
    return f"key:{_digest(authorization)}" if authorization else None


def _shared(settings: Settings) -> bool:
    """Whether callers without any key are one caller: one machine's, unless the configuration says it."""
    if settings.auth.keyless is not None:
        return settings.auth.keyless == "shared"
    return settings.server.host in LOOPBACK


def _refusal(credential: Credential | None) -> str:
    if credential is None:
        return "No API key was given. Send your team's key as 'Authorization: Bearer KEY', 'x-api-key' or 'api-key'."
    return "This API key belongs to no team here. Check the key, or ask the operator of this proxy for one."
