"""Find out whose records a request may see."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import structlog
from starlette.types import Scope

from proxy.access.admin import Admin
from proxy.errors import ContentNotAllowed
from proxy.http.headers import credential
from proxy.pipeline.exchange import begin_request
from proxy.pipeline.services import Services
from proxy.telemetry.record import RequestRecord

log = structlog.get_logger(__name__)

KEYLESS = "callers without a key"
"""The name of senders without a key or a session."""


class Viewer(msgspec.Struct, frozen=True):
    """The sender of a request for records.

    ``tenants``: whose records it may see, ``None`` for all. ``name`` describes the sender. ``signed_in`` is true if the
    sender has a session. ``admin`` is ``None`` unless the sender is an administrator.
    """

    tenants: tuple[str, ...] | None
    name: str = "administrator"
    signed_in: bool = False
    admin: Admin | None = None

    def sees(self, tenant: str) -> bool:
        """Return whether the sender may see what belongs to a tenant."""
        return self.tenants is None or tenant in self.tenants

    def read_content(self, record: RequestRecord, view: str) -> None:
        """Log that the sender reads messages of a request. Raises ``ContentNotAllowed`` if its key may not."""
        reader = self.name
        if self.admin is not None:
            reader = f"administrator {self.admin.name}"
            if not self.admin.content:
                raise ContentNotAllowed(
                    "This admin key may not read messages (admin.keys: content: false). Use a key of the team."
                )
        log.info("content.read", reader=reader, record=record.id, team=record.team, view=view)


@asynccontextmanager
async def viewing(service: Services, scope: Scope) -> AsyncIterator[Viewer]:
    """Count a request, and yield its sender. Administrators have no rate limit.

    Raises ``NotAuthenticated`` and ``TooManyRequests``.
    """
    teams, headers = service.configuration.teams, scope["headers"]
    if (admin := teams.admins.sender(headers, service.admin_link)) is not None:
        yield Viewer(None, admin=admin)
        return
    session = service.sessions.digest(headers) if credential(headers) == (None, None) else None
    if session is not None and (admin := teams.admins.holder(session)) is not None:
        yield Viewer(None, signed_in=True, admin=admin)
        return
    caller = begin_request(service, scope, forwarded=False).caller if session is None else teams.holder(session)
    async with service.quotas.admit(caller):
        name = f"team {caller.team}" if caller.team is not None else "one key" if session else KEYLESS
        yield Viewer((caller.tenant,) if caller.kept else (), name, session is not None)
