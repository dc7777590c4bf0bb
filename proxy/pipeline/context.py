"""The state of one request."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import msgspec
import xxhash
from starlette.types import Scope

from proxy.access.authenticator import Caller
from proxy.config import Route
from proxy.dialects.counting import Counter
from proxy.dialects.dialect import Dialect
from proxy.dialects.request import Request
from proxy.dialects.rounds import HiddenRound
from proxy.http.heartbeat import Heartbeat
from proxy.http.loop_detection import next_via
from proxy.http.request_body import MemoryLease
from proxy.http.timers import CoarseTimer
from proxy.limits.learned import LearnedLimit
from proxy.limits.profiles import Profile
from proxy.pipeline.billing import Bill
from proxy.pipeline.services import Services
from proxy.pipeline.snapshot import ConfigSnapshot
from proxy.telemetry.record import RequestRecord, record_of
from proxy.upstream.transport import Answer


class RequestContext(msgspec.Struct, eq=False):
    """One request to any endpoint, from its arrival to the end of its response.

    ``record`` has the request's id, the value of ``x-compaction-id``. ``via`` is the value of ``x-compaction-via`` for
    the upstream. ``started`` is by ``perf_counter``, in seconds. ``configuration`` is the snapshot at the
    request's arrival. ``bill`` counts the calls to upstreams.
    """

    record: RequestRecord
    started: float
    configuration: ConfigSnapshot
    scope: Scope
    via: str
    caller: Caller
    bill: Bill


def begin_request(services: Services, scope: Scope, *, forwarded: bool = True) -> RequestContext:
    """Return the context of a request that has just arrived. ``forwarded`` false: the proxy answers the request itself.

    Raises ``LoopDetected`` or ``NotAuthenticated``.
    """
    configuration, record = services.configuration, record_of(scope)
    via = next_via(scope, services.instance) if forwarded else ""
    caller = configuration.teams.authenticate(scope["headers"])
    record.tenant, record.team, record.policy = caller.tenant, caller.team, caller.policy.name
    return RequestContext(record, perf_counter(), configuration, scope, via, caller, Bill())


class RecallState(msgspec.Struct, eq=False):
    """The state of a request that may get the tool to read archived messages, or has hidden rounds.

    ``body`` is the client's own request. ``rounds`` are the conversation's hidden rounds, and ``found`` is true if some
    were put back. ``prefix`` is a digest of the client's messages, of which there are ``messages``. ``tool`` is the
    tool's definition, and ``tokens`` its size. It's empty if the request can't get the tool. ``refused`` is true once
    the upstream has refused the tool in this request. ``usage`` is the sum of the usage objects of the response's
    finished rounds, as the API reports them, at any time.
    """

    body: Request
    conversation: tuple[str, str]
    rounds: list[HiddenRound]
    found: bool
    prefix: str
    messages: int
    tool: bytes
    tokens: int
    refused: bool = False
    usage: dict[str, Any] = {}


class ConversationContext(RequestContext):
    """One request to compact. ``deadline`` is in the time of ``clock``.

    ``caller`` has the policy for the model. ``counter`` counts as the model's provider does. If it's ``None``, the
    proxy can't measure the request and sends it unchanged.

    ``provisional_limit`` is a limit for this request alone: a guess after an overflow without a limit, or one far below
    a size that succeeded recently. The proxy stores it once a request succeeds. If ``silent_overflow`` (the response
    was empty) or ``contradicted`` (an earlier response contradicts the limit) is true, that must happen twice.

    ``retries`` are the causes of the retries so far, see ``decision.Retry``. Each cause has its own limit. ``advice``
    names the parts to shorten, for a response header. ``recovered`` is true if the upstream has compacted a history
    that it keeps. ``own_summaries`` is true if the upstream refused a compaction of its own in this conversation.
    ``memory`` holds the memory of its bodies. ``heartbeat`` is for a client that wants a stream. ``recall`` is set if
    the request may get the tool to read archived messages, or has hidden rounds. ``answer`` is the upstream's latest
    answer. The request owns it: ``pipeline.sending`` sets it, and the endpoint calls ``close_answer`` at the end.
    ``asks_usage`` is true if the proxy asks for the usage of a stream whose client didn't ask for it.
    """

    dialect: Dialect
    body: Request
    route: Route
    profile: Profile
    counter: Counter | None
    memory: MemoryLease
    clock: CoarseTimer
    deadline: float
    provisional_limit: LearnedLimit | None = None
    silent_overflow: bool = False
    contradicted: bool = False
    retries: list[str] = []
    advice: str | None = None
    recovered: bool = False
    heartbeat: Heartbeat | None = None
    recall: RecallState | None = None
    own_summaries: bool = False
    asks_usage: bool = False
    answer: Answer | None = None

    async def close_answer(self) -> None:
        """Close the upstream's answer, if there is one."""
        answer, self.answer = self.answer, None
        if answer is not None:
            await answer.close()

    @property
    def asker(self) -> str:
        """The tenant and the upstream's model, for which the upstream may lack an API."""
        return f"{self.caller.tenant} {self.route.model}"

    @property
    def place(self) -> tuple[str, str, str]:
        """The key of learned limits: upstream, its name for the model, and tenant."""
        return self.route.upstream, self.route.model, self.caller.tenant


def conversation_key(context: ConversationContext) -> tuple[str, str]:
    """Return the tenant, and a digest that all turns of a conversation share.

    Clients move their cache breakpoints, so bound reasoning is remembered by what the first units say.
    """
    upstream, model, tenant = context.place
    first = _identities(context, 0, 2)
    return tenant, xxhash.xxh3_128_hexdigest(b"\0".join((upstream.encode(), model.encode(), *first)))


def mark(context: ConversationContext, messages: int) -> str:
    """Return a digest of the two units before the last of a conversation's first ``messages`` units.

    Conversations with the same key differ there, because a model wrote one of them. Empty if there are fewer units.
    """
    if not 0 <= messages <= len(context.body.units):
        return ""
    return xxhash.xxh3_128_hexdigest(b"\0".join(_identities(context, max(0, messages - 3), max(0, messages - 1))))


def _identities(context: ConversationContext, start: int, end: int) -> list[bytes]:
    """Return bytes that don't change with the cache breakpoints of some units."""
    units = context.body.units[start:end]
    if context.counter is not None and context.counter.format.binds_reasoning == "always":
        format = context.counter.format
        return [repr((format.text(unit), format.arguments(unit))).encode() for unit in units]
    return [bytes(unit) for unit in units]
