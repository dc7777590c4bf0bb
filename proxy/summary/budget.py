"""What the summaries of a team may cost in a day.

The store keeps what each process has spent, so that neither a restart nor another worker begins anew. What others
spend is read once a minute: until then a team can go over its budget by what they spent meanwhile. Without a store,
or while it fails, each process counts for itself.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable

import msgspec

from proxy.access.authenticator import Caller
from proxy.store import Store
from proxy.store.replicated_map import FIRST_READ_SECONDS, ReplicatedMap
from proxy.summary.chunking import SummaryUnasked

KIND = "spent"

DAY = 86_400

TEAMS = 10_000
"""So many are remembered, the latest ones."""

_GRACE = 60.0 * DAY
"""Seconds that a day's account stays in the store after the day, which the next day's replaces. A store that is full
removes first what expires first: this must not be it."""


class BudgetSpent(SummaryUnasked):
    """The budget does not cover another call."""


class Spent(msgspec.Struct, frozen=True):
    """Tokens spent on a day (counted from 1970) by each process. They never get fewer, so the larger one is newer."""

    day: int
    by: dict[str, int] = {}

    @property
    def until(self) -> float:
        """When it is of no more use."""
        return (self.day + 1) * DAY + _GRACE

    def merged(self, other: Spent) -> Spent:
        """What both know."""
        if other.day != self.day:
            return max(self, other, key=lambda spent: spent.day)
        both = {process: max(self.by.get(process, 0), other.by.get(process, 0)) for process in {**self.by, **other.by}}
        return Spent(self.day, both)


class Budgets:
    """What the teams have spent. Outlives a change of their limits."""

    def __init__(self, store: Store | None, clock: Callable[[], float] = time.time) -> None:
        """``clock`` gives seconds since 1970."""
        self._clock = clock
        self._process = secrets.token_hex(8)
        self._spent = ReplicatedMap(store, KIND, Spent, TEAMS, clock)
        self._begun: dict[str, int] = {}  # tokens of calls that have not ended

    def of(self, caller: Caller) -> Budget | None:
        """The budget of a caller's team; ``None`` where it has none."""
        if caller.team is None or caller.limits is None or caller.limits.summary_tokens_per_day is None:
            return None
        return Budget(self, caller.team, caller.limits.summary_tokens_per_day)

    async def recall(self, team: str) -> None:
        """Have what the store knows ready. Only the first to ask waits, and not for long."""
        read = self._spent.first_read(f"team:{team}", "", "")
        if read is not None:
            await asyncio.wait({read}, timeout=FIRST_READ_SECONDS)

    def spent(self, team: str) -> int:
        """Tokens spent today, with those of calls that have not ended."""
        return sum(self._today(team).by.values()) + self._begun.get(team, 0)

    def begin(self, team: str, tokens: int) -> None:
        """A call begins that costs so many tokens at most."""
        self._begun[team] = self._begun.get(team, 0) + tokens

    def end(self, team: str, tokens: int, cost: int) -> None:
        """A call that began with so many tokens has ended, and has cost so many."""
        self._begun[team] -= tokens
        if cost:
            today = self._today(team)
            ours = today.by.get(self._process, 0) + cost
            self._spent.put(f"team:{team}", "", "", Spent(today.day, {**today.by, self._process: ours}))

    async def aclose(self) -> None:
        """Write what waits."""
        await self._spent.aclose()

    def _today(self, team: str) -> Spent:
        day = int(self._clock() // DAY)
        known = self._spent.get(f"team:{team}", "", "")
        return known if known is not None and known.day == day else Spent(day)


class Budget:
    """The budget of one team, in tokens a day."""

    def __init__(self, budgets: Budgets, team: str, most: int) -> None:
        self._budgets = budgets
        self._team = team
        self._most = most

    async def recall(self) -> None:
        """See ``Budgets.recall``."""
        await self._budgets.recall(self._team)

    @property
    def spent(self) -> bool:
        """Whether nothing is left."""
        return self._budgets.spent(self._team) >= self._most

    def call(self, tokens: int) -> Call:
        """A call that costs so many tokens at most, as a context. Raises ``BudgetSpent`` where the rest is less."""
        if self._budgets.spent(self._team) + tokens > self._most:
            raise BudgetSpent("the team's tokens for summaries are used up for today")
        return Call(self._budgets, self._team, tokens)


class Call:
    """One call. ``cost`` is what it has cost, in tokens; the most, until it is known."""

    def __init__(self, budgets: Budgets, team: str, tokens: int) -> None:
        self._budgets = budgets
        self._team = team
        self._tokens = tokens
        self.cost = tokens

    def __enter__(self) -> Call:
        self._budgets.begin(self._team, self._tokens)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._budgets.end(self._team, self._tokens, self.cost)
