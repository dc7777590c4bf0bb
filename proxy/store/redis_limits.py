"""Rates and concurrent requests of teams, counted on Redis or Valkey for all replicas together."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple

from proxy.store.redis_client import close, connect, failures, name

LEASE_SECONDS = 60.0
"""Seconds until a request stops counting as concurrent, unless its process renews it. A killed process renews none."""

# The rate limit is the generic cell rate algorithm, by the server's clock in microseconds: the key has the time when
# the bucket is full again. The concurrent requests are a sorted set by the end of their leases.
_ADMIT = """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local rate, concurrent, id, lease = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
if concurrent > 0 then
    redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
    if redis.call('ZCARD', KEYS[2]) >= concurrent then return {'concurrency', 1} end
end
if rate > 0 then
    local interval = 60000000 / rate
    local full = math.max(now, tonumber(redis.call('GET', KEYS[1]) or now)) + interval
    local over = full - now - 60000000
    if over > 0.5 then return {'rate', math.ceil(over / 1000000)} end
    redis.call('SET', KEYS[1], string.format('%.0f', full), 'PX', math.ceil((full - now) / 1000) + 1)
end
if concurrent > 0 then
    redis.call('ZADD', KEYS[2], string.format('%.0f', now + lease * 1000000), id)
    redis.call('EXPIRE', KEYS[2], math.ceil(lease))
end
return {'admitted', 0}
"""

_RENEW = """
local time = redis.call('TIME')
local ends = string.format('%.0f', time[1] * 1000000 + time[2] + tonumber(ARGV[1]) * 1000000)
for index = 2, #ARGV do redis.call('ZADD', KEYS[1], 'XX', ends, ARGV[index]) end
redis.call('EXPIRE', KEYS[1], math.ceil(ARGV[1]))
"""


class Admission(NamedTuple):
    """The decision on a request. ``seconds`` is when another try may succeed."""

    decision: Literal["admitted", "rate", "concurrency"]
    seconds: int


class RedisLimits:
    """All methods except ``aclose`` raise ``StoreFailed``."""

    def __init__(self, url: str) -> None:
        """Use the server at ``url``. Raises ``ValueError`` for a wrong address."""
        self._redis = connect(url)

    async def admit(self, team: str, id: str, per_minute: int | None, concurrent: int | None) -> Admission:
        """Count a request against a team's limits, in one round trip, unless it is over one of them."""
        keys = _key(team, "rate"), _key(team, "running")
        with failures():
            decision, seconds = await self._redis.eval(
                _ADMIT, 2, *keys, per_minute or 0, concurrent or 0, id, LEASE_SECONDS
            )
        return Admission(decision.decode(), int(seconds))

    async def release(self, team: str, ids: Collection[str]) -> None:
        """End the leases of requests."""
        with failures():
            await self._redis.zrem(_key(team, "running"), *ids)

    async def renew(self, held: Mapping[str, Collection[str]]) -> None:
        """Extend the leases of requests, by team. A lease that has ended stays ended."""
        with failures():
            for team, ids in held.items():
                await self._redis.eval(_RENEW, 1, _key(team, "running"), LEASE_SECONDS, *ids)

    async def aclose(self) -> None:
        """Close the connections."""
        await close(self._redis)


def _key(team: str, kind: str) -> str:
    # A digest, because names are encrypted elsewhere on the server. The hash tag keeps a team's keys on one server.
    return f"{{{name('compaction-limits', hashlib.sha256(team.encode()).hexdigest()[:24])}}}:{kind}"
