"""Tokens that a team may spend on summaries in a day.

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
from proxy.store.accounts import Account, Amount, TeamAccounts
from proxy.store.forgetting import ALLOWANCE
from proxy.summary.writer import SummaryUnasked

KIND = ALLOWANCE

_GRACE = 60.0 * DAY
"""Seconds that a day's entry stays in the store after that day.

A full store removes the entries that expire first, and these must not be among them.
"""


class AllowanceSpent(SummaryUnasked):
    """The rest of the allowance doesn't cover another call."""


@dataclass(slots=True)
class PaidCall:
    """One call. ``cost`` is in tokens, and is the maximum until the caller sets it."""

    cost: int


class Allowances(TeamAccounts):
    """Track the tokens that teams spend. A reload of their limits keeps the counts."""

    def __init__(self, store: Store | None, clock: Callable[[], float] = time.time) -> None:
        """Use ``clock`` for seconds since 1970."""
        super().__init__(store, KIND, clock)

    def for_caller(self, caller: Caller) -> Allowance | None:
        """Return the allowance of a caller's team, or ``None`` if its tokens aren't limited."""
        if caller.team is None or caller.limits is None or caller.limits.summary_tokens_per_day is None:
            return None
        return Allowance(self, caller.team, caller.limits.summary_tokens_per_day)

    def today(self, team: str) -> Account:
        """Return the account of a team for today (UTC)."""
        day = int(self._clock() // DAY)
        return self.of(team, f"day {day}", (day + 1) * DAY + _GRACE)


@dataclass(frozen=True, slots=True)
class Allowance:
    """The allowance of one team: at most ``most`` tokens a day."""

    _all: Allowances
    _team: str
    most: int

    async def load(self) -> None:
        """Read the tokens that other processes have spent."""
        await self._all.today(self._team).read(again=True)

    @property
    def spent(self) -> bool:
        """Return whether the allowance is used up, with the maximum cost of calls in progress."""
        return self._all.today(self._team).total.tokens >= self.most

    @asynccontextmanager
    async def call(self, tokens: int) -> AsyncIterator[PaidCall]:
        """Reserve ``tokens``, the maximum cost of a call, until the call ends. Then count its cost.

        Raises ``AllowanceSpent`` if less is left.
        """
        account, id = self._all.today(self._team), secrets.token_hex(8)
        if not await account.reserve(id, Amount(tokens), lambda total: total.tokens + tokens <= self.most):
            raise AllowanceSpent("the team's tokens for summaries are used up for today")
        call = PaidCall(tokens)
        try:
            yield call
        finally:
            account.settle(id, Amount(call.cost))
