"""Counters for Prometheus. Labels take few values: never a model, a team or a key."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, generate_latest

REGISTRY = CollectorRegistry()

REQUESTS = Counter("compaction_requests", "Chat completions, by what was done to them.", ["outcome"], registry=REGISTRY)
TOKENS_REMOVED = Counter("compaction_tokens_removed", "Input tokens taken off requests.", registry=REGISTRY)
SUMMARIES = Counter("compaction_summaries", "Summaries, by how they came out.", ["outcome"], registry=REGISTRY)
RETRIES = Counter("compaction_retries", "Requests sent again after an overflow.", registry=REGISTRY)


def exposition() -> bytes:
    """All counters in Prometheus' text format."""
    return generate_latest(REGISTRY)
