"""Daily token budgets for the summaries of a team.

The processes on one store count together, see ``store.accounts``. A call reserves its maximum cost first.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from proxy.access.authenticator import Caller
from proxy.constants import DAY
from proxy.store import Store
from proxy.store.accounts import Account, Amount
from proxy.summary.chunking import SummaryUnasked

KIND = "spent.2"

_GRACE = 60.0 * DAY
"""Seconds that a day's entry stays in the store after that day.

A full store removes the entries that expire first, and these must not be among them.
"""


class BudgetSpent(SummaryUnasked):
    """The remaining budget doesn't cover another call."""


@dataclass(slots=True)
class PaidCall:
    """One call. ``cost`` is in tokens, and is the maximum until the caller sets it."""

    cost: int


class Budgets:
    """Track the tokens that teams spend. A reload of their limits keeps the counts."""

    def __init__(self, store: Store | None, clock: Callable[[], float] = time.time) -> None:
        """Use ``clock`` for seconds since 1970."""
        self._store = store
        self._clock = clock
        self._accounts: dict[tuple[str, int], Account] = {}

    def of(self, caller: Caller) -> Budget | None:
        """Return the budget of a caller's team, or ``None`` if the team has none."""
        if caller.team is None or caller.limits is None or caller.limits.summary_tokens_per_day is None:
            return None
        return Budget(self, caller.team, caller.limits.summary_tokens_per_day)

    def account(self, team: str) -> Account:
        """Return the account of a team for today (UTC)."""
        day = int(self._clock() // DAY)
        account = self._accounts.get((team, day))
        if account is None:
            for old in [key for key, of in self._accounts.items() if key[0] == team and of.idle]:
                del self._accounts[old]
            place = f"team:{team}", KIND, f"day {day}"
            account = self._accounts[team, day] = Account(self._store, place, (day + 1) * DAY + _GRACE, self._clock)
        return account

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        """Drop the amounts of forgotten tenants, and return those tenants."""
        teams = {team for team, _ in self._accounts if forgotten(f"team:{team}")}
        for key in [key for key in self._accounts if key[0] in teams]:
            self._accounts.pop(key).drop()
        return {f"team:{team}" for team in teams}

    async def aclose(self) -> None:
        """Write pending amounts to the store."""
        for account in self._accounts.values():
            await account.aclose()


@dataclass(frozen=True, slots=True)
class Budget:
    """The budget of one team: at most ``most`` tokens a day."""

    _budgets: Budgets
    _team: str
    most: int

    async def load(self) -> None:
        """Read the tokens that other processes have spent."""
        await self._budgets.account(self._team).read(again=True)

    @property
    def spent(self) -> bool:
        """Return whether the budget is used up, with the maximum cost of calls in progress."""
        return self._budgets.account(self._team).total.tokens >= self.most

    @asynccontextmanager
    async def call(self, tokens: int) -> AsyncIterator[PaidCall]:
        """Reserve ``tokens``, the maximum cost of a call, until the call ends. Then count its cost.

        Raises ``BudgetSpent`` if less is left.
        """
        account, id = self._budgets.account(self._team), secrets.token_hex(8)
        if not await account.reserve(id, Amount(tokens), lambda total: total.tokens + tokens <= self.most):
            raise BudgetSpent("the team's tokens for summaries are used up for today")
        call = PaidCall(tokens)
        try:
            yield call
        finally:
            account.settle(id, Amount(call.cost))
