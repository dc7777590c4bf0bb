"""The state of one request, its mode, and the key of its conversation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal, NamedTuple, TypeVar

import msgspec
import xxhash
from starlette.types import Scope

from proxy.access.authenticator import Caller
from proxy.compaction.format import Binding
from proxy.config import Route
from proxy.dialects.apis import Dialect
from proxy.dialects.counting import Counter
from proxy.dialects.request import Request
from proxy.errors import BadBody, UpstreamTimeout
from proxy.http.headers import without_choices
from proxy.http.request_body import MemoryLease, header, next_via
from proxy.http.sse import Heartbeat
from proxy.limits.learned import LearnedLimit
from proxy.limits.profiles import LONG_SUFFIX, Profile
from proxy.pipeline.billing import Bill
from proxy.pipeline.runtime import ConfigSnapshot, Runtime
from proxy.telemetry.record import RequestRecord, record_of, shown_client
from proxy.upstream.traits import Edit
from proxy.upstream.transport import CHAT_PATH

Mode = Literal["enforce", "shadow", "off"]

CONVERSATION_UNITS = 2  # the first units, which name a conversation

DEADLINE = "The request's deadline has passed. Try again, or have server.deadline raised."

_Result = TypeVar("_Result")

_COMPACTING_AGENTS = ("claude-cli", "claude-code", "codex")  # user agents that compact themselves


class RequestContext(msgspec.Struct, eq=False):
    """One request to any endpoint, from its arrival to the end of its response."""

    record: RequestRecord  # has the value of `x-compaction-id`
    configuration: ConfigSnapshot  # the snapshot at the request's arrival
    scope: Scope
    via: str  # the value of `x-compaction-via` for the upstream
    caller: Caller
    bill: Bill  # counts the calls to upstreams


def begin_request(runtime: Runtime, scope: Scope, *, forwarded: bool = True) -> RequestContext:
    """Return the context of a request that has just arrived. ``forwarded`` false: the proxy answers the request itself.

    Raises ``LoopDetected`` or ``NotAuthenticated``.
    """
    configuration, record = runtime.configuration, record_of(scope)
    via = next_via(scope, runtime.instance) if forwarded else ""
    caller = configuration.teams.authenticate(scope["headers"])
    if caller.models is not None:
        scope["headers"] = without_choices(scope["headers"])
    record.tenant, record.team, record.policy = caller.tenant, caller.team, caller.policy.name
    record.key, record.client = caller.key, shown_client(header(scope, b"user-agent") or "")
    return RequestContext(record, configuration, scope, via, caller, Bill())


class TimeLeft(NamedTuple):
    """The time until a request's deadline. ``end`` is in the event loop's time."""

    end: float

    @property
    def seconds(self) -> float:
        """Return the seconds that are left; 0 or less once the deadline has passed."""
        return self.end - asyncio.get_running_loop().time()

    def limit(self) -> asyncio.Timeout:
        return asyncio.timeout_at(self.end)


class Provisional(NamedTuple):
    """A limit for one request alone: a guess (see ``Source``), or one that a recent answer contradicts."""

    limit: LearnedLimit
    silent: bool  # the response was empty, so the limit must be found twice
    contradicted: bool  # an earlier response contradicts the limit, so it must be found twice


class Exchange(RequestContext):
    """One conversation request, and the way to its answer. Set its bodies with ``replace``."""

    dialect: Dialect
    body: Request  # the conversation to compact
    original: Request  # the request that leaves if compaction changes nothing
    route: Route
    profile: Profile
    counter: Counter | None  # `None`: the proxy can't measure the request and sends it unchanged
    memory: MemoryLease  # that of the bodies
    time: TimeLeft
    heartbeat: Heartbeat | None = None  # for a client that wants a stream
    provisional: Provisional | None = None
    refused_bytes: int | None = None  # of the last request that the upstream refused for its bytes
    edits: tuple[Edit, ...] = ()  # those that the upstream is known to need
    _key: tuple[str, str] | None = None

    def replace(self, body: Request, *, original: Request | None = None) -> None:
        """Go on with another body. It leaves if compaction changes nothing, unless there is an ``original``."""
        self.body, self.original, self._key = body, original or body, None

    @property
    def asker(self) -> str:
        """The tenant and the upstream's model, for which the upstream may lack an API."""
        return f"{self.caller.tenant} {self.route.model}"

    @property
    def place(self) -> tuple[str, str, str]:
        """The key of learned limits: upstream, its name for the model, and tenant."""
        # A limit learned in the standard window isn't that of the long one.
        model, long = self.route.model, self.profile.long_context
        return self.route.upstream, f"{model}{LONG_SUFFIX}" if long else model, self.caller.tenant

    @property
    def mode(self) -> Mode:
        """The policy's mode, or the mode in the request header ``x-compaction`` if the policy allows the header.

        The header can only restrict the policy: from ``enforce`` to ``shadow``, and from any mode to ``off``. Raises
        ``BadBody`` for any other value.
        """
        policy = self.caller.policy
        asked = (header(self.scope, b"x-compaction") or "").strip().lower()
        if not asked or not policy.allow_header:
            return policy.mode
        if asked == "off":
            return "off"
        if asked == "shadow":
            return "off" if policy.mode == "off" else "shadow"
        raise BadBody("The header x-compaction takes 'off' or 'shadow'. Correct it, or leave it out.")

    @property
    def binding(self) -> Binding:
        """Which reasoning the model binds to the prompt before it. Without a counter, none is known."""
        return "never" if self.counter is None else self.counter.format.binds_reasoning

    @property
    def conversation(self) -> tuple[str, str]:
        """The tenant, and a digest that all turns of a conversation share. References must be resolved before.

        Clients move their cache breakpoints, so bound reasoning is remembered by what the first units say.
        """
        if self._key is None:
            upstream, model, tenant = self.place
            first = self._identities(0, CONVERSATION_UNITS)
            digest = xxhash.xxh3_128_hexdigest(b"\0".join((upstream.encode(), model.encode(), *first)))
            self._key = tenant, digest
        return self._key

    def mark(self, messages: int) -> str:
        """Return a digest of the two units before the last of a conversation's first ``messages`` units.

        Conversations with the same key differ there, because a model wrote one of them. Empty if there are fewer units.
        """
        if not 0 <= messages <= len(self.body.units):
            return ""
        units = self._identities(max(0, messages - 3), max(0, messages - 1))
        return xxhash.xxh3_128_hexdigest(b"\0".join(units))

    async def in_time(self, work: Callable[[], Awaitable[_Result]], mode: Mode) -> _Result:
        """Do something before the deadline. Meanwhile, the proxy sends heartbeats to a streaming client.

        In another mode than ``enforce``, nothing changes, so there are none. Raises ``UpstreamTimeout``.
        """
        heartbeat = self.heartbeat
        limit = self.time.limit()
        if heartbeat is not None and mode == "enforce":
            heartbeat.start_after_delay()
        try:
            async with limit:
                return await work()
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise UpstreamTimeout(DEADLINE) from error
        finally:
            if heartbeat is not None:
                heartbeat.cancel_start()

    def _identities(self, start: int, end: int) -> list[bytes]:
        """Return bytes that don't change with the cache breakpoints of some units."""
        units = self.body.units[start:end]
        if self.counter is not None and self.binding == "always":
            format = self.counter.format
            return [repr((format.text(unit), format.arguments(unit))).encode() for unit in units]
        return [bytes(unit) for unit in units]


def shortened_upstream(exchange: Exchange) -> bool:
    """Return whether the request asks its upstream to remove old content, and the upstream has the request's API."""
    if not exchange.body.removes:
        return False
    apis = exchange.configuration.settings.upstreams[exchange.route.upstream].certain_apis
    return apis is None or exchange.dialect.name in apis


def compacts_itself(exchange: Exchange) -> bool:
    """Return whether the client compacts its conversations, and the policy leaves it to the client."""
    if exchange.dialect.path == CHAT_PATH or exchange.caller.policy.self_compacting != "late":
        return False
    agent = (header(exchange.scope, b"user-agent") or "").lower()
    return agent.startswith(_COMPACTING_AGENTS)
