"""Test the record of a request by sending requests through the proxy."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import msgspec

from proxy.endpoints.records import diff_json
from proxy.pipeline.changes import read_prompt
from proxy.store import open_store
from proxy.store.archive import Archive
from proxy.telemetry.record import RequestRecord
from tests.kit.messages import words
from tests.kit.records import records_in
from tests.kit.scripted import behind, chat
from tests.kit.upstream import StandIn


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
    sent = next(one for one in upstream.requests if len(one.body["messages"]) > 2).body["messages"]
    rebuilt_before: dict[int, Any] = {}
    rebuilt_after: list[Any] = []
    for part in shown["changes"]:
        if "unchanged" in part:
            kept = messages[part["position"] : part["position"] + part["unchanged"]]
            rebuilt_after += kept
            rebuilt_before.update(enumerate(kept, part["position"]))
        else:
            rebuilt_after += part["after"]
            rebuilt_before.update(enumerate(part["before"], part["position"]))
    assert shown["complete"]
    assert rebuilt_after == sent
    assert [message for _, message in sorted(rebuilt_before.items())] == messages
    assert sum(part.get("summary", False) for part in shown["changes"]) == 1


async def _changes(store: Path, record: RequestRecord) -> dict[str, Any]:
    opened = open_store(f"sqlite:///{store}")
    try:
        prompt = await read_prompt(Archive(opened), record)
    finally:
        await opened.aclose()
    assert prompt is not None
    shown: dict[str, Any] = json.loads(msgspec.json.encode(diff_json(record.id, prompt)))
    return shown
