"""A restarted proxy, or another replica, doesn't count a long conversation again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proxy.dialects import counting
from proxy.pipeline.stored_facts import KIND
from proxy.store import open_store
from proxy.store.interface import Entry
from proxy.tokens import text
from tests.kit.front_door import Front, calling, front, talk

CANARY = "canary-93f1"
WINDOW = 160_000
TALK = [*talk(60, 1_000, CANARY), {"role": "user", "content": f"Is {CANARY} done?"}]
NEXT = [*TALK, {"role": "assistant", "content": "Nearly."}, {"role": "user", "content": "Then go on."}]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return a function that returns the characters counted since its last call."""
    texts: list[int] = []

    def count(encoding: Any, value: str) -> int:
        texts.append(len(value))
        return text.count(encoding, value)

    def taken() -> int:
        total = sum(texts)
        texts.clear()
        return total

    monkeypatch.setattr(counting, "count", count)
    return taken


def before(proxy: Front, messages: list[Any], **caller: Any) -> str:
    """Return the tokens that the proxy counted in a conversation."""
    seen = proxy.ask(messages, **caller)
    assert seen.headers["x-compaction"] == "none"
    return seen.headers["x-compaction-tokens-before"]


def entries(folder: Path) -> list[Entry]:
    async def read() -> list[Entry]:
        store = open_store(f"sqlite:///{folder}/store.db")
        try:
            return await store.entries(KIND)
        finally:
            await store.aclose()

    return asyncio.run(read())


def test_a_restarted_proxy_counts_only_new_messages(tmp_path: Path, counted: Callable[[], int]) -> None:
    with front({"default": {}}, tmp_path, WINDOW) as proxy:
        before(proxy, TALK)
        assert counted() > 100_000
        known = before(proxy, NEXT)
        assert counted() < 1_000

    (entry,) = entries(tmp_path)
    assert CANARY.encode() not in entry.value
    assert entry.seconds <= 86_400

    with front({"default": {}}, tmp_path, WINDOW) as proxy:
        assert before(proxy, NEXT) == known
        assert counted() < 1_000
        # Another tenant gets nothing of it.
        assert before(proxy, NEXT, caller=1) == known
        assert counted() > 100_000
    assert len({entry.tenant for entry in entries(tmp_path)}) == 2


def test_a_damaged_entry_is_replaced(tmp_path: Path, counted: Callable[[], int]) -> None:
    with front({"default": {}}, tmp_path, WINDOW) as proxy:
        known = before(proxy, TALK)
    (entry,) = entries(tmp_path)

    async def damage() -> None:
        store = open_store(f"sqlite:///{tmp_path}/store.db")
        await store.put(entry.tenant, KIND, entry.key, entry.value[:-9], 60)
        await store.aclose()

    asyncio.run(damage())
    counted()
    for damaged in (True, False):
        with front({"default": {}}, tmp_path, WINDOW) as proxy:
            assert before(proxy, TALK) == known
            assert (counted() > 100_000) is damaged


def test_short_conversations_are_not_stored(tmp_path: Path, counted: Callable[[], int]) -> None:
    """They are counted, because their bytes could be more tokens than the window has."""
    short = [
        *talk(3, 1_000),
        calling(("c", "look", {"at": "it"})),
        {"role": "tool", "tool_call_id": "c", "content": ""},
    ]
    with front({"default": {}}, tmp_path, 8_500) as proxy:
        before(proxy, short)
        assert counted() > 5_000
    assert entries(tmp_path) == []
