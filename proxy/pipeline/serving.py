"""Remember how to serve small requests, so that the next one with the same headers and model skips most decisions.

A plan is made from a request that took the general lane and left unchanged, because its bytes proved it small. It has
the meaning of the request's headers, the upstream and its model, and the size below which no trigger is met. Only the
general lane decides. A plan ends after ``LASTS`` seconds, and the next request makes another one. A reload, the end of
a key, and a learned limit or ratio end it at once.

Each tenant has its own plans, bounded in bytes. The proxy remembers headers when a tenant sends them again, so headers
that differ in every request cost almost nothing. A tenant keeps recent plans, even if many other tenants come.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from itertools import compress
from operator import itemgetter

from starlette.types import Scope

from proxy.access.authenticator import Caller
from proxy.access.spending import limit_of
from proxy.dialects.request import Request
from proxy.pipeline.attempt import Attempt, Reply
from proxy.pipeline.exchange import Exchange, ServingPlan
from proxy.pipeline.runtime import ModelLimits
from proxy.pipeline.sending import client_query, forwarded_headers
from proxy.pipeline.snapshot import ConfigSnapshot

LASTS = 1.0
"""Seconds until the general lane confirms a plan. Limits that an upstream reports and prices may change by then."""

TENANT_BYTES = 200_000
MOST_TENANTS = 200
"""Bytes of each tenant's plans, and tenants with plans in each endpoint: 40 MB at most."""

RECENT_SECONDS = 60.0
"""Seconds for which a tenant keeps its plans without a request. After that, another tenant may displace them."""

LONGEST = 8_192
"""Bytes of headers, and of a model's name, that are remembered."""

ENTRY_BYTES, PLAN_BYTES = 1_500, 1_000
"""Approximate bytes of an entry, in addition to its headers, and of a plan."""

PLANS = 20
"""Plans for the same headers: combinations of a model, ``stream``, and the requested output."""

ONCE = 16
"""Headers of each tenant that came once and may come again."""

Headers = tuple[bytes, tuple[tuple[bytes, bytes], ...]]
Wish = tuple[str | None, bool, int | None, int]


class Known:
    """The meaning of a set of headers: the caller, and the value of ``x-compaction-via`` for the upstream."""

    __slots__ = ("caller", "plans", "size", "via")

    def __init__(self, caller: Caller, via: str, size: int) -> None:
        self.caller = caller
        self.via = via
        self.size = size
        self.plans: dict[Wish, ServingPlan] = {}


class _Tenant:
    """The plans of one tenant, the least recently used headers first."""

    __slots__ = ("known", "once", "size", "used")

    def __init__(self) -> None:
        self.known: OrderedDict[Headers, Known] = OrderedDict()
        self.once: deque[int] = deque(maxlen=ONCE)
        self.size = 0
        self.used = 0.0


class ServingPlans:
    """The plans of one endpoint."""

    def __init__(self, limits: ModelLimits, clock: Callable[[], float] = time.time) -> None:
        """``clock`` returns seconds since 1970."""
        self._limits = limits
        self._clock = clock
        self._configuration: ConfigSnapshot | None = None
        self._known: dict[Headers, Known] = {}
        self._tenants: dict[str, _Tenant] = {}

    def find(self, configuration: ConfigSnapshot, scope: Scope) -> Known | None:
        """Return the meaning of a request's headers, if it's known in this configuration and the key is still valid."""
        if configuration is not self._configuration:
            self._configuration, self._known, self._tenants = configuration, {}, {}
            return None
        headers = _headers(scope)
        known = self._known.get(headers)
        if known is None:
            return None
        now, tenant = self._clock(), self._tenants[known.caller.tenant]
        tenant.used = now
        tenant.known.move_to_end(headers)
        return known if now < known.caller.ends else None

    def plan(self, known: Known, body: Request) -> ServingPlan | None:
        """Return the plan for a body, unless it has ended or the body may be too large."""
        plan = known.plans.get(_wish(body))
        if plan is None or self._clock() >= plan.until or not plan.small(body):
            return None
        place = plan.place
        if self._limits.learned.get(*place) != plan.learned or self._limits.calibration.factor(*place) != plan.factor:
            return None
        return plan

    def remember(self, exchange: Exchange, reply: Reply) -> None:
        """Make a plan of a request that the general lane sent unchanged without counting it."""
        sent, body = reply.sent, exchange.body
        if exchange.plan is not None or exchange.configuration is not self._configuration:
            return
        if not isinstance(sent, Attempt) or not _is_plain(exchange, sent, reply):
            return
        headers = _headers(exchange.scope)
        known = self._known.get(headers) or self._learned(exchange, headers)
        if known is None or len(body.model or "") > LONGEST:
            return
        wish = _wish(body)
        if wish not in known.plans:
            if len(known.plans) >= PLANS:
                return
            known.size += PLAN_BYTES
            self._grown(exchange.caller.tenant, PLAN_BYTES)
        known.plans[wish] = self._made(exchange, sent)

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        """Drop the plans of forgotten tenants, and return those tenants."""
        tenants = {tenant for tenant in self._tenants if forgotten(tenant)}
        for tenant in tenants:
            self._drop(tenant)
        return tenants

    def _made(self, exchange: Exchange, sent: Attempt) -> ServingPlan:
        place, rules, asked = exchange.place, sent.input.rules, exchange.body.max_output
        window = sent.budget.shared_window
        return ServingPlan(
            until=self._clock() + LASTS,
            caller=exchange.caller,
            route=exchange.route,
            profile=exchange.profile,
            counter=sent.input.counter,
            price_of=exchange.given_price,
            learned=self._limits.learned.get(*place),
            factor=self._limits.calibration.factor(*place),
            least=rules.least_size(sent.input.budget),
            bounds=rules.bounds,
            room=math.inf if window is None or asked is None else window - asked,
            outcome=sent.outcome,
            headers=forwarded_headers(exchange.scope),
            query=client_query(exchange.scope),
            model=exchange.record.model,
            upstream_model=exchange.record.upstream_model,
        )

    def _learned(self, exchange: Exchange, headers: Headers) -> Known | None:
        """Return a new entry for headers that came before; ``None`` if they didn't, or can't be remembered."""
        name = exchange.caller.tenant
        tenant = self._tenants.get(name) or self._admitted(name)
        size = ENTRY_BYTES + sum(len(one) + len(other) + 100 for one, other in headers[1])
        if tenant is None or size > LONGEST:
            return None
        mark = hash(headers)
        if mark not in tenant.once:
            tenant.once.append(mark)
            return None
        caller = exchange.configuration.teams.authenticate(exchange.scope["headers"])
        known = self._known[headers] = tenant.known[headers] = Known(caller, exchange.via, size)
        self._grown(name, size)
        return known

    def _admitted(self, name: str) -> _Tenant | None:
        """Return the room of a new tenant, in place of one without recent requests if there are too many."""
        now = self._clock()
        if len(self._tenants) >= MOST_TENANTS:
            oldest = min(self._tenants, key=lambda name: self._tenants[name].used)
            if now - self._tenants[oldest].used < RECENT_SECONDS:
                return None
            self._drop(oldest)
        tenant = self._tenants[name] = _Tenant()
        tenant.used = now
        return tenant

    def _grown(self, name: str, size: int) -> None:
        """Count the bytes of a tenant, and drop its least recently used headers over the bound."""
        tenant = self._tenants[name]
        tenant.size += size
        while tenant.size > TENANT_BYTES and len(tenant.known) > 1:
            headers, known = tenant.known.popitem(last=False)
            tenant.size -= known.size
            del self._known[headers]

    def _drop(self, name: str) -> None:
        for headers in self._tenants.pop(name).known:
            del self._known[headers]


def _headers(scope: Scope) -> Headers:
    """Return the headers that matter, and the query. The length of the body isn't forwarded."""
    headers = scope["headers"]
    return scope["query_string"], tuple(compress(headers, map(b"content-length".__ne__, map(itemgetter(0), headers))))


def _wish(body: Request) -> Wish:
    return body.model, body.stream, body.max_output, body.thinking


def _is_plain(exchange: Exchange, sent: Attempt, reply: Reply) -> bool:
    """Return whether a request left as it came, its bytes alone decided so, and no budget of a team applies."""
    outcome = sent.outcome
    plain = outcome.verdict in ("none", "shadow", "off") and outcome.received is None and outcome.messages is None
    return plain and sent.output is None and not reply.run.retries and limit_of(exchange.caller) is None
