"""Prometheus metrics. Labels have few values: never a model, a team, or a key."""

from __future__ import annotations

import asyncio
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, generate_latest

REGISTRY = CollectorRegistry()

REQUESTS = Counter("compaction_requests", "Requests by outcome.", ["outcome"], registry=REGISTRY)
TOKENS_REMOVED = Counter("compaction_tokens_removed", "Input tokens removed from requests.", registry=REGISTRY)
SUMMARIES = Counter("compaction_summaries", "Summaries by outcome.", ["outcome"], registry=REGISTRY)
ARCHIVED = Counter("compaction_archive_entries", "Archive entries by outcome.", ["outcome"], registry=REGISTRY)
BREAKER = Counter(
    "compaction_summary_breaker",
    "Times that the circuit breaker of a summary model opened or closed.",
    ["change"],
    registry=REGISTRY,
)
GIVEN_UP = Counter(
    "compaction_summaries_given_up", "Prefixes for which the proxy stopped requesting a summary.", registry=REGISTRY
)
STORE_FAILURES = Counter(
    "compaction_store_failures",
    "Store reads and writes that failed or timed out.",
    ["what"],
    registry=REGISTRY,
)
STORE_BREAKER = Counter(
    "compaction_store_breaker",
    "Times that the circuit breaker of the store opened or closed.",
    ["what", "change"],
    registry=REGISTRY,
)
STORE_REMOVED = Counter(
    "compaction_store_removed", "Entries that maintenance removed from the store.", ["reason"], registry=REGISTRY
)
STORE_UNREADABLE = Counter(
    "compaction_store_undecryptable", "Entries that the proxy can't decrypt. They count as missing.", registry=REGISTRY
)
RECORDS = Counter("compaction_records", "Records of requests by outcome.", ["outcome"], registry=REGISTRY)
RELOADS = Counter(
    "compaction_configuration_reloads",
    "Configuration reloads by outcome.",
    ["outcome"],
    registry=REGISTRY,
)
RETRIES = Counter("compaction_retries", "Requests retried after an overflow.", registry=REGISTRY)

REFUSED = Counter("compaction_refusals", "Rejected requests by reason.", ["reason"], registry=REGISTRY)

SILENT = Counter(
    "compaction_silent_overflows",
    "Successful answers which show that the prompt didn't fit, alone or with the output.",
    registry=REGISTRY,
)

BUDGET_REMAINING = Gauge(
    "compaction_budget_remaining",
    "The rest of a team's budget, in tokens or US dollars.",
    ["team", "unit"],
    registry=REGISTRY,
)

TASKS = Gauge("compaction_tasks", "Tasks on the event loop.", registry=REGISTRY)
ProcessCollector(registry=REGISTRY)
"""Memory, CPU, and open files of the process, under Prometheus' standard names."""


@cache
def requests(outcome: str) -> Counter:
    """Return the counter of requests with an outcome. Looks up each label once."""
    return REQUESTS.labels(outcome=outcome)


@cache
def refused(reason: str) -> Counter:
    """Return the counter of rejected requests for a reason: key, rate, concurrency, budget, overload, memory."""
    return REFUSED.labels(reason=reason)


def exposition() -> bytes:
    """Return all metrics in Prometheus' text format. Call it on the event loop, whose tasks it counts."""
    TASKS.set(len(asyncio.all_tasks()))
    return generate_latest(REGISTRY)
