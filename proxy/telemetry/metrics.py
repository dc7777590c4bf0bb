"""Prometheus metrics.

The values of labels come from the configuration (teams, policies, upstreams) or from the code, never from a client.
"""

from __future__ import annotations

from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

# They would double the number of series, and several workers have none.
disable_created_metrics()  # type: ignore[no-untyped-call]

REGISTRY = CollectorRegistry()

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5, 30)
_LONG_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKENS = (1_000, 4_000, 8_000, 16_000, 32_000, 64_000, 128_000, 200_000, 400_000, 1_000_000)

REQUESTS = Counter(
    "compaction_requests",
    "Requests by outcome.",
    ["outcome", "team", "policy", "upstream", "api", "status"],
    registry=REGISTRY,
)
TOKENS_BEFORE = Counter(
    "compaction_tokens_before", "Input tokens of requests as received.", ["team", "policy"], registry=REGISTRY
)
TOKENS_SENT = Counter(
    "compaction_tokens_sent", "Input tokens of requests as sent.", ["team", "policy"], registry=REGISTRY
)
TOKENS_REMOVED = Counter(
    "compaction_tokens_removed", "Input tokens removed from requests.", ["team", "policy"], registry=REGISTRY
)
SUMMARY_TOKENS = Counter(
    "compaction_summaries_tokens",
    "Tokens that summary models reported.",
    ["team", "policy", "upstream", "direction"],
    registry=REGISTRY,
)
ERRORS = Counter("compaction_errors", "Requests that failed, by error code.", ["code", "upstream"], registry=REGISTRY)
OVERHEAD = Histogram(
    "compaction_overhead_seconds",
    "Time until the response's first byte, without the body's arrival and the upstream.",
    ["api"],
    buckets=_SECONDS,
    registry=REGISTRY,
)
UPSTREAM = Histogram(
    "compaction_upstream_seconds",
    "Time until an upstream's response started, by attempt.",
    ["upstream"],
    buckets=_LONG_SECONDS,
    registry=REGISTRY,
)
SUMMARY = Histogram(
    "compaction_summaries_seconds",
    "Time of calls to summary models.",
    ["upstream"],
    buckets=_LONG_SECONDS,
    registry=REGISTRY,
)
SIZE_BEFORE = Histogram(
    "compaction_request_before_tokens",
    "Input tokens of a request as received.",
    ["policy"],
    buckets=_TOKENS,
    registry=REGISTRY,
)
SIZE_SENT = Histogram(
    "compaction_request_sent_tokens",
    "Input tokens of a request as sent.",
    ["policy"],
    buckets=_TOKENS,
    registry=REGISTRY,
)
SUMMARIES = Counter("compaction_summaries", "Summaries by outcome.", ["outcome"], registry=REGISTRY)
ARCHIVED = Counter("compaction_archive_entries", "Archive entries by outcome.", ["outcome"], registry=REGISTRY)
RECALLS = Counter("compaction_recalls", "Calls to read archived messages, by outcome.", ["outcome"], registry=REGISTRY)
BREAKER = Counter(
    "compaction_summaries_breaker",
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
STORE_WAITING = Gauge(
    "compaction_store_waiting",
    "Entries that wait to be written to the store.",
    ["kind"],
    registry=REGISTRY,
    multiprocess_mode="livesum",
)
RECORDS = Counter("compaction_records", "Records of requests by outcome.", ["outcome"], registry=REGISTRY)
RELOADS = Counter(
    "compaction_configuration_reloads",
    "Configuration reloads by outcome.",
    ["outcome"],
    registry=REGISTRY,
)
RETRIES = Counter("compaction_retries", "Attempts after the first, by cause.", ["cause", "upstream"], registry=REGISTRY)

OVERFLOWS = Counter(
    "compaction_overflows",
    "Requests that the upstream refused as too long: answered after a retry, or returned to the client.",
    ["outcome", "upstream"],
    registry=REGISTRY,
)

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
    multiprocess_mode="livemostrecent",
)

REQUESTS_IN_FLIGHT = Gauge(
    "compaction_requests_in_flight",
    "Requests that the proxy serves now. A stream counts until it ends.",
    registry=REGISTRY,
    multiprocess_mode="livesum",
)
TASKS = Gauge("compaction_tasks", "Tasks on the event loop.", registry=REGISTRY, multiprocess_mode="livesum")


@cache
def refused(reason: str) -> Counter:
    """Return the counter of rejected requests for a reason: key, rate, concurrency, budget, overload, memory, store."""
    return REFUSED.labels(reason=reason)
