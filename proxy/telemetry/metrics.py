"""Prometheus metrics: their definitions, and the counting of finished requests.

The values of labels come from the configuration (teams, policies, upstreams) or from the code, never from a client.
docs/reference/metrics.md is generated from the definitions.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from proxy.telemetry.record import ACCEPTED, CONTINUED, OVERFLOW, RequestRecord

# They would double the number of series, and several workers have none.
disable_created_metrics()  # type: ignore[no-untyped-call]

REGISTRY = CollectorRegistry()


class Definition(NamedTuple):
    """A metric as the reference describes it. ``labels`` are the names of the labels with their possible values."""

    name: str
    labels: Mapping[str, str]
    meaning: str


DEFINITIONS: list[Definition] = []  # all metrics of the proxy, in the order of the reference


def _counter(name: str, text: str, labels: Mapping[str, str] | None = None, *, note: str = "") -> Counter:
    """Define a counter. ``text`` is for Prometheus and the reference, and ``note`` for the reference alone."""
    labels = labels or {}
    DEFINITIONS.append(Definition(f"{name}_total", labels, f"{text} {note}".strip()))
    return Counter(name, text, list(labels), registry=REGISTRY)


def _gauge(
    name: str,
    text: str,
    labels: Mapping[str, str] | None = None,
    *,
    workers: Literal["livesum", "livemostrecent"] = "livesum",
    note: str = "",
) -> Gauge:
    """Define a gauge. ``workers`` is the way to merge the values of several workers."""
    labels = labels or {}
    DEFINITIONS.append(Definition(name, labels, f"{text} {note}".strip()))
    return Gauge(name, text, list(labels), registry=REGISTRY, multiprocess_mode=workers)


def _histogram(
    name: str, text: str, labels: Mapping[str, str], buckets: Sequence[float], *, note: str = ""
) -> Histogram:
    """Define a histogram. Each of its series has a dozen buckets, so it has few labels."""
    meaning = f"Histogram: {text[0].lower()}{text[1:]} {note}".strip()
    DEFINITIONS.append(Definition(name, labels, meaning))
    return Histogram(name, text, list(labels), buckets=buckets, registry=REGISTRY)


_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5, 30)
_LONG_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKENS = (1_000, 4_000, 8_000, 16_000, 32_000, 64_000, 128_000, 200_000, 400_000, 1_000_000)
_SHARES = (0.25, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99, 1)

_NAME = "its name"
_API = "`chat`, `responses`, `messages`, `other`"
_TEAM_AND_POLICY = {"team": _NAME, "policy": _NAME}
_BREAKER_CHANGES = "`opened`, `closed`"
_STORE_OPERATIONS = "`read`, `write`"

REQUESTS = _counter(
    "compaction_requests",
    "Requests by outcome.",
    {
        "outcome": "`none`, `compacted`, `shadow`, `off`, `failed`, `refused`, `client_left`, `unsupported`",
        **_TEAM_AND_POLICY,
        "upstream": _NAME,
        "api": _API,
        "status": "`2xx`, `4xx` and so on",
    },
    note="These are the requests under `/v1`, each once, at its end. `unsupported` counts those on paths that "
    "the proxy only forwards.",
)
TOKENS_BEFORE = _counter(
    "compaction_tokens_before",
    "Input tokens of requests as received.",
    _TEAM_AND_POLICY,
    note="Requests that the proxy didn't count are left out.",
)
TOKENS_SENT = _counter(
    "compaction_tokens_sent", "Input tokens of requests as sent.", _TEAM_AND_POLICY, note="These are the same requests."
)
TOKENS_REMOVED = _counter("compaction_tokens_removed", "Input tokens removed from requests.", _TEAM_AND_POLICY)
SUMMARY_TOKENS = _counter(
    "compaction_summaries_tokens",
    "Tokens that summary models reported.",
    {**_TEAM_AND_POLICY, "upstream": _NAME, "direction": "`input`, `output`"},
)
ERRORS = _counter(
    "compaction_errors",
    "Requests that failed, by error code.",
    {"code": "an error code, or `client_disconnected`", "upstream": _NAME},
)
OVERHEAD = _histogram(
    "compaction_overhead_seconds",
    "Time until the response's first byte, without the body's arrival, summaries, and the upstream.",
    {"team": _NAME, "api": _API},
    _SECONDS,
)
SUMMARY_WAIT = _histogram(
    "compaction_summaries_wait_seconds", "Time that requests waited for summaries.", {"team": _NAME}, _LONG_SECONDS
)
UPSTREAM = _histogram(
    "compaction_upstream_seconds",
    "Time until an upstream's response started, by attempt.",
    {"team": _NAME, "upstream": _NAME},
    _LONG_SECONDS,
)
SUMMARY = _histogram(
    "compaction_summaries_seconds", "Time of calls to summary models.", {"upstream": _NAME}, _LONG_SECONDS
)
SIZE_BEFORE = _histogram(
    "compaction_request_before_tokens", "Input tokens of a request as received.", {"policy": _NAME}, _TOKENS
)
SIZE_SENT = _histogram(
    "compaction_request_sent_tokens", "Input tokens of a request as sent.", {"policy": _NAME}, _TOKENS
)
NAMES_KEPT = _histogram(
    "compaction_names_kept_ratio",
    "Share of the likeliest names in the removed messages that the prompt still has.",
    {"policy": _NAME},
    _SHARES,
    note="Each compacted request counts, with the share at its last checkpoint.",
)
SUMMARIES = _counter(
    "compaction_summaries",
    "Summaries by outcome.",
    {"outcome": "`made`, `failed`, `skipped`, `over_budget`, `digest`"},
)
ARCHIVED = _counter(
    "compaction_archive_entries",
    "Archive entries by outcome.",
    {"outcome": "`written`, `failed`, `skipped`, `dropped`"},
    note="`failed` counts those of each failed write, which the proxy repeats. `skipped` ones found too many waiting. "
    "`dropped` ones were refused by the store, or waited when the process ended.",
)
RECALLS = _counter(
    "compaction_recalls",
    "Calls to read archived messages, by outcome.",
    {"outcome": "`answered`, `mixed` (the client got calls of its own), `failed`"},
)
BREAKER = _counter(
    "compaction_summaries_breaker",
    "Times that the circuit breaker of a summary model opened or closed.",
    {"change": _BREAKER_CHANGES},
)
GIVEN_UP = _counter("compaction_summaries_given_up", "Prefixes for which the proxy stopped requesting a summary.")
STORE_FAILURES = _counter(
    "compaction_store_failures", "Store reads and writes that failed or timed out.", {"what": _STORE_OPERATIONS}
)
STORE_BREAKER = _counter(
    "compaction_store_breaker",
    "Times that the circuit breaker of the store opened or closed.",
    {"what": _STORE_OPERATIONS, "change": _BREAKER_CHANGES},
)
STORE_REMOVED = _counter(
    "compaction_store_removed",
    "Entries that maintenance removed from the store.",
    {"reason": "`expired`, `size`, `unencrypted`, `replaced`"},
)
STORE_UNREADABLE = _counter(
    "compaction_store_undecryptable", "Entries that the proxy can't decrypt. They count as missing."
)
STORE_WAITING = _gauge(
    "compaction_store_waiting",
    "Entries that wait to be written to the store.",
    {"kind": "`archive.2`, `item`, `prompt`, `summary`, `recall`, `limit`, `tenant_ratio`, `background`, `record`"},
    note="Under load, they wait up to two seconds. More means that the store fails or is too slow.",
)
RECORDS = _counter("compaction_records", "Records of requests by outcome.", {"outcome": "`written`, `dropped`"})
LOG_LINES_LOST = _counter(
    "compaction_log_lines_lost", "Log lines that the proxy couldn't write to standard error, and dropped."
)
RELOADS = _counter(
    "compaction_configuration_reloads", "Configuration reloads by outcome.", {"outcome": "`applied`, `refused`"}
)
WORKER_STARTS = _counter("compaction_worker_starts", "Worker processes that started, also in place of one that died.")
RETRIES = _counter(
    "compaction_retries",
    "Attempts after the first, by cause.",
    {"cause": "`overflow`, `reasoning`, `roles`, `tool`, `added`, `empty`", "upstream": _NAME},
    note="Requests that continue a response after a recall don't count.",
)
OVERFLOWS = _counter(
    "compaction_overflows",
    "Requests with an overflow: answered after a retry, or returned to the client.",
    {"outcome": "`recovered`, `returned`", "upstream": _NAME},
    note="`returned` counts stated overflows only. `recovered` also counts those that an empty response showed.",
)
REFUSED = _counter(
    "compaction_refusals",
    "Rejected requests by reason.",
    {"reason": "`key`, `rate`, `concurrency`, `budget`, `overload`, `memory`, `store`, `host`, `origin`"},
)
SILENT = _counter(
    "compaction_silent_overflows",
    "Successful answers to clients which show that the prompt didn't fit, alone or with the output.",
    note="Answers that a retry replaced don't count.",
)
SPENDING_REMAINING = _gauge(
    "compaction_budget_remaining",
    "The rest of a team's budget, in tokens or US dollars.",
    {"team": _NAME, "unit": "`tokens`, `usd`"},
    workers="livemostrecent",
)
REQUESTS_IN_FLIGHT = _gauge(
    "compaction_requests_in_flight",
    "Requests that the proxy serves now. A stream counts until it ends.",
    note="`server.max_concurrent` limits them.",
)


@cache
def refused(reason: str) -> Counter:
    """Return the counter of rejected requests for a reason, one of the label's values."""
    return REFUSED.labels(reason=reason)


NONE = "-"  # the value of a label without a name, such as the team of a caller without a team

_CLASSES = ("-", "1xx", "2xx", "3xx", "4xx", "5xx")


# Finding the series of a metric takes a lock. There is one for each combination of configured names.
@cache
def _count(metric: Counter, *labels: str) -> Counter:
    return metric.labels(*labels)


@cache
def _observations(metric: Histogram, *labels: str) -> Histogram:
    return metric.labels(*labels)


def add(record: RequestRecord) -> None:
    """Count a finished record. This is a sink of the recorder."""
    team, policy, upstream = record.team or NONE, record.policy or NONE, record.upstream or NONE
    calls, usage, before = record.calls, record.usage, record.before
    if record.kind == "summary":
        _observations(SUMMARY, upstream).observe(record.phases.get("total", 0.0) / 1000)
        if usage is not None:
            _count(SUMMARY_TOKENS, team, policy, upstream, "input").inc(usage.input or 0)
            _count(SUMMARY_TOKENS, team, policy, upstream, "output").inc(usage.output or 0)
        return
    outcome = "client_left" if record.status == 499 else record.verdict
    status = _CLASSES[min(record.status // 100, 5)]
    _count(REQUESTS, outcome, team, policy, upstream, record.api, status).inc()
    if before is not None:
        sent = before if record.sent is None else record.sent
        _count(TOKENS_BEFORE, team, policy).inc(before)
        _count(TOKENS_SENT, team, policy).inc(sent)
        _observations(SIZE_BEFORE, policy).observe(before)
        _observations(SIZE_SENT, policy).observe(sent)
        # A bound on messages can replace a conversation with a longer summary.
        if record.verdict == "compacted" and sent < before:
            _count(TOKENS_REMOVED, team, policy).inc(before - sent)
    if (share := record.share_kept) is not None:
        _observations(NAMES_KEPT, policy).observe(share)
    if record.error is not None:
        _count(ERRORS, record.error, upstream).inc()
    if not calls:
        return
    for call in calls:
        if call.status is not None:
            _observations(UPSTREAM, team, upstream).observe(call.ms / 1000)
    if len(calls) > 1 or calls[0].result == OVERFLOW:
        *retried, last = [call.result for call in calls if call.result != CONTINUED]
        for cause in retried:
            _count(RETRIES, cause, upstream).inc()
        if last == OVERFLOW or (OVERFLOW in retried and last == ACCEPTED):
            _count(OVERFLOWS, "returned" if last == OVERFLOW else "recovered", upstream).inc()
    if (spent := record.own_time) is not None:
        _observations(OVERHEAD, team, record.api).observe(spent / 1000)
    if (waited := record.phases.get("summary")) is not None:
        _observations(SUMMARY_WAIT, team).observe(waited / 1000)


FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # the environment variable with the folder. prometheus_client reads it on import.

if FOLDER not in os.environ:
    REGISTRY.register(ProcessCollector(registry=None))


class WorkerSums(Collector):
    """The sums over all workers, including those that ended."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def collect(self) -> Iterable[Metric]:
        # A worker creates each file empty, and then writes its head. prometheus_client's own collector fails then.
        files = [str(file) for file in self._folder.glob("*.db") if file.stat().st_size]
        metrics: Iterable[Metric] = MultiProcessCollector.merge(files)  # type: ignore[no-untyped-call]
        return metrics


def registry() -> CollectorRegistry:
    """Return the metrics of this process. With several workers, return their sums, in a worker and in their parent.

    Workers write their metrics to files in a folder that only their parent creates. The files of a worker that ended
    stay, so counters never decrease.
    """
    folder = os.environ.get(FOLDER)
    if folder is None:
        return REGISTRY
    sums = CollectorRegistry()
    sums.register(WorkerSums(folder))
    return sums


def exposition() -> bytes:
    return generate_latest(registry())
