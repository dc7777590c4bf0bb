"""Test the daily allowance of summaries."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from proxy.access.authenticator import Caller
from proxy.access.spending import Allowance, Allowances, AllowanceSpent
from proxy.config import Route
from proxy.config.policy import Policy
from proxy.config.teams import LimitSettings
from proxy.constants import DAY
from proxy.dialects.apis import CHAT
from proxy.errors import UpstreamTimeout, UpstreamUnreachable
from proxy.pipeline.summary_models import CallRecords
from proxy.store import open_store
from proxy.summary.model import UpstreamSummaryModel
from proxy.summary.quality import SummaryFailed
from proxy.telemetry.record import RequestRecord
from tests.kit.summary_conversation import words
from tests.unit.summary.test_model import ASKED, OneAnswer


class Clock:
    """A clock that advances only when it's set."""

    def __init__(self, now: float = 1_000 * DAY + 60.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def caller(most: int | None, team: str | None = "search") -> Caller:
    return Caller(
        f"team:{team}", team, Policy.build("default", {}), None, None, limits=LimitSettings(summary_tokens_per_day=most)
    )


def allowance(allowances: Allowances, most: int = 1_000, team: str = "search") -> Allowance:
    found = allowances.for_caller(caller(most, team))
    assert found is not None
    return found


async def spend(wanted: Allowance, tokens: int, cost: int | None = None) -> None:
    async with wanted.call(tokens) as call:
        call.cost = tokens if cost is None else cost


async def refuses(wanted: Allowance, tokens: int) -> None:
    with pytest.raises(AllowanceSpent):
        await spend(wanted, tokens)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


def test_without_a_limit_or_a_team_there_is_none() -> None:
    allowances = Allowances(None)
    assert allowances.for_caller(caller(None)) is None
    assert allowances.for_caller(caller(5, team=None)) is None
    assert allowances.for_caller(Caller("team:a", "a", Policy.build("default", {}), None, None)) is None


def test_a_call_is_begun_only_if_it_is_covered() -> None:
    async def test() -> None:
        wanted = allowance(Allowances(None, Clock()))
        await spend(wanted, 600, 500)
        await refuses(wanted, 501)
        await spend(wanted, 500)
        assert wanted.spent
        await refuses(wanted, 1)

    run(test())


def test_calls_at_the_same_time_count_at_their_most() -> None:
    async def test() -> None:
        wanted = allowance(Allowances(None, Clock()))
        async with wanted.call(600) as call:
            await refuses(wanted, 401)
            call.cost = 100
        await spend(wanted, 900)

    run(test())


def test_a_call_that_is_given_up_counts_at_its_most() -> None:
    async def test() -> None:
        wanted = allowance(Allowances(None, Clock()))
        with pytest.raises(asyncio.CancelledError):
            async with wanted.call(1_000):
                raise asyncio.CancelledError
        assert wanted.spent

    run(test())


def test_a_new_day_begins_anew() -> None:
    async def test() -> None:
        clock = Clock()
        wanted = allowance(Allowances(None, clock))
        await spend(wanted, 1_000)
        clock.now = 1_001 * DAY - 1.0
        assert wanted.spent
        clock.now = 1_001 * DAY
        assert not wanted.spent

    run(test())


def test_a_restart_does_not_begin_anew(tmp_path: Path) -> None:
    url, clock = f"sqlite:///{tmp_path}/store.db", Clock()

    async def test() -> None:
        for expected in (0, 400):
            store = open_store(url)
            allowances = Allowances(store, clock)
            wanted = allowance(allowances)
            await wanted.load()
            assert allowances.today("search").spent.tokens == expected
            await spend(wanted, 400)
            await allowances.aclose()
            await store.aclose()

    run(test())


class Failing:
    """A transport on which nothing works."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def send(self, request: Any) -> Any:
        raise self._error

    async def aclose(self) -> None:
        pass


def answered(**fields: Any) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": "Notes."}, "finish_reason": "stop"}
    return msgspec.json.encode({"choices": [choice], **fields})


USAGE = {"prompt_tokens": 120, "completion_tokens": 30, "total_tokens": 150}


def charged(transport: Any, allowances: Allowances, most: int) -> UpstreamSummaryModel:
    """Return a model whose calls are charged to a team."""
    records = SimpleNamespace(recorder=SimpleNamespace(add=lambda record: None))
    runtime = SimpleNamespace(money=SimpleNamespace(allowances=allowances), records=records)
    exchange = SimpleNamespace(record=RequestRecord("a", 0.0), caller=caller(most))
    route = Route("main", "small", None)
    calls = CallRecords(runtime, exchange, route, None, CHAT.answers, words, 1.0)  # type: ignore[arg-type]
    return UpstreamSummaryModel(transport, "small", "main", words, 5.0, calls=calls.call)


@pytest.mark.parametrize(
    ("transport", "cost"),
    [
        (OneAnswer(answered(usage=USAGE)), 150),
        (OneAnswer(answered(usage={"prompt_tokens": 120})), 121),
        (OneAnswer(answered(usage=None)), 1 + words(ASKED[0]["content"])),
        (OneAnswer(answered(usage="none")), 1 + words(ASKED[0]["content"])),
        (OneAnswer(answered()), 1 + words(ASKED[0]["content"])),
        (OneAnswer(b'{"error": {"message": "no"}}', status=500), 0),
        (Failing(UpstreamUnreachable("nobody there")), 0),
        (Failing(UpstreamTimeout("late")), None),
    ],
    ids=["usage", "half a usage", "none", "no object", "counted", "refused", "unreachable", "given up"],
)
def test_what_a_call_costs(transport: Any, cost: int | None) -> None:
    async def test() -> None:
        allowances = Allowances(None, Clock())
        model = charged(transport, allowances, 10_000)
        if isinstance(transport, Failing) or cost == 0:
            with pytest.raises(SummaryFailed):
                await model.ask(ASKED, 1_000)
        else:
            await model.ask(ASKED, 1_000)
        spent = allowances.today("search").spent.tokens
        assert spent == cost if cost is not None else 1_500 < spent < 1_600

    run(test())


def test_a_call_that_is_not_covered_is_not_made() -> None:
    transport = OneAnswer(answered(usage=USAGE))
    model = charged(transport, Allowances(None, Clock()), 1_500)
    with pytest.raises(AllowanceSpent):
        asyncio.run(model.ask(ASKED, 1_000))
    assert transport.requests == []
    with pytest.raises(AllowanceSpent):
        asyncio.run(model.continued(b"{}", 1_000, 501))
    assert transport.requests == []
    asyncio.run(model.continued(b"{}", 1_000, 500))
    assert len(transport.requests) == 1
