"""Test that budgets count money or tokens, start again after their period, and are shared by processes."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest

from proxy.access.spending import Amounts, Spending, described
from proxy.config.teams import SpendSettings
from proxy.errors import BudgetExceeded
from proxy.store.sqlite import SqliteStore
from proxy.telemetry.record import Cost, RequestRecord, Usage, new_id
from tests.kit.stores import Clock

MONEY = SpendSettings(usd=1.0, per="day")
TOKENS = SpendSettings(tokens=100, per="month")


def at(*day: int) -> float:
    return datetime(*day, tzinfo=UTC).timestamp()  # type: ignore[arg-type]


def spending(limit: SpendSettings, clock: Clock, store: SqliteStore | None = None) -> Spending:
    team = SimpleNamespace(limits=SimpleNamespace(spend=limit))
    settings = cast(Any, SimpleNamespace(teams={"red": team}))
    return Spending(store, lambda: settings, clock)


def caller(limit: SpendSettings | None, team: str | None = "red") -> Any:
    return SimpleNamespace(team=team, limits=SimpleNamespace(spend=limit))


def record(usd: float = 0.0, tokens: int = 0, team: str = "red") -> RequestRecord:
    return RequestRecord(new_id(), 0.0, team=team, usage=Usage(tokens, 0), cost=Cost(round(usd * 10**12)))


async def refused(spent: Spending, who: Any) -> BudgetExceeded:
    with pytest.raises(BudgetExceeded) as caught:
        await spent.check(who)
    return caught.value


def test_money_is_counted_until_the_day_ends() -> None:
    async def work() -> None:
        clock = Clock(at(2026, 3, 31, 23))
        spent = spending(MONEY, clock)
        await spent.check(caller(MONEY))
        spent.add(record(0.25))
        spent.add(record(5.0, team="blue"))
        assert spent.remaining(caller(MONEY)) == "0.7500 USD"
        spent.add(record(0.80))
        error = await refused(spent, caller(MONEY))
        assert error.retry_after == 3_600
        clock.now += 3_540
        assert "0 h 1 min" in (await refused(spent, caller(MONEY))).message
        clock.now += 59.5
        assert (await refused(spent, caller(MONEY))).retry_after == 1
        clock.now -= 3_599.5
        assert "1.00 USD per day" in error.message
        assert "1 h 0 min" in error.message
        assert spent.remaining(caller(MONEY)) == "0.0000 USD"
        clock.now += 3_600
        await spent.check(caller(MONEY))

    asyncio.run(work())


def test_tokens_are_counted_until_the_month_ends() -> None:
    async def work() -> None:
        clock = Clock(at(2026, 12, 2))
        spent = spending(TOKENS, clock)
        spent.add(record(tokens=99))
        assert spent.remaining(caller(TOKENS)) == "1 tokens"
        spent.add(record(tokens=1))
        assert "30 days" in (await refused(spent, caller(TOKENS))).message
        clock.now = at(2027, 1, 1)
        await spent.check(caller(TOKENS))

    asyncio.run(work())


def test_without_a_budget_nothing_is_limited() -> None:
    async def work() -> None:
        spent = spending(MONEY, Clock())
        for who in (caller(None), caller(MONEY, team=None)):
            await spent.check(who)
            assert spent.remaining(who) is None

    asyncio.run(work())


def test_processes_on_one_store_share_what_they_have_counted() -> None:
    async def work() -> None:
        store, clock = SqliteStore(None), Clock(at(2026, 5, 1))
        first = spending(MONEY, clock, store)
        first.add(record(2.0))
        await first.aclose()
        second = spending(MONEY, clock, store)
        await refused(second, caller(MONEY))
        assert second.forget(lambda tenant: tenant == "team:red") == {"team:red"}
        await second.aclose()
        await store.aclose()

    asyncio.run(work())


def test_merging_keeps_the_newer_period_and_the_larger_amounts() -> None:
    old, new = Amounts(1, {"a": 9}), Amounts(2, {"a": 1, "b": 5}, {"a": 3})
    assert old.merged(new) == new.merged(old) == new
    assert new.merged(Amounts(2, {"b": 7, "c": 1})) == Amounts(2, {"a": 1, "b": 7, "c": 1}, {"a": 3})


def test_a_budget_as_text() -> None:
    assert described(TOKENS) == "100 tokens per month"
