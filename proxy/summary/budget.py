"""Daily token budgets for the summaries of a team.

The store keeps the tokens that each process has spent, so a restart or another worker doesn't reset the count. Each
process reads the other processes' counts once a minute. Until then a team can exceed its budget by their spending.
Without a store, or while it fails, each process counts only its own tokens.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import msgspec

from proxy.access.authenticator import Caller
from proxy.store import Store
from proxy.store.replicated_map import FIRST_READ_SECONDS, ReplicatedMap
from proxy.summary.chunking import SummaryUnasked

KIND = "spent"

DAY = 86_400

TEAMS = 10_000
"""Teams kept in memory, the most recently used ones."""

_GRACE = 60.0 * DAY
"""Seconds that a day's record stays in the store after that day. The next day's record replaces it.

A full store removes the entries that expire first, and these records must not be among them.
"""


class BudgetSpent(SummaryUnasked):
    """The remaining budget doesn't cover another call."""


class Spent(msgspec.Struct, frozen=True):
    """Tokens spent by each process on one day (days since 1970). Counts only grow, so the larger one is newer."""

    day: int
    by: dict[str, int] = {}

    @property
    def until(self) -> float:
        """Return when the record expires, in seconds since 1970."""
        return (self.day + 1) * DAY + _GRACE

    def merged(self, other: Spent) -> Spent:
        """Return the newer day, or the larger count of each process if the days are equal."""
        if other.day != self.day:
            return max(self, other, key=lambda spent: spent.day)
        processes = {**self.by, **other.by}
        return Spent(self.day, {p: max(self.by.get(p, 0), other.by.get(p, 0)) for p in processes})


class Budgets:
    """Track the tokens that teams spend. A reload of their limits keeps the counts."""

    def __init__(self, store: Store | None, clock: Callable[[], float] = time.time) -> None:
        """Use ``clock`` for seconds since 1970."""
        self._clock = clock
        self._process = secrets.token_hex(8)
        self._spent = ReplicatedMap(store, KIND, Spent, TEAMS, clock)
        self._reserved: dict[str, int] = {}  # tokens of calls in progress

    def of(self, caller: Caller) -> Budget | None:
        """Return the budget of a caller's team, or ``None`` if the team has none."""
        if caller.team is None or caller.limits is None or caller.limits.summary_tokens_per_day is None:
            return None
        return Budget(self, caller.team, caller.limits.summary_tokens_per_day)

    async def recall(self, team: str) -> None:
        """Read a team's counts from the store before a call, for up to ``FIRST_READ_SECONDS``."""
        read = self._spent.prefetch(f"team:{team}", "", "", latest=True)
        if read is not None:
            await asyncio.wait({read}, timeout=FIRST_READ_SECONDS)

    def spent(self, team: str) -> int:
        """Return the tokens spent today, including the maximum cost of calls in progress."""
        return sum(self._today(team).by.values()) + self._reserved.get(team, 0)

    @contextmanager
    def reserve(self, team: str, tokens: int) -> Iterator[PaidCall]:
        """Reserve ``tokens``, the maximum cost of a call, until the call ends. Then record its cost."""
        call = PaidCall(tokens)
        self._reserved[team] = self._reserved.get(team, 0) + tokens
        try:
            yield call
        finally:
            self._reserved[team] -= tokens
            if call.cost:
                today = self._today(team)
                ours = today.by.get(self._process, 0) + call.cost
                self._spent.put(f"team:{team}", "", "", Spent(today.day, {**today.by, self._process: ours}))

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        """Drop the counts of forgotten tenants, and return those tenants."""
        return self._spent.forget(forgotten)

    async def aclose(self) -> None:
        """Write pending records to the store."""
        await self._spent.aclose()

    def _today(self, team: str) -> Spent:
        day = int(self._clock() // DAY)
        known = self._spent.get(f"team:{team}", "", "")
        return known if known is not None and known.day == day else Spent(day)


@dataclass(slots=True)
class PaidCall:
    """One call. ``cost`` is in tokens, and is the maximum until the caller sets it."""

    cost: int


@dataclass(frozen=True, slots=True)
class Budget:
    """The budget of one team: at most ``most`` tokens a day."""

    _budgets: Budgets
    _team: str
    most: int

    async def recall(self) -> None:
        """Read the team's counts from the store."""
        await self._budgets.recall(self._team)

    @property
    def spent(self) -> bool:
        """Return whether the budget is used up."""
        return self._budgets.spent(self._team) >= self.most

    def call(self, tokens: int) -> AbstractContextManager[PaidCall]:
        """Return a context manager for a call that costs up to ``tokens``. Raises ``BudgetSpent`` if less is left."""
        if self._budgets.spent(self._team) + tokens > self.most:
            raise BudgetSpent("the team's tokens for summaries are used up for today")
        return self._budgets.reserve(self._team, tokens)
