"""Find out whose records a request may see."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from starlette.types import Scope

from proxy.pipeline.context import begin_request
from proxy.pipeline.services import Services


class Viewer(msgspec.Struct, frozen=True):
    """The sender of a request for records. ``tenants``: whose records it may see, ``None`` for all."""

    tenants: tuple[str, ...] | None

    def sees(self, tenant: str) -> bool:
        """Return whether the sender may see what belongs to a tenant."""
        return self.tenants is None or tenant in self.tenants


@asynccontextmanager
async def viewing(service: Services, scope: Scope) -> AsyncIterator[Viewer]:
    """Count a request, and yield its sender. Administrators have no rate limit.

    Raises ``NotAuthenticated`` and ``TooManyRequests``.
    """
    if service.configuration.teams.admins.include(scope["headers"], service.admin_link):
        yield Viewer(None)
        return
    caller = begin_request(service, scope, forwarded=False).caller
    async with service.quotas.admit(caller):
        yield Viewer((caller.tenant,) if caller.kept else ())
