"""Test that freed memory returns to the system."""

import asyncio
import threading
from pathlib import Path

import psutil
import pytest

from proxy.server import maintenance
from proxy.server.maintenance import Maintenance, malloc_trim
from proxy.store import open_store

PIECE = 60_000
"""Bytes: below what the C library takes from the system piece by piece."""

PIECES = 1_500


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


@pytest.mark.skipif(maintenance._malloc_trim() is None, reason="this C library gives back what it wants to")
def test_what_was_freed_is_given_back() -> None:
    before = resident()
    pieces = [b"x" * (PIECE + number) for number in range(PIECES)]
    last = pieces.pop()  # The last piece follows all others, so the C library can't simply truncate the heap.
    held = resident()
    assert held - before > 0.8 * PIECE * PIECES
    pieces.clear()
    malloc_trim()
    assert resident() - before < 0.2 * PIECE * PIECES
    assert last


def test_it_is_done_now_and_then_while_the_proxy_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = threading.Event()
    monkeypatch.setattr("proxy.server.maintenance.malloc_trim", given.set)

    async def test() -> None:
        store = open_store(f"sqlite:///{tmp_path}/store.db")
        upkeep = Maintenance(store, [])
        upkeep.start()
        assert await asyncio.to_thread(given.wait, 10)
        await upkeep.aclose()
        await store.aclose()

    asyncio.run(test())
