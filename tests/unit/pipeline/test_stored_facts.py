"""The stored facts about messages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import pytest
import structlog.testing

from proxy.compaction.turn import Facts
from proxy.dialects.chat.counting import ChatCounter
from proxy.dialects.counting import Counter as AnyCounter
from proxy.dialects.messages.counting import MessagesCounter
from proxy.dialects.responses.counting import ResponsesCounter
from proxy.limits.profiles import Profile
from proxy.pipeline import stored_facts
from proxy.pipeline.facts_cache import FactsCache
from proxy.pipeline.stored_facts import LEAST_BYTES, PARTS, StoredFacts, decoded, encoded
from proxy.store import Entry, StoreFailed, tenant_cache
from proxy.store.interface import UNSTORED_TENANT
from tests.kit.engine import Plain

PICTURE = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
CALLS = [{"id": f"c{n}", "type": "function", "function": {"name": "look", "arguments": "{}"}} for n in range(2)]
CHAT: Sequence[dict[str, Any]] = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "What is this?"}, PICTURE]},
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "c0", "content": "読み取り"},
    {"role": "tool", "tool_call_id": "c1", "content": "read"},
    {"role": "assistant", "content": ""},
    {"role": "poet", "content": "é"},
    {"role": "user", "content": "x" * LEAST_BYTES},
)
MESSAGES = (
    {"role": "user", "content": "What is this?"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "a" * LEAST_BYTES}]},
)
ITEMS = (
    {"role": "user", "content": "What is this?"},
    {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "a" * LEAST_BYTES},
)
ESCAPING = Profile("m", escapes=True)


def raw(units: Sequence[dict[str, Any]]) -> list[bytes]:
    return [json.dumps(unit).encode() for unit in units]


async def facts(raws: Sequence[bytes], counter: AnyCounter, store: Plain, tenant: str = "team:a") -> list[Any]:
    """Return what a new process finds out about a conversation."""
    stored = StoredFacts(store)
    cache = FactsCache(stored)
    try:
        return [turn.facts for turn in await cache.turns(raws, counter, tenant, shared=True)]
    finally:
        await stored.aclose()
        cache.close()


@pytest.mark.parametrize(
    ("counter", "units"),
    [
        (ChatCounter(ESCAPING), CHAT),
        (ChatCounter(Profile("m", token_ratio=1.1)), CHAT),
        (MessagesCounter(Profile("claude-sonnet-4-5")), MESSAGES),
        (ResponsesCounter(Profile("m")), ITEMS),
    ],
)
def test_another_process_gets_the_same_facts(
    counter: AnyCounter, units: Sequence[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        store, raws = Plain(), raw(units)
        first = await facts(raws, counter, store)
        ((tenant, kind, _),) = store.entries
        assert (tenant, kind) == ("team:a", stored_facts.KIND)
        monkeypatch.setattr(type(counter.format), "read", lambda *_: pytest.fail("a message was read again"))
        assert await facts(raws, counter, store) == first

    asyncio.run(check())


def test_all_facts_are_stored() -> None:
    """If this fails, add the new fact to ``_Stored``, and increase ``FORMAT``."""
    derived = {"forms", "names", "pinned", "parallel", "one_of_several", "noted", "loads", "uses", "failed", "outlook"}
    assert {one.name for one in fields(Facts)} - derived == {*stored_facts._Stored.__struct_fields__} - {
        "key",
        "several",
    }


def test_only_the_same_tenant_counter_version_and_format_share_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        store, raws = Plain(), raw(CHAT)
        counter = ChatCounter(ESCAPING)
        await facts(raws, counter, store)
        await facts(raws, counter, store, "team:b")
        await facts(raws, ChatCounter(Profile("m", token_ratio=1.3)), store)
        monkeypatch.setattr(stored_facts, "FORMAT", "0")
        await facts(raws, counter, store)
        monkeypatch.setattr(stored_facts, "__version__", "0")
        await facts(raws, counter, store)
        assert len(store.entries) == 5
        assert len({key for _, _, key in store.entries}) == 4

    asyncio.run(check())


def test_agents_with_the_same_task_have_entries_of_their_own() -> None:
    stored, counter = StoredFacts(Plain()), ChatCounter(ESCAPING)
    first, other = raw(CHAT), raw([*CHAT[:2], {"role": "assistant", "content": "Let me see."}, *CHAT[3:]])
    assert stored.place(first, counter, "team:a") == stored.place([*first, *raw(CHAT[-1:])], counter, "team:a")
    assert stored.place(first, counter, "team:a") != stored.place(other, counter, "team:a")


def test_nothing_is_stored_for_callers_without_a_tenant() -> None:
    store = Plain()
    asyncio.run(facts(raw(CHAT), ChatCounter(ESCAPING), store, UNSTORED_TENANT))
    assert not store.entries


def test_a_store_that_fails_or_hangs_delays_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_cache, "STUCK_SECONDS", 0.05)
    monkeypatch.setattr(tenant_cache, "CLOSING_SECONDS", 0.05)

    class Failing(Plain):
        async def get_many(self, tenant: str, kind: str, keys: Sequence[str]) -> dict[str, bytes]:
            raise StoreFailed("out of order")

        async def put_many(self, entries: Sequence[Entry]) -> None:
            raise StoreFailed("out of order")

    class Hanging(Plain):
        async def get_many(self, tenant: str, kind: str, keys: Sequence[str]) -> dict[str, bytes]:
            await asyncio.Event().wait()
            raise AssertionError

    async def check() -> None:
        whole = await facts(raw(CHAT), ChatCounter(ESCAPING), Plain())
        with structlog.testing.capture_logs() as logs:
            assert await facts(raw(CHAT), ChatCounter(ESCAPING), Failing()) == whole
        assert {line["event"] for line in logs} == {"shared.not_written"}
        assert await facts(raw(CHAT), ChatCounter(ESCAPING), Hanging()) == whole

    asyncio.run(check())


def test_a_message_that_an_entry_does_not_have_is_unknown() -> None:
    raws = raw(CHAT)
    known = [ChatCounter(ESCAPING).format.read(one) for one in raws[:2]]
    entry = encoded(raws[:2], known)
    assert decoded(entry, raws) == [*known, *[None] * (len(raws) - 2)]
    assert encoded(raws[:2], known) != entry  # the seed is another one
    for damaged in (b"", entry[:-1], b"\xc0", entry.replace(b"user", b"none")):
        assert decoded(damaged, raws) == [None] * len(raws)


def test_an_entry_is_written_when_enough_was_counted() -> None:
    async def check() -> None:
        store = Plain()
        stored = StoredFacts(store)
        place = stored.place(raw(CHAT), ChatCounter(ESCAPING), "team:a")
        assert place is not None
        assert not stored.due(place, LEAST_BYTES - 1, 0)
        assert not stored.due(place, 1, LEAST_BYTES * PARTS + PARTS)
        assert stored.due(place, 0, LEAST_BYTES * PARTS)
        stored.write(place, b"entry")
        assert not stored.due(place, 0, 0)
        stored.write(place, bytes(stored_facts.LARGEST + 1))
        await stored.aclose()
        assert list(store.entries.values()) == [b"entry"]
        assert stored.forget(lambda tenant: tenant == "team:b") == set()
        assert stored.forget(lambda tenant: tenant == "team:a") == {"team:a"}

    asyncio.run(check())
