"""Test that budgets count money or tokens, start again after their period, and are shared by processes."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from proxy.access.spending import Spending, described
from proxy.config.teams import SpendSettings
from proxy.errors import SpendingExceeded
from proxy.store.accounts import Amount
from proxy.store.sqlite import SqliteStore
from proxy.telemetry.record import Cost, RequestRecord, Usage, new_id
from tests.kit.stores import Clock

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


async def refused(spent: Spending, who: Any) -> SpendingExceeded:
    with pytest.raises(SpendingExceeded) as caught:
        await spent.check(who)
    return caught.value


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


def test_a_request_in_progress_reserves_its_probable_cost() -> None:
    async def work() -> None:
        spent, who = spending(TOKENS, Clock(at(2026, 5, 2))), caller(TOKENS)
        first, second = record(tokens=40), record(tokens=10)
        await spent.reserve(who, first.id, Amount(90))
        await spent.reserve(who, second.id, Amount(90))  # less than the budget is reserved, so it may begin
        for third in (spent.reserve(who, "third", Amount(1)), spent.check(who)):
            with pytest.raises(SpendingExceeded) as caught:
                await third
            assert caught.value.retry_after == 5
        spent.add(first)
        spent.add(second)
        await spent.reserve(who, "fourth", Amount(1))
        assert spent.remaining(who) == "50 tokens"

    asyncio.run(work())


def test_another_period_counts_for_itself_and_is_kept(tmp_path: Path) -> None:
    clock, limit = Clock(at(2026, 5, 7)), SpendSettings(tokens=100, per="day")

    async def work() -> None:
        for period, left in ((limit, "40 tokens"), (TOKENS, "40 tokens"), (limit, "0 tokens"), (TOKENS, "0 tokens")):
            store = SqliteStore(tmp_path / "store.db")
            spent = spending(period, clock, store)
            if left != "0 tokens":
                await spent.check(caller(period))
            spent.add(record(tokens=60))
            await spent.aclose()
            assert spent.remaining(caller(period)) == left
            await store.aclose()

    asyncio.run(work())


def test_many_requests_on_two_replicas_exceed_a_budget_by_one_reservation(tmp_path: Path) -> None:
    clock, limit = Clock(at(2026, 5, 7)), SpendSettings(tokens=5_000, per="day")

    async def work() -> None:
        stores = [SqliteStore(tmp_path / "store.db") for _ in range(2)]
        both = [spending(limit, clock, store) for store in stores]

        async def request(spent: Spending) -> int:
            one = record(tokens=1_000)
            try:
                await spent.reserve(caller(limit), one.id, Amount(1_000))
            except SpendingExceeded:
                return 0
            await asyncio.sleep(0.01)
            spent.add(one)
            return 1

        admitted = await asyncio.gather(*(request(both[number % 2]) for number in range(60)))
        assert sum(admitted) == 5
        for spent, store in zip(both, stores, strict=True):
            await spent.aclose()
            await store.aclose()

    asyncio.run(work())


def test_a_budget_as_text() -> None:
    assert described(TOKENS) == "100 tokens per month"
