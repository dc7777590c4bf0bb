"""OpenTelemetry metrics of calls to models, derived from finished records.

The labels are names from the configuration. A model that the configuration doesn't name has no label.

The SDK's histograms take 30 µs per request, because they copy, sort, and check all labels for each value. So the sink
adds to plain numbers.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence, Set

from opentelemetry.sdk.metrics.export import AggregationTemporality, Histogram, HistogramDataPoint, Metric

from proxy.telemetry.operations import Attributes, FindUpstream, Upstream, attributes_of, operations
from proxy.telemetry.record import RequestRecord

DURATION, USAGE = "gen_ai.client.operation.duration", "gen_ai.client.token.usage"

# The conventions' buckets.
_SECONDS = tuple(0.01 * 2**power for power in range(14))
_TOKENS = tuple(float(4**power) for power in range(14))

MOST_SERIES = 2_000
"""Series of each histogram. Values of further ones don't count. The SDK's default is the same."""

_Key = tuple[str, Upstream | None, str, str | None, str | None, str | None, str | None]


class _Series:
    """The values with the same labels."""

    __slots__ = ("_bounds", "counts", "highest", "labels", "lowest", "sum")

    def __init__(self, labels: Attributes, bounds: Sequence[float]) -> None:
        self.labels = labels
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.lowest, self.highest = math.inf, 0.0

    def add(self, value: float) -> None:
        self.lowest = min(self.lowest, value)
        self.highest = max(self.highest, value)
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value


class OperationMetrics:
    """Histograms of the duration and the tokens of calls to models. ``add`` is a sink of the recorder."""

    def __init__(self, upstreams: FindUpstream, models: Callable[[], Set[str]], *, delta: bool = False) -> None:
        """``models`` returns the configured models. With ``delta``, each collection starts again at zero."""
        self._upstreams = upstreams
        self._models = models
        self._delta = delta
        self._began = time.time_ns()
        # The exporter's thread collects.
        self._lock = threading.Lock()
        self._durations: dict[_Key, _Series] = {}
        self._usages: dict[_Key, _Series] = {}

    def add(self, record: RequestRecord) -> None:
        """Count the calls of a finished record."""
        model, name = record.upstream_model or "", record.upstream or ""
        shared = (name, self._upstreams(name), record.kind, record.team, record.policy)
        named = model if model in self._models() else None
        with self._lock:
            for operation in operations(record):
                seconds = (operation.end - operation.start) / 1e9
                self._add(self._durations, (*shared, named, operation.error), "error.type", _SECONDS, seconds)
                if (usage := operation.usage) is not None:
                    for kind, tokens in (("input", usage.input), ("output", usage.output)):
                        if tokens is not None:
                            self._add(self._usages, (*shared, named, kind), "gen_ai.token.type", _TOKENS, tokens)

    def _add(self, histogram: dict[_Key, _Series], key: _Key, last: str, bounds: Sequence[float], value: float) -> None:
        series = histogram.get(key)
        if series is None:
            if len(histogram) >= MOST_SERIES:
                return
            series = histogram[key] = _Series(_labels(key, last), bounds)
        series.add(value)

    def collect(self) -> list[Metric]:
        """Return the histograms for the SDK's exporter."""
        with self._lock:
            now = time.time_ns()
            metrics = [
                self._metric(DURATION, "s", "Duration of calls to models.", self._durations, _SECONDS, now),
                self._metric(USAGE, "{token}", "Tokens that calls to models used.", self._usages, _TOKENS, now),
            ]
            if self._delta:
                self._began = now
                self._durations.clear()
                self._usages.clear()
        return [metric for metric in metrics if metric.data.data_points]

    def _metric(
        self, name: str, unit: str, text: str, histogram: dict[_Key, _Series], bounds: Sequence[float], now: int
    ) -> Metric:
        points = [
            HistogramDataPoint(
                attributes=series.labels,
                start_time_unix_nano=self._began,
                time_unix_nano=now,
                count=sum(series.counts),
                sum=series.sum,
                bucket_counts=list(series.counts),
                explicit_bounds=bounds,
                min=series.lowest,
                max=series.highest,
            )
            for series in histogram.values()
        ]
        temporality = AggregationTemporality.DELTA if self._delta else AggregationTemporality.CUMULATIVE
        return Metric(name, text, unit, Histogram(points, temporality))


def _labels(key: _Key, last: str) -> Attributes:
    name, upstream, kind, team, policy, model, value = key
    named = {"compaction.team": team, "compaction.policy": policy, "gen_ai.request.model": model, last: value}
    return {
        **attributes_of(name, upstream),
        "compaction.kind": kind,
        **{label: value for label, value in named.items() if value is not None},
    }
