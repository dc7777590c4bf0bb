"""The file with the records fails, hangs, or is full: no request fails or waits for it."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
import structlog.testing

from proxy.pipeline import recorder
from proxy.records.sqlite import SqliteRecords
from proxy.store import StoreFailed, tenant_cache
from proxy.telemetry.record import RequestRecord
from tests.kit.records import records_in
from tests.kit.scripted import behind
from tests.kit.upstream import StandIn
from tests.kit.waiting import until

BODY = {"model": "gpt-5", "messages": [{"role": "user", "content": "hi"}]}


def asked(url: str, times: int) -> None:
    with httpx.Client(base_url=url, trust_env=False, timeout=5) as client:
        for _ in range(times):
            assert client.post("/v1/chat/completions", json=BODY).status_code == 200


def test_without_a_writable_file_requests_succeed_and_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(recorder, "WAITING", 5)
    store = tmp_path / "compaction.db"
    file = tmp_path / "compaction-records.db"
    file.mkdir()
    with structlog.testing.capture_logs() as logs:
        with behind(StandIn(), tmp_path, store={"url": f"sqlite:///{store}"}) as url:
            asked(url, 10)
            assert until(lambda: any(line["event"] == "records.write_failed" for line in logs))
            answer = httpx.get(f"{url}/compaction/requests", trust_env=False)
            assert answer.status_code == 500
            assert "Try again" in answer.json()["error"]["message"]
            # It works again: the newest records are written.
            file.rmdir()
            asked(url, 1)
        assert not any(line["event"] == "request.crashed" for line in logs)
    # Five waited, and later ones were dropped.
    assert 1 <= len(records_in(store)) <= 10


def test_a_file_that_hangs_delays_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(recorder, "WRITE_SECONDS", 0.05)
    monkeypatch.setattr(tenant_cache, "CLOSING_SECONDS", 0.05)
    started: list[float] = []

    async def write(self: SqliteRecords, records: Sequence[RequestRecord], seconds: float) -> None:
        started.append(time.monotonic())
        await asyncio.sleep(60)
        raise StoreFailed("never")

    monkeypatch.setattr(SqliteRecords, "write", write)
    with structlog.testing.capture_logs() as logs, behind(StandIn(), tmp_path) as url:
        asked(url, 20)
        assert until(lambda: len(started) >= 2)
    assert {line["event"] for line in logs} >= {"records.write_failed", "records.not_written"}
