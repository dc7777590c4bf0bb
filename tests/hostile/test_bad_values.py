"""One wrong figure, invented name, or damaged row spoils nothing else."""

import sqlite3
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog.testing
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from proxy.pipeline import recorder
from tests.kit.combinations import combined
from tests.kit.records import ledger_in, records_in
from tests.kit.scripted import behind, key_hash
from tests.kit.waiting import until

PATHS = {"/v1/chat/completions": "messages", "/v1/responses": "input", "/v1/messages": "messages"}
TEAMS = {
    "auth": {"mode": "keys"},
    "teams": {name: {"keys": [key_hash(name)]} for name in ("red", "blue")},
    "prices": {"gpt-5": {"input_cost_per_token": 0.000001, "output_cost_per_token": 0.00001}},
}
ABSURD = 18_446_744_073_709_551_615


class Figures:
    """Answers in the API of the path, with 5 tokens of input and ``output`` tokens of output."""

    def __init__(self) -> None:
        self.output: int = 5

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        await request.body()
        total = {"total_tokens": 5 + self.output}
        usage: dict[str, Any] = {"prompt_tokens": 5, "completion_tokens": self.output, **total}
        named = {"input_tokens": 5, "output_tokens": self.output, **total}
        text = {"type": "text", "text": "fine"}
        said = {"type": "output_text", "text": "fine", "annotations": []}
        item = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [said]}
        choice = {"index": 0, "message": {"role": "assistant", "content": "fine"}, "finish_reason": "stop"}
        answers = {
            "/v1/chat/completions": {"object": "chat.completion", "choices": [choice], "usage": usage},
            "/v1/responses": {"object": "response", "status": "completed", "output": [item], "usage": named},
            "/v1/messages": {"type": "message", "role": "assistant", "content": [text], "usage": named},
        }
        body = {"id": "a", "model": "gpt-5", "stop_reason": "end_turn", **answers[scope["path"]]}
        await JSONResponse(body)(scope, receive, send)


def asked(url: str, path: str = "/v1/chat/completions", key: str = "red", model: str = "gpt-5") -> str:
    """Send a request, and return the id of its record."""
    body = {"model": model, PATHS[path]: [{"role": "user", "content": "hi"}], "max_tokens": 9}
    if path == "/v1/responses":
        del body["max_tokens"]
    answer = httpx.post(f"{url}{path}", json=body, headers={"authorization": f"Bearer {key}"}, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-compaction-id"]


def get(url: str, path: str, key: str = "red") -> httpx.Response:
    return httpx.get(f"{url}{path}", headers={"authorization": f"Bearer {key}"}, trust_env=False, timeout=30)


def store_of(folder: Path) -> dict[str, Any]:
    return {"store": {"url": f"sqlite:///{folder}/c.db"}}


@pytest.mark.parametrize(("path", "output"), combined(2, PATHS, [ABSURD, 10**9 + 1]))
def test_an_absurd_figure_counts_as_not_reported_and_ends_no_records(tmp_path: Path, path: str, output: int) -> None:
    upstream = Figures()
    with behind(upstream, tmp_path, **TEAMS, **store_of(tmp_path)) as url:
        upstream.output = output
        first = asked(url, path)
        assert until(lambda: get(url, f"/compaction/requests/{first}").status_code == 200)
        usage = get(url, f"/compaction/requests/{first}").json()["usage"]
        upstream.output = 5
        ids = [asked(url, path, key) for key in ("red", "blue")]
        for id, key in zip(ids, ("red", "blue"), strict=True):
            assert until(lambda id=id, key=key: get(url, f"/compaction/requests/{id}", key).status_code == 200)  # type: ignore[misc]
        assert get(url, "/readyz").text == "ready\n"
        total = get(url, "/compaction/report").json()["total"]
    # The proxy has counted the output.
    assert usage == {"input": 5, "output": 1, "cache_read": None, "cache_write": None, "estimated": True}
    assert (total["requests"], total["input"], total["output"]) == (2, 10, 6)


def test_a_price_that_no_row_can_hold_counts_as_unknown(tmp_path: Path) -> None:
    upstream = Figures()
    prices = {"prices": {"gpt-5": {"input_cost_per_token": 0.000001, "output_cost_per_token": 4e4}}}
    with behind(upstream, tmp_path, **{**TEAMS, **prices}, **store_of(tmp_path)) as url:
        asked(url)
        upstream.output = 0
        asked(url)
        assert until(lambda: get(url, "/compaction/report").json()["total"]["requests"] == 2)
        total = get(url, "/compaction/report").json()["total"]
    assert (total["unpriced"], total["cost"], total["output"]) == (1, "40000.000005", 6)


def test_a_record_that_the_store_cannot_hold_is_dropped_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "PAUSE_SECONDS", 0.2)
    real = recorder.Recorder.end

    def end(self: recorder.Recorder, record: Any, *arguments: Any) -> None:
        if record.team == "red":
            record.bytes_in = 2**70
        real(self, record, *arguments)

    monkeypatch.setattr(recorder.Recorder, "end", end)
    with structlog.testing.capture_logs() as logs, behind(Figures(), tmp_path, **TEAMS, **store_of(tmp_path)) as url:
        bad = [asked(url, key=key) for key in ("blue", "red", "blue", "red", "blue")][1::2]
        assert until(lambda: len(get(url, "/compaction/requests", "blue").json()["data"]) == 3)
        later = asked(url, key="blue")
        assert until(lambda: get(url, f"/compaction/requests/{later}", "blue").status_code == 200)
        assert get(url, "/readyz").text == "ready\n"
    assert len(records_in(tmp_path / "c.db")) == 4
    dropped = [line for line in logs if line["event"] == "records.record_dropped"]
    assert [line["record"] for line in dropped] == bad
    failed = [line for line in logs if line["event"] == "records.write_failed"]
    assert all(line["reason"].startswith("OverflowError") for line in failed)


def broken(folder: Path, statement: str, id: str) -> None:
    with sqlite3.connect(folder / "c-records.db", timeout=30) as database:
        assert database.execute(statement, {"id": id}).rowcount > 0
    database.close()


PAGES = ("requests", "", "status", "savings", "report", "report?by=model&format=csv")


@pytest.mark.parametrize(
    "damage",
    [
        "update records set value=x'81a17801' where id=:id",
        "update records set value='text' where id=:id",
        "update ledger set labels=x'00'",
        "update ledger set labels=7",
        "update ledger set received='much'",
        "update ledger set cost=9.9e18",
    ],
)
def test_an_unreadable_row_is_skipped_and_logged_once(tmp_path: Path, damage: str) -> None:
    with structlog.testing.capture_logs() as logs, behind(Figures(), tmp_path, **TEAMS, **store_of(tmp_path)) as url:
        ids = [asked(url) for _ in range(3)]
        asked(url, key="blue")
        assert until(lambda: len(records_in(tmp_path / "c.db")) == 4)
        broken(tmp_path, damage, ids[1])
        for _ in range(2):
            assert {path: get(url, f"/compaction/{path}").status_code for path in PAGES} == dict.fromkeys(PAGES, 200)
        found = [one["id"] for one in get(url, "/compaction/requests?limit=2").json()["data"]]
        assert found == ([ids[2], ids[0]] if "records" in damage else [ids[2], ids[1]])
        later = asked(url)
        assert until(lambda: get(url, f"/compaction/requests/{later}").status_code == 200)
        assert get(url, "/compaction/report").json()["total"]["requests"] == 4, "the row is readable again"
    lines = [line for line in logs if line["event"] == "records.entry_unreadable"]
    assert lines
    assert len({line["key"] for line in lines}) == len(lines)


def test_invented_model_names_are_bounded_and_sums_stay_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.records.model.TENANT_ROWS", 5)
    with behind(Figures(), tmp_path, **TEAMS, **store_of(tmp_path)) as url:
        for number in range(12):
            asked(url, model=f"invented-{number}")
        asked(url, model="invented-0")
        asked(url, key="blue", model="gpt-5")
        assert until(lambda: len(records_in(tmp_path / "c.db")) == 14)
        rows = get(url, "/compaction/report?by=model").json()["rows"]
        page = get(url, "/compaction/savings").text
        blue = get(url, "/compaction/report?by=model", "blue").json()["rows"]
    counts = {row["model"]: row["requests"] for row in rows}
    assert counts == {"(other)": 7, "invented-0": 2, **{f"invented-{number}": 1 for number in range(1, 5)}}
    assert "(other)" in page
    assert [row["model"] for row in blue] == ["gpt-5"]


def test_invented_keys_are_bounded_and_the_administrator_sees_all_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.records.model.DAY_ROWS", 3)
    admin = {"admin": {"keys": [key_hash("admin")]}}
    with behind(Figures(), tmp_path, **admin, **store_of(tmp_path)) as url:
        for number in range(8):
            asked(url, key=f"sk-invented-{number}")
        assert until(lambda: len(records_in(tmp_path / "c.db")) == 8)
        assert get(url, "/compaction/report", "admin").json()["total"]["requests"] == 8
        assert get(url, "/compaction/report", "sk-invented-7").json()["total"]["requests"] == 0
    assert len(ledger_in(tmp_path / "c.db")) == 4
