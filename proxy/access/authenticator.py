"""Identify the caller of a request, and its policy."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Literal

import msgspec
from msgspec.structs import replace

from proxy.access.admin import Admins, not_authenticated
from proxy.config.policy import Policy
from proxy.config.settings import Settings
from proxy.config.teams import KeySettings, LimitSettings
from proxy.http.headers import LOOPBACK, Credential, RawHeaders, key_digest
from proxy.http.headers import credential as credential_in
from proxy.store.interface import SHARED_TENANT, UNSTORED_TENANT

ADMIN = (
    "This is an admin key. It's valid only for the records of requests. Send the key of a team or an upstream instead."
)

EXPIRED = "This API key expired on {day} (UTC). Ask the operator of this proxy for a new one."


class Caller(msgspec.Struct, frozen=True, eq=False):
    """The sender of a request.

    ``tenant`` is the unit of isolation: a tenant never sees the stored data of another. ``credential`` is the caller's
    key, for an upstream without a configured key, or ``None`` if the proxy issues the keys. ``models`` is the globs of
    the team's models, or ``None`` for all models. ``paths`` is `teams.NAME.paths`. ``limits`` is the team's limits.
    ``ends`` is when the key expires, in seconds since 1970. ``key`` is the name of a team's key, or the start of its
    hash.
    """

    tenant: str
    team: str | None
    policy: Policy
    credential: Credential | None
    models: tuple[str, ...] | None
    paths: Literal["all", "models", "chat"] = "all"
    limits: LimitSettings | None = None
    ends: float = math.inf
    key: str | None = None

    @property
    def has_storage(self) -> bool:
        """Return whether the proxy may store summaries and archived messages for the caller."""
        return self.tenant != UNSTORED_TENANT


class Authenticator:
    """The teams of one configuration.

    The configuration has only SHA-256 digests of keys, and the proxy looks up the whole digest of the received key. The
    time of a lookup could reveal a part of a digest at most, which doesn't help to find a key.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.time) -> None:
        """``clock`` returns seconds since 1970."""
        self._settings = settings
        self._clock = clock
        self._open = settings.auth.mode == "open"
        shared = settings.auth.keyless == "shared"
        if settings.auth.keyless is None:
            shared = settings.server.host in LOOPBACK
        self._keyless = SHARED_TENANT if shared else UNSTORED_TENANT
        self.admins = Admins(settings, clock)
        """The administrators. None of their keys identifies a caller."""
        self._keys: dict[str, tuple[KeySettings, str]] = {
            key.hash.removeprefix("sha256:"): (key, name) for name, team in settings.teams.items() for key in team.keys
        }

    def authenticate(self, headers: RawHeaders) -> Caller:
        """Return the caller of a request with these headers. See ``headers.credential`` for the key that counts.

        With ``auth.mode: open``, every key is its own tenant, and a team's key has the team's policy. Depending on
        ``auth.keyless``, callers without a key share one tenant, or the proxy stores nothing for them. With
        ``auth.mode: keys``, the tenant is the team, and any other key raises ``NotAuthenticated``. In both modes, a
        team's expired key raises it, too, because it must not bypass the team's limits. So does an admin key.
        """
        credential, other = credential_in(headers)
        digest = None if credential is None else key_digest(credential.key)
        return self._identified(digest, credential, other)

    def holder(self, digest: str) -> Caller:
        """Return the caller that a key with this digest belongs to. Raises ``NotAuthenticated``."""
        return self._identified(digest, None, None)

    def _identified(self, digest: str | None, credential: Credential | None, other: str | None) -> Caller:
        if digest in self.admins.keys:
            raise not_authenticated(ADMIN)
        key, team = self._keys.get(digest or "", (None, None))
        ends = math.inf if key is None else key.ends
        if key is not None and self._clock() >= ends:
            raise not_authenticated(EXPIRED.format(day=key.expires))
        if self._open:
            # The proxy doesn't forward other schemes (Basic, …), but they still distinguish callers.
            digest = digest if digest is not None or not other else key_digest(other)
            tenant = self._keyless if digest is None else f"key:{digest}"
        elif team is None:
            raise not_authenticated(_refusal(digest, credential))
        else:
            tenant, credential = f"team:{team}", None
        if team is None or key is None:
            return Caller(tenant, None, self._settings.policies["default"], credential, None)
        known = self._settings.teams[team]
        paths = known.paths or ("all" if known.models is None else "models")
        return Caller(
            tenant,
            team,
            self._settings.policies[known.policy],
            credential,
            known.models,
            paths,
            known.limits,
            key.ends,
            key.shown,
        )


def for_model(caller: Caller, model: str) -> Caller:
    """Return the caller with its policy for a model, by the name in the request.

    Without storage for a caller, the policy has no archive.
    """
    policy = caller.policy.for_model(model)
    policy = policy if caller.has_storage else policy.unarchived
    return caller if policy is caller.policy else replace(caller, policy=policy)


def may_use(caller: Caller, model: str) -> bool:
    """Return whether the caller's team may use a model, by the name in the request. Case matters."""
    return caller.models is None or any(fnmatchcase(model, glob) for glob in caller.models)


def _refusal(digest: str | None, credential: Credential | None) -> str:
    if not digest:
        return "The request has no API key. Send it as 'Authorization: Bearer KEY', 'x-api-key', or 'api-key'."
    if credential is None:
        return "This key isn't known here. Check it, or ask the operator of this proxy for one."
    return "This API key doesn't belong to any team. Check the key, or ask the operator of this proxy for one."
