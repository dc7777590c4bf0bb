"""Budgets of teams, in US dollars or in tokens, by day or by month (UTC).

The store keeps the amounts that each process has counted, so a restart or another worker doesn't reset them. Each
process reads the other processes' amounts once a minute. Until then a team can exceed its budget by their spending, and
by its requests in progress.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import msgspec

from proxy.access.authenticator import Caller
from proxy.config.settings import Settings
from proxy.config.teams import SpendSettings
from proxy.errors import BudgetExceeded
from proxy.limits.profiles.prices import PICO
from proxy.store import Store
from proxy.store.replicated_map import FIRST_READ_SECONDS, ReplicatedMap
from proxy.telemetry.metrics import BUDGET_REMAINING, refused
from proxy.telemetry.record import RequestRecord

KIND = "spending"

DAY = 86_400

TEAMS = 10_000
"""Teams kept in memory, the most recently used ones."""

_GRACE = 92.0 * DAY
"""Seconds that an entry stays in the store after the beginning of its period. The next period's entry replaces it.

A full store removes the entries that expire first, and these must not be among them.
"""


class Amounts(msgspec.Struct, frozen=True):
    """What each process has counted since ``start`` (days since 1970): tokens, and US dollars times 10^12.

    Amounts only grow, so the larger one is newer.
    """

    start: int
    tokens: dict[str, int] = {}
    money: dict[str, int] = {}

    @property
    def until(self) -> float:
        """Return when the entry expires, in seconds since 1970."""
        return self.start * DAY + _GRACE

    def merged(self, other: Amounts) -> Amounts:
        """Return the newer period, or the larger amount of each process if the periods are equal."""
        if other.start != self.start:
            return max(self, other, key=lambda amounts: amounts.start)
        return Amounts(self.start, _larger(self.tokens, other.tokens), _larger(self.money, other.money))


class Spending:
    """Counts what teams with a budget spend. A reload of their limits keeps the counts."""

    def __init__(
        self, store: Store | None, settings: Callable[[], Settings], clock: Callable[[], float] = time.time
    ) -> None:
        """``settings`` returns the current ones. ``clock`` returns seconds since 1970."""
        self._settings = settings
        self._clock = clock
        self._process = secrets.token_hex(8)
        self._amounts = ReplicatedMap(store, KIND, Amounts, TEAMS, clock)

    async def check(self, caller: Caller) -> None:
        """Raise ``BudgetExceeded`` if the caller's team has used up its budget."""
        limit = None if caller.limits is None else caller.limits.spend
        if caller.team is None or limit is None:
            return
        read = self._amounts.prefetch(_tenant(caller.team), "", "")
        if read is not None:
            await asyncio.wait({read}, timeout=FIRST_READ_SECONDS)
        if self._remaining(caller.team, limit) > 0:
            return
        refused("budget").inc()
        raise BudgetExceeded(
            f"Your team has used up its budget of {described(limit)}. It starts again in "
            f"{_wait(self._seconds_left(limit))}. Ask the operator of this proxy for a higher budget.",
            retry_after=self._seconds_left(limit),
        )

    def remaining(self, caller: Caller) -> str | None:
        """Return what is left of the budget of the caller's team, as a header value; ``None`` without a budget."""
        limit = None if caller.limits is None else caller.limits.spend
        if caller.team is None or limit is None:
            return None
        left = max(0, self._remaining(caller.team, limit))
        return f"{left} tokens" if limit.usd is None else f"{left / PICO:.4f} USD"

    def add(self, record: RequestRecord) -> None:
        """Count a finished request or summary call. A sink of the recorder."""
        if record.team is None or record.usage is None:
            return
        team = self._settings().teams.get(record.team)
        limit = None if team is None or team.limits is None else team.limits.spend
        if limit is None:
            return
        now, own = self._current(record.team, limit), self._process
        tokens = (record.usage.input or 0) + (record.usage.output or 0)
        money = 0 if record.cost is None else record.cost.sent
        spent = Amounts(
            now.start,
            {**now.tokens, own: now.tokens.get(own, 0) + tokens},
            {**now.money, own: now.money.get(own, 0) + money},
        )
        self._amounts.put(_tenant(record.team), "", "", spent)
        left = self._remaining(record.team, limit)
        BUDGET_REMAINING.labels(team=record.team, unit="tokens" if limit.usd is None else "usd").set(
            left if limit.usd is None else left / PICO
        )

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        """Drop the amounts of forgotten tenants, and return those tenants."""
        return self._amounts.forget(forgotten)

    async def aclose(self) -> None:
        """Write pending amounts to the store."""
        await self._amounts.aclose()

    def _remaining(self, team: str, limit: SpendSettings) -> int:
        spent = self._current(team, limit)
        if limit.usd is None:
            return (limit.tokens or 0) - sum(spent.tokens.values())
        return round(limit.usd * PICO) - sum(spent.money.values())

    def _current(self, team: str, limit: SpendSettings) -> Amounts:
        start = self._period(limit)[0]
        known = self._amounts.get(_tenant(team), "", "")
        return known if known is not None and known.start == start else Amounts(start)

    def _period(self, limit: SpendSettings) -> tuple[int, int]:
        """Return the first day of the current period, and the first one after it."""
        today = datetime.fromtimestamp(self._clock(), UTC).date()
        if limit.per == "day":
            first, following = today, today + timedelta(days=1)
        else:
            first = today.replace(day=1)
            following = (first + timedelta(days=31)).replace(day=1)
        epoch = datetime.fromtimestamp(0, UTC).date()
        return (first - epoch).days, (following - epoch).days

    def _seconds_left(self, limit: SpendSettings) -> int:
        return max(1, int(self._period(limit)[1] * DAY - self._clock()))


def described(limit: SpendSettings) -> str:
    """Return a budget as text."""
    amount = f"{limit.tokens:,} tokens" if limit.usd is None else f"{limit.usd:,.2f} USD"
    return f"{amount} per {limit.per}"


def _wait(seconds: int) -> str:
    hours, minutes = seconds // 3600, seconds % 3600 // 60
    return f"{hours // 24} days" if hours >= 48 else f"{hours} h {minutes} min"


def _tenant(team: str) -> str:
    return f"team:{team}"


def _larger(ours: dict[str, int], theirs: dict[str, int]) -> dict[str, int]:
    return {process: max(ours.get(process, 0), theirs.get(process, 0)) for process in {**ours, **theirs}}
