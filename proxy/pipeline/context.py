"""The state of one request."""

from __future__ import annotations

import msgspec
from starlette.types import Scope

from proxy.access.authenticator import Caller
from proxy.config import Route
from proxy.dialects.chat.counting import Counter
from proxy.dialects.chat.request import ChatRequest
from proxy.http.heartbeat import Keepalive
from proxy.http.timers import CoarseTimer
from proxy.limits.learned import LearnedLimit
from proxy.limits.profiles import Profile
from proxy.pipeline.snapshot import ConfigSnapshot


class RequestContext(msgspec.Struct, eq=False):
    """One request on its way: where it comes from and where it goes. ``deadline`` is in the time of ``clock``.

    ``configuration`` is the one that was in force when it came; the caller has the policy for the model.

    ``counter`` counts as the model's provider does. ``None``: the request can't be measured, and passes through.

    ``unproven`` is a limit that only this request is held to: guessed from a refusal that named none, or far below a
    size that was answered lately. It is kept for others once a request got through. ``doubtful`` says that this must
    happen twice: there was no refusal but an answer without anything in it, or an earlier answer contradicts the limit
    (``contradicted``).
    ``repeated`` says that the request was sent again unchanged, which happens once.
    ``retries`` counts how often the request was sent again so far; ``line`` goes to a client that wants a stream.
    """

    configuration: ConfigSnapshot
    scope: Scope
    caller: Caller
    body: ChatRequest
    route: Route
    profile: Profile
    counter: Counter | None
    hops: str
    clock: CoarseTimer
    deadline: float
    unproven: LearnedLimit | None = None
    doubtful: bool = False
    contradicted: bool = False
    repeated: bool = False
    retries: int = 0
    line: Keepalive | None = None

    @property
    def place(self) -> tuple[str, str, str]:
        """What limits are learned for: upstream, model there, tenant."""
        return self.route.upstream, self.route.model, self.caller.tenant
