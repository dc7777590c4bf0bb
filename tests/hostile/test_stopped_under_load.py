"""R14: a signal that stops the proxy under load loses none of the messages that compaction removed."""

import asyncio
import base64
import contextlib
import itertools
import json
import os
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from proxy.store import ManagedStore, open_store
from proxy.store.archive import KIND
from tests.kit.client import CHAT, ask
from tests.kit.program import Program, program, write_config
from tests.kit.raw_upstream import Arrived, RawUpstream, Step, answer
from tests.kit.waiting import until

KEY = b"k" * 32
HANDLE = re.compile(rb"archive as ([0-9a-f]{20})")
TOOL = {"type": "function", "function": {"name": "own", "parameters": {"type": "object", "properties": {}}}}
CHEAP = {"trigger": {"fraction": 0.3}, "keep": {"fraction": 0.1}}
POLICY = {
    "evict_results": {**CHEAP, "max_tokens": 60},
    "truncate_args": {**CHEAP, "max_length": 60, "tools": ["own"]},
}
ANSWER = {
    "id": "c", "object": "chat.completion", "created": 1, "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 900, "completion_tokens": 100, "total_tokens": 1000},
}  # fmt: skip
CLIENTS, CONVERSATIONS = 8, 16


def conversation(name: str, rounds: int) -> list[dict[str, Any]]:
    """Return an agent's conversation, whose calls and results are long enough to be shortened."""
    messages: list[dict[str, Any]] = []
    for number in range(rounds):
        text = f"{name} {number} " + "line of output " * 40
        function = {"name": "own", "arguments": json.dumps({"text": text})}
        call = {"id": f"c{number}", "type": "function", "function": function}
        messages += [
            {"role": "user", "content": "next"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{number}", "content": f"{text}end"},
        ]
    return [*messages, {"role": "user", "content": "go"}]


class Load:
    """Clients that send conversations at once. ``ids`` are those of the archive entries that prompts point to."""

    def __init__(self) -> None:
        self.ids: set[str] = set()
        self.failed: list[str] = []

    def upstream(self, arrived: Arrived) -> Iterator[Step]:
        self.ids |= {found.decode() for found in HANDLE.findall(arrived.body)}
        yield answer(json.dumps(ANSWER).encode())

    def run(self, url: str, conversations: int) -> None:
        numbers = itertools.count()

        def client() -> None:
            while (number := next(numbers)) < conversations:
                for rounds in (25, 30, 35):
                    body = {"model": "m", "messages": conversation(f"talk{number}", rounds), "tools": [TOOL]}
                    got = ask(url, CHAT, json.dumps(body).encode())
                    if got.status != 200:
                        self.failed.append(f"{got.status} {got.body[:200]!r}")

        threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


class Stored:
    """The store with the archive."""

    def __init__(self, settings: dict[str, Any], store: ManagedStore) -> None:
        self.settings = settings
        self.store = store

    def missing(self, ids: Sequence[str]) -> list[str]:
        async def missing() -> list[str]:
            (tenant,) = {entry.tenant for entry in await self.store.entries(KIND)} or {""}
            found = await self.store.get_many(tenant, KIND, ids)
            await self.store.aclose()
            return [id for id in ids if id not in found]

        return asyncio.run(missing())


@contextlib.contextmanager
def stored(kind: str, folder: Path, request: pytest.FixtureRequest) -> Iterator[Stored]:
    section: dict[str, Any] = {"encryption": {"key": base64.b64encode(KEY).decode()}} if "sealed" in kind else {}
    keys = (KEY,) if section else ()
    url = request.getfixturevalue("redis").url if kind.startswith("redis") else f"sqlite:///{folder}/store.db"
    yield Stored({"store": {"url": url, **section}}, open_store(url, keys))


def metric(running: Program, sample: str) -> float:
    body = ask(running.url, "/metrics", None).body.decode()
    found = [line.rpartition(" ")[2] for line in body.splitlines() if line.startswith(f"{sample} ")]
    return float(found[0]) if found else 0.0


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "signal"),
    [("redis", "terminated"), ("sqlite", "killed")]
    + [
        pytest.param(kind, "terminated", marks=pytest.mark.full)
        for kind in ("sqlite", "sqlite, sealed", "redis, sealed")
    ],
)
def test_every_entry_that_a_sent_prompt_points_to_is_stored(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str, signal: str
) -> None:
    load = Load()
    with stored(kind, tmp_path, request) as where, RawUpstream(load.upstream) as upstream:  # type: ignore[arg-type]
        settings = {
            **where.settings,
            "upstreams": {"main": {"base_url": f"{upstream.url}/v1", "api_key": "sk-upstream", "ask_limits": False}},
            "models": [{"match": "*", "upstream": "main", "profile": {"context_window": 16_000}}],
            "policies": {"default": POLICY},
        }
        with program(write_config(settings, tmp_path), env=dict(os.environ)) as running:
            load.run(running.url, CONVERSATIONS)
            assert load.failed == []
            assert len(load.ids) > 30 * CONVERSATIONS
            assert metric(running, 'compaction_archive_entries_total{outcome="skipped"}') == 0
            if signal == "terminated":
                running.process.terminate()
            else:
                # A process that is killed may lose the entries of the last two seconds.
                assert until(lambda: metric(running, 'compaction_store_waiting{kind="archive.2"}') == 0)
                running.process.kill()
            running.process.wait(60)
        assert where.missing(sorted(load.ids)) == []
