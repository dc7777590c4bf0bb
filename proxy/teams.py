"""Who is calling, and which policy applies."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from proxy.config.policy import Policy
from proxy.config.settings import Settings
from proxy.errors import NotAuthenticated

ANONYMOUS = "anonymous"

EVERYBODY = "everybody"
"""The tenant under which what belongs to none is stored; no caller's: theirs: ``anonymous``, ``key:…``, ``team:…``."""


@dataclass(frozen=True)
class Caller:
    """Where a request comes from.

    ``tenant`` is the unit of isolation: nothing that is stored under one is ever seen by another. ``credential`` is
    the key to pass on to an upstream that has none of its own: the caller's, or ``None`` where keys are this proxy's
    own. ``models`` are the globs of what the team may use; ``None`` for everything.
    """

    tenant: str
    team: str | None
    policy: Policy
    credential: str | None = field(repr=False)
    models: tuple[str, ...] | None


class Teams:
    """The teams of one configuration.

    Keys are known as SHA-256 digests only, and looked up by the whole digest of what was sent. How long that takes
    could tell something of a digest at most; nobody can make a key for a digest, so it is of no use. The match is
    confirmed in constant time over the whole digest, never over a part of a key.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._open = settings.auth.mode == "open"
        self._known = {
            digest: (digest, name)
            for name, team in settings.teams.items()
            for digest in (key.removeprefix("sha256:") for key in team.keys)
        }

    def identify(self, authorization: str | None, api_key_header: str | None = None) -> Caller:
        """The caller of a request with these ``Authorization`` and ``api-key`` headers (the latter as Azure has it).

        With ``auth.mode: open`` every key is a tenant of its own, and a key listed under a team brings that team's
        policy. Callers without any key share the tenant "anonymous": between them nothing is isolated. With
        ``auth.mode: keys`` the tenant is the team. Raises ``errors.NotAuthenticated`` there for any other key.
        """
        credential = _bearer(authorization) or (api_key_header or "").strip() or None
        digest = None if credential is None else _digest(credential)
        team = None if digest is None else _team(self._known, digest)
        if self._open:
            return self._caller(_open_tenant(digest, authorization), team, credential)
        if team is None:
            raise NotAuthenticated(_refusal(credential))
        return self._caller(f"team:{team}", team, None)

    def _caller(self, tenant: str, team: str | None, credential: str | None) -> Caller:
        if team is None:
            return Caller(tenant, None, self._settings.policies["default"], credential, None)
        known = self._settings.teams[team]
        return Caller(tenant, team, self._settings.policies[known.policy], credential, known.models)


def for_model(caller: Caller, model: str) -> Caller:
    """The caller with the policy that is in force for a model, by the name the request gives."""
    policy = caller.policy.for_model(model)
    return caller if policy is caller.policy else replace(caller, policy=policy)


def may_use(caller: Caller, model: str) -> bool:
    """Whether the caller's team may use a model, by the name the request gives. Case matters."""
    return caller.models is None or any(fnmatchcase(model, glob) for glob in caller.models)


def _bearer(authorization: str | None) -> str | None:
    scheme, _, token = (authorization or "").strip().partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


def _digest(text: str) -> str:
    """SHA-256 (hex) of the bytes that came over the wire, which a server hands over decoded as Latin-1."""
    try:
        sent = text.encode("latin-1")
    except UnicodeEncodeError:
        sent = text.encode("utf-8", "surrogatepass")
    return hashlib.sha256(sent).hexdigest()


def _team(known: Mapping[str, tuple[str, str]], digest: str) -> str | None:
    """The name of the team whose key has this digest."""
    found = known.get(digest)
    return found[1] if found is not None and hmac.compare_digest(found[0], digest) else None


def _open_tenant(digest: str | None, authorization: str | None) -> str:
    if digest is not None:
        return f"key:{digest}"
    # Another scheme (Basic, …) is no key to pass on, but still tells callers apart.
    return f"key:{_digest(authorization)}" if authorization else ANONYMOUS


def _refusal(credential: str | None) -> str:
    if credential is None:
        return "No API key was given. Send the key of your team as 'Authorization: Bearer KEY'."
    return "This API key belongs to no team here. Check the key, or ask the operator of this proxy for one."
