"""Count finished requests.

A metric of prometheus_client takes a lock, and with several workers a write to a shared file, for each change. So the
sink adds to plain numbers, and the event loop passes them on ten times per second.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from functools import cache
from typing import Any

from prometheus_client import Counter, Histogram

from proxy.telemetry.metrics import (
    ERRORS,
    OVERFLOWS,
    OVERHEAD,
    REQUESTS,
    RETRIES,
    SIZE_BEFORE,
    SIZE_SENT,
    SUMMARY,
    SUMMARY_TOKENS,
    TOKENS_BEFORE,
    TOKENS_REMOVED,
    TOKENS_SENT,
    UPSTREAM,
)
from proxy.telemetry.record import ACCEPTED, CONTINUED, OVERFLOW, RequestRecord

FLUSH_SECONDS = 0.1
"""Seconds until a finished request is in the metrics. A worker that is killed loses the requests of that time."""

NONE = "-"
"""The value of a label without a name, such as the team of a caller without a team."""

_CLASSES = ("-", "1xx", "2xx", "3xx", "4xx", "5xx")


class _Count:
    """An amount to add to a counter."""

    __slots__ = ("_child", "amount")

    def __init__(self, metric: Counter, *labels: str) -> None:
        self._child = metric.labels(*labels)
        self.amount = 0

    def flush(self) -> None:
        if self.amount:
            self._child.inc(self.amount)
            self.amount = 0


class _Observations:
    """Observations to add to a histogram."""

    __slots__ = ("_bounds", "_child", "_counts", "_sum")

    def __init__(self, metric: Histogram, *labels: str) -> None:
        # The public `observe` adds one value at a time, and locks for each.
        self._child: Any = metric.labels(*labels)
        self._bounds: list[float] = self._child._upper_bounds
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def flush(self) -> None:
        for index, count in enumerate(self._counts):
            if count:
                self._child._buckets[index].inc(count)
                self._counts[index] = 0
        if self._sum:
            self._child._sum.inc(self._sum)
            self._sum = 0.0


class RequestMetrics:
    """The metrics of finished requests and summary calls. ``add`` is a sink of the recorder."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._kept: list[_Count | _Observations] = []
        # Each cache has an entry per combination of configured names.
        self._count = cache(self._new_count)
        self._observations = cache(self._new_observations)
        self._of = cache(self._new_request)

    def _new_count(self, metric: Counter, *labels: str) -> _Count:
        found = _Count(metric, *labels)
        self._kept.append(found)
        return found

    def _new_observations(self, metric: Histogram, *labels: str) -> _Observations:
        found = _Observations(metric, *labels)
        self._kept.append(found)
        return found

    def _new_request(
        self, outcome: str, team: str | None, policy: str | None, upstream: str | None, api: str, status: str
    ) -> tuple[_Count, _Observations]:
        labels = (outcome, team or NONE, policy or NONE, upstream or NONE, api, status)
        return self._count(REQUESTS, *labels), self._observations(OVERHEAD, api)

    def add(self, record: RequestRecord) -> None:
        """Count a finished record."""
        if record.kind == "summary":
            self._add_summary(record)
        else:
            self._add_request(record)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_SECONDS, self.flush)

    def _add_request(self, record: RequestRecord) -> None:
        outcome = "client_left" if record.status == 499 else record.verdict
        status = _CLASSES[min(record.status // 100, 5)]
        requests, overhead = self._of(outcome, record.team, record.policy, record.upstream, record.api, status)
        requests.amount += 1
        if record.before is not None:
            self._add_tokens(record, record.before)
        calls = record.calls
        if calls:
            upstream, waited = record.upstream or NONE, 0.0
            times = self._observations(UPSTREAM, upstream)
            for call in calls:
                waited += call.ms
                if call.status is not None:
                    times.add(call.ms / 1000)
            if len(calls) > 1 or calls[0].result == OVERFLOW:
                self._add_retries([call.result for call in calls if call.result != CONTINUED], upstream)
            phases = record.phases
            if "first_byte" in phases:
                own = phases["first_byte"] - phases.get("body", 0.0) - waited
                # A heartbeat begins a stream before the upstream's response, so the difference means nothing.
                if own >= 0:
                    overhead.add(own / 1000)
        if record.error is not None:
            self._count(ERRORS, record.error, record.upstream or NONE).amount += 1

    def _add_retries(self, results: list[str], upstream: str) -> None:
        for cause in results[:-1]:
            self._count(RETRIES, cause, upstream).amount += 1
        if results[-1] == OVERFLOW:
            self._count(OVERFLOWS, "returned", upstream).amount += 1
        elif OVERFLOW in results and results[-1] == ACCEPTED:
            self._count(OVERFLOWS, "recovered", upstream).amount += 1

    def _add_tokens(self, record: RequestRecord, before: int) -> None:
        policy = record.policy or NONE
        place = record.team or NONE, policy
        sent = before if record.sent is None else record.sent
        self._count(TOKENS_BEFORE, *place).amount += before
        self._count(TOKENS_SENT, *place).amount += sent
        self._observations(SIZE_BEFORE, policy).add(before)
        self._observations(SIZE_SENT, policy).add(sent)
        # A bound on messages can replace a conversation with a longer summary.
        if record.verdict == "compacted" and sent < before:
            self._count(TOKENS_REMOVED, *place).amount += before - sent

    def _add_summary(self, record: RequestRecord) -> None:
        upstream = record.upstream or NONE
        self._observations(SUMMARY, upstream).add(record.phases.get("total", 0.0) / 1000)
        if record.usage is not None:
            place = record.team or NONE, record.policy or NONE, upstream
            self._count(SUMMARY_TOKENS, *place, "input").amount += record.usage.input or 0
            self._count(SUMMARY_TOKENS, *place, "output").amount += record.usage.output or 0

    def flush(self) -> None:
        """Pass the numbers on. Call it on the event loop."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for kept in self._kept:
            kept.flush()

    async def aclose(self) -> None:
        """Pass the last numbers on."""
        self.flush()
