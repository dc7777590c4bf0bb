"""Test records: their prices, reasons, and batches in the background."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.types import Message, Scope
from structlog.testing import capture_logs

from proxy.compaction.rules import Rules
from proxy.compaction.settings import Bounds, Clause, IndexRules, UserMessageRules
from proxy.compaction.stages import ResultRules
from proxy.errors import Overloaded, UpstreamTimeout
from proxy.http.request_body import Sent, note_error
from proxy.limits.prices import Price, Rates
from proxy.pipeline import recorder as module
from proxy.pipeline.billing import Basis, cost_of
from proxy.pipeline.job import Forecast, reason_for
from proxy.pipeline.recorder import Recorder
from proxy.store import StoreFailed
from proxy.telemetry.record import RECORD, Cost, Reason, RequestRecord, Usage, current, new_id, record_of


class Store:
    """Remembers the batches, or fails."""

    def __init__(self) -> None:
        self.batches: list[list[RequestRecord]] = []
        self.fails = False

    async def write(self, records: Sequence[RequestRecord], seconds: float) -> None:
        if self.fails:
            raise StoreFailed("disk full")
        self.batches.append(list(records))


def made(store: Store | None, sinks: Sequence[module.Sink] = ()) -> Recorder:
    return Recorder(store, lambda: 60.0, sinks)  # type: ignore[arg-type]


async def _sent(*messages: Message) -> Sent:
    async def send(message: Message) -> None:
        return

    sent = Sent(send)
    for message in messages:
        await sent(message)
    return sent


START: Message = {"type": "http.response.start", "status": 200, "headers": []}
END: Message = {"type": "http.response.body", "body": b"ok"}


def test_a_request_is_recorded_with_its_response() -> None:
    async def work() -> None:
        store, seen = Store(), list[RequestRecord]()
        recorder = made(store, [seen.append])
        scope: Scope = {"type": "http", "path": "/v1/chat/completions"}
        record = recorder.begin(scope)
        assert record_of(scope) is record is current.get() is scope[RECORD]
        started = perf_counter()
        recorder.end(record, await _sent(START, END), started)
        assert seen == [record]
        assert (record.status, record.error, record.bytes_out, record.verdict) == (200, None, 2, "none")
        assert record.phases.keys() == {"total", "first_byte"}
        assert 0 <= record.phases["first_byte"] <= record.phases["total"] < 60_000
        await recorder.aclose()
        assert store.batches == [[record]]

    asyncio.run(work())


@pytest.mark.parametrize(
    ("error", "verdict", "code"),
    [(Overloaded("full"), "refused", "overloaded"), (UpstreamTimeout("late"), "none", "upstream_timeout")],
)
def test_an_error_of_the_proxy_is_recorded(error: Overloaded, verdict: str, code: str) -> None:
    async def work() -> None:
        recorder = made(None)
        record = recorder.begin({"type": "http", "path": "/v1/models"})
        sent = await _sent({**START, "status": error.status}, END)
        note_error(sent, error)
        recorder.end(record, sent, perf_counter())
        assert (record.status, record.verdict, record.error) == (error.status, verdict, code)

    asyncio.run(work())


def test_ids_in_a_path_are_not_recorded() -> None:
    async def work() -> None:
        recorder = made(None)
        assert recorder.begin({"type": "http", "path": "/v1/files/file-abc/content"}).path == "/v1/files/…"
        assert recorder.begin({"type": "http", "path": "/v1/responses/resp_1"}).path == "/v1/responses/…"
        assert recorder.begin({"type": "http", "path": "/v1/chat/completions"}).path == "/v1/chat/completions"

    asyncio.run(work())


def test_a_failing_store_keeps_records_waiting_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(module, "WAITING", 3)

    async def work() -> None:
        store = Store()
        store.fails = True
        recorder = made(store)
        records = [RequestRecord(new_id(), 0.0, tenant=f"t{number}") for number in range(5)]
        with capture_logs() as logs:
            for record in records:
                recorder.add(record)
            await asyncio.sleep(0.05)
        assert logs[0]["event"] == "records.write_failed"
        assert recorder.failing
        store.fails = False
        assert recorder.forget(lambda tenant: tenant == "t1") == {"t1"}
        await recorder.aclose()
        assert [[one.tenant for one in batch] for batch in store.batches] == [["t0"], ["t2"]]

    asyncio.run(work())


def test_the_last_error_of_a_store_does_not_end_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_SECONDS", 0.001)

    class Picky(Store):
        async def write(self, records: Sequence[RequestRecord], seconds: float) -> None:
            if self.fails:
                raise StoreFailed("locked")
            if any(one.tenant == "bad" for one in records):
                raise ValueError("a fault")
            await super().write(records, seconds)

    async def work() -> None:
        store = Picky()
        recorder = made(store)
        for tenant in ("a", "bad", "b", "bad"):
            recorder.add(RequestRecord(new_id(), 0.0, tenant=tenant))
        while len(recorder._writes):  # noqa: ASYNC110 - nothing tells when the task has written them
            await asyncio.sleep(0.001)
        recorder.add(RequestRecord(new_id(), 0.0, tenant="c"))
        await recorder.aclose()
        assert [[one.tenant for one in batch] for batch in store.batches] == [["a"], ["b"], ["c"]]

    asyncio.run(work())


RATES = Rates(10, 50, 1, 12)
PRICE = Price(RATES)
STEPPED = Price(RATES, ((5_000, Rates(20, 100, 2, 24)),))


@pytest.mark.parametrize(
    ("price", "usage", "basis", "cost"),
    [
        # Without a count: as sent. The upstream reports no cache.
        (PRICE, Usage(100, 10), Basis(), Cost(1_500, 1_500, estimated=True)),
        (PRICE, Usage(100, 10, 60, 30), Basis(), Cost(10 * 10 + 60 + 30 * 12 + 500, 980 + 40)),
        # Unchanged.
        (PRICE, Usage(100, 0, 0), Basis(100, 100), Cost(1_000, 1_000)),
        # Compacted from 1,000 to 100 tokens. The cache would have served 900, because the last request was recent.
        (PRICE, Usage(100, 0, 0), Basis(1_000, 100, 900, recent=True), Cost(1_000, 900 + 1_000)),
        # It wasn't recent.
        (PRICE, Usage(100, 0, 0), Basis(1_000, 100, 900), Cost(1_000, 10_000)),
        # This upstream reports no cache, so the estimate has none.
        (PRICE, Usage(100, 0), Basis(1_000, 100, 900, recent=True), Cost(1_000, 10_000, estimated=True)),
        # The client writes to the cache.
        (PRICE, Usage(100, 0, 40, 10), Basis(1_000, 100, 900), Cost(500 + 40 + 120, 900 + 100 * 12)),
        # The upstream counts twice as many tokens as the proxy.
        (PRICE, Usage(200, 0, 0), Basis(1_000, 100, 900), Cost(2_000, 20_000)),
        # It wouldn't have fit, so it would have cost nothing and returned nothing.
        (PRICE, Usage(100, 0, 0), Basis(1_000, 100, 900, fits=False), Cost(1_000, 1_000)),
        # The step's rates apply to the whole prompt.
        (STEPPED, Usage(100, 1, 0), Basis(6_000, 100, 0), Cost(1_050, 120_000 + 100)),
        # A saving below zero: after the checkpoint nothing is cached.
        (PRICE, Usage(500, 0, 0), Basis(1_000, 500, 990, recent=True), Cost(5_000, 990 + 100)),
    ],
)
def test_cost(price: Price, usage: Usage, basis: Basis, cost: Cost) -> None:
    found = cost_of(price, usage, basis)
    if basis == Basis():
        assert found.sent == found.as_received
        assert found.estimated == (usage.cache_read is None)
        assert usage.cache_read is None or found.sent == 10 * 10 + 60 + 30 * 12 + 500
    else:
        assert found == cost


def test_shadow_mode_estimates_enforce() -> None:
    usage, forecast = Usage(1_000, 0, 900), Forecast(300, ("summary",), 700, 50)
    first = cost_of(PRICE, usage, Basis(1_000, 1_000, 900, forecast, recent=True, new_checkpoint=True))
    assert first == Cost(100 * 10 + 900, 1_900, 300 * 10 + 700 * 10 + 50 * 50)
    # Later, the cache serves all but the 100 new tokens.
    later = cost_of(PRICE, usage, Basis(1_000, 1_000, 900, forecast, recent=True))
    assert later.forecast == 200 + 100 * 10


KEEP = Clause(messages=4)
RULES = Rules(
    trigger=(),
    keep=KEEP,
    prepare=(),
    stages=(),
    summary_tokens=1,
    user_messages=UserMessageRules(),
    index=IndexRules(),
)


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        (RULES, None),
        (replace(RULES, trigger=(Clause(fraction=0.5),)), Reason("fraction", 500, 900, 0.5)),
        (replace(RULES, trigger=(Clause(tokens=700),)), Reason("tokens", 700, 900)),
        (replace(RULES, trigger=(Clause(tokens=950), Clause(messages=8))), Reason("messages", 8, 10)),
        (replace(RULES, bounds=Bounds(messages=10)), Reason("messages", 10, 10)),
        (replace(RULES, bounds=Bounds(bytes=5)), Reason("bytes", 5, 6)),
        (
            replace(RULES, stages=(ResultRules((Clause(tokens=800),), KEEP),)),
            Reason("stage", 800, 900),
        ),
    ],
)
def test_the_first_condition_that_is_met(rules: Rules, reason: Reason | None) -> None:
    case = SimpleNamespace(rules=rules, budget=1_000, body=SimpleNamespace(raw=b"abcdef"))
    assert reason_for(cast(Any, case), 900, 10) == reason
