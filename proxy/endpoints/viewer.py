"""Find out whose records a request may see."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from starlette.types import Scope

from proxy.http.headers import credential
from proxy.pipeline.context import begin_request
from proxy.pipeline.services import Services

KEYLESS = "callers without a key"
"""The name of senders without a key or a session."""


class Viewer(msgspec.Struct, frozen=True):
    """The sender of a request for records.

    ``tenants``: whose records it may see, ``None`` for all. ``name`` describes the sender. ``signed_in`` is true if the
    sender has a session.
    """

    tenants: tuple[str, ...] | None
    name: str = "administrator"
    signed_in: bool = False

    def sees(self, tenant: str) -> bool:
        """Return whether the sender may see what belongs to a tenant."""
        return self.tenants is None or tenant in self.tenants


@asynccontextmanager
async def viewing(service: Services, scope: Scope) -> AsyncIterator[Viewer]:
    """Count a request, and yield its sender. Administrators have no rate limit.

    Raises ``NotAuthenticated`` and ``TooManyRequests``.
    """
    teams, headers = service.configuration.teams, scope["headers"]
    if teams.admins.include(headers, service.admin_link):
        yield Viewer(None)
        return
    session = service.sessions.digest(headers) if credential(headers) == (None, None) else None
    if session is not None and teams.admins.holds(session):
        yield Viewer(None, signed_in=True)
        return
    caller = begin_request(service, scope, forwarded=False).caller if session is None else teams.holder(session)
    async with service.quotas.admit(caller):
        name = f"team {caller.team}" if caller.team is not None else "one key" if session else KEYLESS
        yield Viewer((caller.tenant,) if caller.kept else (), name, session is not None)
