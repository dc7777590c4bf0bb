"""Counters for Prometheus. Labels take few values: never a model, a team or a key."""

from __future__ import annotations

import asyncio
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, generate_latest

REGISTRY = CollectorRegistry()

REQUESTS = Counter("compaction_requests", "Chat completions, by what was done to them.", ["outcome"], registry=REGISTRY)
TOKENS_REMOVED = Counter("compaction_tokens_removed", "Input tokens taken off requests.", registry=REGISTRY)
SUMMARIES = Counter("compaction_summaries", "Summaries, by how they came out.", ["outcome"], registry=REGISTRY)
ARCHIVED = Counter(
    "compaction_archive_entries", "Entries of the archive, by what became of them.", ["outcome"], registry=REGISTRY
)
BREAKER = Counter(
    "compaction_summary_breaker", "Summary models left alone, and asked again.", ["change"], registry=REGISTRY
)
GIVEN_UP = Counter(
    "compaction_summaries_given_up", "Prefixes for which no summary will be asked for any more.", registry=REGISTRY
)
STORE_FAILURES = Counter(
    "compaction_store_failures",
    "Reads and writes that the store failed or was too slow for.",
    ["what"],
    registry=REGISTRY,
)
STORE_BREAKER = Counter(
    "compaction_store_breaker", "The store left alone, and asked again.", ["what", "change"], registry=REGISTRY
)
STORE_REMOVED = Counter(
    "compaction_store_removed", "Entries removed from the store in its upkeep.", ["reason"], registry=REGISTRY
)
STORE_UNREADABLE = Counter(
    "compaction_store_undecryptable", "Entries that could not be decrypted, and count as absent.", registry=REGISTRY
)
RELOADS = Counter(
    "compaction_configuration_reloads",
    "Changed configurations, by what became of them.",
    ["outcome"],
    registry=REGISTRY,
)
RETRIES = Counter("compaction_retries", "Requests sent again after an overflow.", registry=REGISTRY)

REFUSED = Counter("compaction_refusals", "Requests that were turned away, by reason.", ["reason"], registry=REGISTRY)

SILENT = Counter(
    "compaction_silent_overflows",
    "Answers that show that the prompt, or the output with it, did not fit, though nothing was refused.",
    registry=REGISTRY,
)

TASKS = Gauge("compaction_tasks", "Tasks of the event loop.", registry=REGISTRY)
ProcessCollector(registry=REGISTRY)
"""Memory, CPU and open files of the process, under Prometheus' own names."""


@cache
def requests(outcome: str) -> Counter:
    """The counter of requests with an outcome, looked up by its label once."""
    return REQUESTS.labels(outcome=outcome)


@cache
def refused(reason: str) -> Counter:
    """The counter of refusals for a reason: key, rate, concurrency, overload, memory."""
    return REFUSED.labels(reason=reason)


def exposition() -> bytes:
    """All counters in Prometheus' text format. Called on the event loop, whose tasks are counted."""
    TASKS.set(len(asyncio.all_tasks()))
    return generate_latest(REGISTRY)
