"""Test that records are written in batches, in the background, and survive a store that fails."""

import asyncio
from collections.abc import Sequence
from time import perf_counter

import pytest
from starlette.types import Message, Scope
from structlog.testing import capture_logs

from proxy.errors import Overloaded, UpstreamTimeout
from proxy.http.request_body import Sent, note_error
from proxy.pipeline import recorder as module
from proxy.pipeline.recorder import Recorder
from proxy.store import StoreFailed
from proxy.telemetry.record import RECORD, RequestRecord, current, new_id, record_of


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
