"""Limits on the spending of teams, in US dollars or in tokens, by day or by month (UTC), and on that for summaries.

A request reserves its probable cost before the proxy sends it, and its record settles the reservation. The proxy admits
a request while less than the limit is spent and reserved. A call to a summary model reserves its maximum tokens, too.
The processes on one store count together, see ``store.accounts``.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

import msgspec

from proxy.access.authenticator import Caller
from proxy.config.settings import Settings
from proxy.config.teams import SpendSettings
from proxy.constants import DAY, PICO
from proxy.errors import BudgetReserved, Limit, SpendingExceeded
from proxy.store import Store
from proxy.store.accounts import NOTHING, Account, Amount, TeamAccounts
from proxy.store.forgetting import ALLOWANCE, SPENDING
from proxy.telemetry.metrics import SPENDING_REMAINING, refused
from proxy.telemetry.record import RequestRecord
from proxy.telemetry.record_json import iso_time

EPOCH = date(1970, 1, 1).toordinal()

AGAIN_SECONDS = 5  # seconds after which to retry if requests in progress have reserved all that is left

_GRACE, _ALLOWANCE_GRACE = 92.0 * DAY, 60.0 * DAY
"""Seconds that an entry stays in the store after the beginning of its period, or after the day of an allowance.

A full store removes the entries that expire first, and these must not be among them.
"""


class Budget(msgspec.Struct, frozen=True):
    """What a team has spent of its budget. ``used`` and ``left`` are ``None`` if the store can't be read."""

    team: str
    limit: str
    used: str | None
    left: str | None
    again: str

    @property
    def text(self) -> str:
        used = "an unknown amount" if self.used is None else f"{self.used} used, {self.left} left"
        return f"{self.limit}: {used}; it begins again at {self.again[:16].replace('T', ' ')} UTC"


class Spending(TeamAccounts):
    """Counts what teams with a limit spend. A reload of their limits keeps the counts."""

    def __init__(
        self, store: Store | None, settings: Callable[[], Settings], clock: Callable[[], float] = time.time
    ) -> None:
        """``settings`` returns the current ones. ``clock`` returns seconds since 1970."""
        super().__init__(store, SPENDING, clock)
        self._settings = settings
        self._holding: dict[str, Account] = {}
        self._settled: set[str] = set()

    async def check(self, caller: Caller) -> None:
        """Raise ``SpendingExceeded`` if the caller's team has spent its limit."""
        if caller.team is None or (limit := limit_of(caller)) is None:
            return
        account = self._account(caller.team, limit)
        await account.read()
        if not _below(limit, account.total):
            # Other processes may have ended their reservations meanwhile.
            await account.read(again=True)
        if not _below(limit, account.total):
            raise self._exceeded(account, limit)

    async def reserve(self, caller: Caller, id: str, amount: Amount) -> None:
        """Reserve the probable cost of the request or summary call whose record has this id.

        Raises ``SpendingExceeded``. ``add`` or ``settle`` ends the reservation. One of nothing is always possible.
        """
        if caller.team is None or (limit := limit_of(caller)) is None or id in self._holding:
            return
        if limit.usd is not None and not amount.money:
            return
        account = self._account(caller.team, limit)
        if not await account.reserve(id, amount, lambda total: _below(limit, total)):
            raise self._exceeded(account, limit)
        self._holding[id] = account

    def remaining(self, caller: Caller) -> str | None:
        """Return what the caller's team may still spend, as a header value; ``None`` without a limit."""
        if caller.team is None or (limit := limit_of(caller)) is None:
            return None
        left = max(0, _left(limit, self._account(caller.team, limit).spent))
        return f"{left} tokens" if limit.usd is None else f"{left / PICO:.4f} USD"

    async def budgets(self, tenants: tuple[str, ...] | None = None) -> list[Budget]:
        """Return the budgets of the teams that are among the tenants, by name."""
        found = []
        for team, settings in sorted(self._settings().teams.items()):
            limit = None if settings.limits is None else settings.limits.spend
            if limit is None or (tenants is not None and f"team:{team}" not in tenants):
                continue
            account = self._account(team, limit)
            await account.read(again=True)
            used = left = None
            if account.known:
                used, left = (_amount(limit, one) for one in (account.spent, _rest(limit, account.spent)))
            found.append(Budget(team, described(limit), used, left, iso_time(self._period(limit)[1] * DAY)))
        return found

    def add(self, record: RequestRecord) -> None:
        """Count a finished request or summary call, unless it is already settled. A sink of the recorder."""
        if record.id in self._settled:
            self._settled.remove(record.id)
        else:
            self._count(record)

    def settle(self, record: RequestRecord) -> None:
        """Count a request whose usage is known, before its record is finished."""
        if record.id in self._holding:
            self._settled.add(record.id)
            self._count(record)

    def _count(self, record: RequestRecord) -> None:
        held = self._holding.pop(record.id, None)
        if held is not None:
            held.settle(record.id, NOTHING)
        if record.team is None or record.usage is None:
            return
        team = self._settings().teams.get(record.team)
        limit = None if team is None or team.limits is None else team.limits.spend
        if limit is None:
            return
        tokens = (record.usage.input or 0) + (record.usage.output or 0)
        spent = Amount(tokens, 0 if record.cost is None else record.cost.sent)
        if spent == NOTHING:
            return
        account = self._account(record.team, limit)
        account.settle(record.id, spent)
        left = _left(limit, account.spent)
        SPENDING_REMAINING.labels(team=record.team, unit="tokens" if limit.usd is None else "usd").set(
            left if limit.usd is None else left / PICO
        )

    def _account(self, team: str, limit: SpendSettings) -> Account:
        start, _ = self._period(limit)
        return self.of(team, f"{limit.per} {start}", start * DAY + _GRACE)

    def _exceeded(self, account: Account, limit: SpendSettings) -> SpendingExceeded:
        refused("budget").inc()
        used = _amount(limit, account.spent)
        if _below(limit, account.spent):
            return BudgetReserved(
                f"Requests in progress have reserved the rest of your team's budget of {described(limit)}. "
                f"Try again in {AGAIN_SECONDS} s, or send fewer requests at once.",
                retry_after=AGAIN_SECONDS,
                limit=Limit("spend", described(limit), f"{used}, and requests in progress had reserved the rest"),
            )
        left = max(1, int(self._period(limit)[1] * DAY - self._clock()))
        return SpendingExceeded(
            f"Your team has used up its budget of {described(limit)}. It starts again in "
            f"{_wait(left)}. Ask the operator of this proxy for a higher budget.",
            retry_after=left,
            limit=Limit("spend", described(limit), used),
        )

    def _period(self, limit: SpendSettings) -> tuple[int, int]:
        """Return the start and the end of the current period, in days since 1970."""
        today = datetime.fromtimestamp(self._clock(), UTC).date()
        first = today if limit.per == "day" else today.replace(day=1)
        following = first + timedelta(days=1 if limit.per == "day" else 31)
        if limit.per == "month":
            following = following.replace(day=1)
        return first.toordinal() - EPOCH, following.toordinal() - EPOCH


class AllowanceSpent(Exception):
    """The rest of a team's limit doesn't cover another call to a summary model."""


@dataclass(slots=True)
class PaidCall:
    """One call. ``cost`` is in tokens, and is the maximum until the caller sets it."""

    cost: int


class Allowances(TeamAccounts):
    """Counts the tokens that teams spend on summaries in a day. A reload of their limits keeps the counts."""

    def __init__(self, store: Store | None, clock: Callable[[], float] = time.time) -> None:
        """Use ``clock`` for seconds since 1970."""
        super().__init__(store, ALLOWANCE, clock)

    def for_caller(self, caller: Caller) -> Allowance | None:
        """Return the allowance of a caller's team, or ``None`` if its tokens aren't limited."""
        if caller.team is None or caller.limits is None or caller.limits.summary_tokens_per_day is None:
            return None
        return Allowance(self, caller.team, caller.limits.summary_tokens_per_day)

    def today(self, team: str) -> Account:
        """Return the account of a team for today (UTC)."""
        day = int(self._clock() // DAY)
        return self.of(team, f"day {day}", (day + 1) * DAY + _ALLOWANCE_GRACE)


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


def limit_of(caller: Caller) -> SpendSettings | None:
    return None if caller.team is None or caller.limits is None else caller.limits.spend


def described(limit: SpendSettings) -> str:
    usd = limit.usd or 0
    exact = f"{usd:,.2f}" if round(usd, 2) == usd else f"{usd:,.12f}".rstrip("0")
    amount = f"{limit.tokens:,} tokens" if limit.usd is None else f"{exact} USD"
    return f"{amount} per {limit.per}"


def _amount(limit: SpendSettings, amount: Amount) -> str:
    return f"{amount.tokens:,} tokens" if limit.usd is None else f"{amount.money / PICO:,.4f} USD"


def _rest(limit: SpendSettings, spent: Amount) -> Amount:
    left = max(0, _left(limit, spent))
    return Amount(tokens=left, money=left)


def _left(limit: SpendSettings, amount: Amount) -> int:
    return (limit.tokens or 0) - amount.tokens if limit.usd is None else round(limit.usd * PICO) - amount.money


def _below(limit: SpendSettings, amount: Amount) -> bool:
    return _left(limit, amount) > 0


def _wait(seconds: int) -> str:
    hours, minutes = seconds // 3600, seconds % 3600 // 60
    return f"{hours // 24} days" if hours >= 48 else f"{hours} h {minutes} min"
