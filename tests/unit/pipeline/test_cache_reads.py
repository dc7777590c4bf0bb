"""Test the memory of conversations that a prompt cache serves."""

from __future__ import annotations

from proxy.pipeline.cache_reads import CACHE_SECONDS, CacheReads
from proxy.telemetry.record import Usage


def test_only_the_last_response_counts_and_not_for_long() -> None:
    now = [0.0]
    reads = CacheReads(lambda: now[0])
    assert not reads.served(("a", "1"))
    reads.note(("a", "1"), Usage(2_000, 10, 1_024))
    assert reads.served(("a", "1"))
    assert not reads.served(("b", "1"))
    now[0] = CACHE_SECONDS + 1
    assert not reads.served(("a", "1"))
    reads.note(("a", "1"), Usage(2_000, 10, 1_024))
    reads.note(("a", "1"), Usage(2_000, 10, 0))
    assert not reads.served(("a", "1"))
