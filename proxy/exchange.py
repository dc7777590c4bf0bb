"""One request on its way."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import Scope

from proxy.body import ChatBody
from proxy.config import Route
from proxy.keepalive import Keepalive
from proxy.limits import Learned
from proxy.profiles import Profile
from proxy.teams import Caller


@dataclass(slots=True)
class Exchange:
    """One request on its way: where it comes from and where it goes. ``deadline`` is in the event loop's time.

    ``unproven`` is a limit guessed from a refusal that named none; it is kept for others once a request got through.
    ``doubtful`` says that there was no refusal at all, only an answer without anything in it.
    ``retries`` counts how often the request was sent again so far; ``line`` goes to a client that wants a stream.
    """

    scope: Scope
    caller: Caller
    body: ChatBody
    route: Route
    profile: Profile
    hops: str
    deadline: float
    unproven: Learned | None = None
    doubtful: bool = False
    retries: int = 0
    line: Keepalive | None = None

    @property
    def place(self) -> tuple[str, str, str]:
        """What limits are learned for: upstream, model there, tenant."""
        return self.route.upstream, self.route.model, self.caller.tenant
