"""Forgetting leaves nothing of a tenant in the files."""

import os
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from proxy.store import StoreFailed
from proxy.store.forgetting import digest, forget, forgotten, remove
from proxy.store.sqlite import SqliteStore
from tests.kit.stores import being_read, files_with, with_store

CANARY, GONE = b"CANARY-7f3a9b", b"GONE-1c8e02"


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_left_of_a_tenant_that_is_forgotten(tmp_path: Path, seed: int) -> None:
    """Entries have many sizes, in an order that makes rows move, some of them twice."""

    async def test(store: SqliteStore) -> None:
        other, chance = SqliteStore(tmp_path / "a.db"), random.Random(seed)
        for _ in range(400):
            tenant = chance.choice(["team:leaving", "team:a", "team:b"])
            size = chance.choice([0, 30, 300, 1000, 3000, 20_000])
            text = CANARY if tenant == "team:leaving" else b"harmless"
            names = chance.choice(["summary", "archive"]), f"k{chance.randrange(200)}"
            await chance.choice([store, other]).put(tenant, *names, text + os.urandom(size) + text, 60)
        assert files_with(tmp_path, CANARY)
        count = {kind: len(await store.entries(kind)) for kind in ("summary", "archive")}
        removed = await forget(store, "team:leaving")
        left = {kind: await other.entries(kind) for kind in ("summary", "archive")}
        assert removed == {kind: count[kind] - len(left[kind]) for kind in count}
        assert min(removed.values()) > 20
        assert {entry.tenant for entries in left.values() for entry in entries} == {"team:a", "team:b"}
        assert files_with(tmp_path, CANARY, b"team:leaving") == []
        assert list(await forgotten(other)) == [digest("team:leaving")]
        assert await forget(store, "team:leaving") == {}
        await other.aclose()
        assert files_with(tmp_path, CANARY, b"team:leaving") == []

    with_store(lambda: SqliteStore(tmp_path / "a.db"), test)
    assert files_with(tmp_path, CANARY, b"team:leaving") == []


@pytest.mark.parametrize("seed", [2, 4, 5])
def test_not_even_a_name_is_left_between_the_rows_of_others(tmp_path: Path, seed: int) -> None:
    """With these seeds, rows move so that a name stays in the file until it is rebuilt."""

    async def test(store: SqliteStore) -> None:
        other, chance = SqliteStore(tmp_path / "a.db"), random.Random(seed)
        for _ in range(600):
            tenant = chance.choice(["team:leaving", "team:a", "team:b"])
            chance.choice([0])  # the seeds were found with this draw
            writer, kind = chance.choice([store, other]), chance.choice(["summary", "archive"])
            await writer.put(tenant, kind, f"k{chance.randrange(2000):064}", b"", 60)
        await forget(store, "team:leaving")
        assert files_with(tmp_path, b"team:leaving") == []
        await other.aclose()

    with_store(lambda: SqliteStore(tmp_path / "a.db"), test)


@pytest.mark.parametrize("work", [forget, remove])
def test_a_file_that_is_read_without_a_pause_fails(tmp_path: Path, work: Callable[..., Awaitable[Any]]) -> None:
    async def test(store: SqliteStore) -> None:
        await store.put("t", "summary", "k", CANARY, 60)
        with being_read(tmp_path / "a.db"), pytest.raises(StoreFailed, match="log"):
            await work(store, "t", patience=0.3)
        await work(store, "t")
        assert files_with(tmp_path, CANARY) == []

    with_store(lambda: SqliteStore(tmp_path / "a.db", busy_seconds=0.05), test)
