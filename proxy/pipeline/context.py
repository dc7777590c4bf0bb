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
    """One request, from its arrival to the end of its response. ``deadline`` is in the time of ``clock``.

    ``configuration`` is the snapshot at its arrival. ``caller`` has the policy for the model. ``counter`` counts as the
    model's provider does. If it's ``None``, the proxy can't measure the request and sends it unchanged.

    ``unproven`` is a provisional limit for this request alone: a guess after an overflow without a limit, or one far
    below a size that succeeded recently. The proxy stores it once a request succeeds. ``doubtful`` is true if that must
    happen twice: the response was empty, or an earlier response contradicts the limit (``contradicted``).

    ``repeated`` is true if the proxy retried the unchanged request, which happens once. ``retries`` is the number of
    retries so far. ``line`` is the heartbeat of a client that wants a stream.
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
        """The key of learned limits: upstream, its name for the model, and tenant."""
        return self.route.upstream, self.route.model, self.caller.tenant
