"""Test the record of a request by sending requests through the proxy."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx

from proxy.pipeline.changes import Changed, Unchanged, read_changes
from proxy.store import open_store
from proxy.store.archive import Archive
from proxy.telemetry.record import RequestRecord
from tests.kit.messages import words
from tests.kit.records import ledger_in, records_in
from tests.kit.scripted import behind, chat
from tests.kit.upstream import StandIn

CANARY = "CANARY-7f3a"


def test_requests_of_all_kinds_are_recorded_without_content(tmp_path: Path) -> None:
    messages = chat(30, 400)
    messages[1]["content"] += CANARY
    body = {"model": "gpt-5", "messages": messages, "user": CANARY}
    keys = {"authorization": f"Bearer sk-{CANARY}"}
    store = tmp_path / "records" / "compaction.db"
    with (
        behind(StandIn(window=16_000), tmp_path, store={"url": f"sqlite:///{store}"}) as url,
        httpx.Client(base_url=url, headers=keys, trust_env=False, timeout=60) as client,
    ):
        small = client.post("/v1/chat/completions", json={"model": "gpt-5", "messages": messages[:1]})
        large = client.post("/v1/chat/completions", json=body)
        streamed = client.post("/v1/chat/completions", json={**body, "stream": True})
        wrong = client.post("/v1/chat/completions", json=body, headers={"x-compaction": "on"})
        passed = client.get(f"/v1/files/{CANARY}?q={CANARY}")
    answers = [small, large, streamed, wrong, passed]
    found = records_in(store)
    requests = [one for one in reversed(found) if one.kind == "request"]
    assert [one.id for one in requests] == [answer.headers["x-compaction-id"] for answer in answers]
    assert [one.status for one in requests] == [answer.status_code for answer in answers]
    assert [one.verdict for one in requests] == ["none", "compacted", "compacted", "refused", "unsupported"]
    assert [one.error for one in requests] == [None, None, None, "invalid_body", None]
    assert [one.stream for one in requests] == [False, False, True, False, False]
    compacted = requests[1]
    assert compacted.reason is not None
    assert compacted.reason.trigger == "fraction"
    assert str(compacted.before) == large.headers["x-compaction-tokens-before"]
    assert str(compacted.sent) == large.headers["x-compaction-tokens-after"]
    assert (compacted.summary, requests[2].summary) == ("made", "stored")
    assert compacted.archive
    assert compacted.usage is not None
    assert compacted.usage.input == large.json()["usage"]["prompt_tokens"]
    assert compacted.phases.keys() == {"body", "total", "first_byte"}
    summary = next(one for one in reversed(found) if one.kind == "summary")
    assert (summary.parent, summary.status) == (compacted.id, 200)
    assert summary.usage is not None
    rows = ledger_in(store)
    assert sum(sums.requests for _, sums in rows) == 5
    assert sum(sums.received for _, sums in rows) == sum(one.before or 0 for one in requests)
    file = store.with_name("compaction-records.db")
    assert CANARY.encode() not in b"".join(one.read_bytes() for one in file.parent.glob(f"{file.name}*"))


def test_the_changes_of_a_request_can_be_read_from_the_archive(tmp_path: Path) -> None:
    messages = chat(30, 400)
    messages[-2]["content"] = words(9_000, "long")  # in the kept part, so it's shortened
    store = tmp_path / "compaction.db"
    upstream = StandIn(window=16_000)
    with behind(upstream, tmp_path, store={"url": f"sqlite:///{store}"}) as url:
        body = {"model": "gpt-5", "messages": messages}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, trust_env=False, timeout=60)
    record = next(one for one in records_in(store) if one.id == answer.headers["x-compaction-id"])
    shown = asyncio.run(_changes(store, record))
    assert shown is not None
    sent = next(one for one in upstream.requests if len(one.body["messages"]) > 2).body["messages"]
    rebuilt_before: dict[int, Any] = {}
    rebuilt_after: list[Any] = []
    for part in shown:
        if isinstance(part, Unchanged):
            kept = messages[part.position : part.position + part.count]
            rebuilt_after += kept
            rebuilt_before.update(enumerate(kept, part.position))
        else:
            assert part.complete
            rebuilt_after += map(json.loads, part.after)
            rebuilt_before.update(enumerate(map(json.loads, part.before), part.position))
    assert rebuilt_after == sent
    assert [message for _, message in sorted(rebuilt_before.items())] == messages
    assert sum(isinstance(part, Changed) and part.summary for part in shown) == 1


async def _changes(store: Path, record: RequestRecord) -> list[Changed | Unchanged] | None:
    opened = open_store(f"sqlite:///{store}")
    try:
        return await read_changes(Archive(opened), record)
    finally:
        await opened.aclose()
