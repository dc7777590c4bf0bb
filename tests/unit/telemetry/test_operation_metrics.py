"""Test the histograms of calls to models."""

from __future__ import annotations

import pytest

from proxy.config.server import INSTALL

pytest.importorskip("opentelemetry.sdk", reason=f"run: {INSTALL}")

from opentelemetry.sdk.metrics.export import AggregationTemporality, Histogram, Metric

from proxy.telemetry import operations as module
from proxy.telemetry.operations import OperationMetrics
from proxy.telemetry.record import RequestRecord, Usage
from proxy.telemetry.trace_context import Trace


def summary(milliseconds: float = 30.0, model: str = "small", **values: object) -> RequestRecord:
    made = RequestRecord("r", 1.0, "summary", upstream="main", upstream_model=model, status=200)
    made.phases, made.usage = {"total": milliseconds}, Usage(100, 7)
    made.trace = Trace("a" * 32, "b" * 16, sampled=False)
    for name, value in values.items():
        setattr(made, name, value)
    return made


def metrics(*, delta: bool = False) -> OperationMetrics:
    return OperationMetrics(lambda name: ("openai", None), lambda: frozenset({"small"}), delta=delta)


def histogram(metric: Metric) -> Histogram:
    assert isinstance(metric.data, Histogram)
    return metric.data


def test_values_fall_into_buckets_by_labels() -> None:
    found = metrics()
    for record in (summary(10.0), summary(30.0), summary(5_000_000.0), summary(status=500, usage=None, team="search")):
        found.add(record)
    durations, usage = found.collect()
    one, other = histogram(durations).data_points
    assert (one.count, one.min, one.max) == (3, 0.01, 5_000.0)
    assert [index for index, count in enumerate(one.bucket_counts) if count] == [0, 2, 14]
    assert len(one.explicit_bounds) + 1 == len(one.bucket_counts)
    assert other.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "small",
        "compaction.upstream": "main",
        "compaction.kind": "summary",
        "compaction.team": "search",
        "error.type": "500",
    }
    sums = {str((point.attributes or {})["gen_ai.token.type"]): point.sum for point in histogram(usage).data_points}
    assert sums == {"input": 300, "output": 21}
    assert histogram(usage).aggregation_temporality is AggregationTemporality.CUMULATIVE


def test_collections_are_cumulative_or_deltas() -> None:
    total, added = metrics(), metrics(delta=True)
    for found in (total, added):
        found.add(summary())
        found.collect()
        found.add(summary())
    assert histogram(total.collect()[0]).data_points[0].count == 2
    delta = histogram(added.collect()[0])
    assert (delta.data_points[0].count, delta.aggregation_temporality) == (1, AggregationTemporality.DELTA)
    assert added.collect() == []


def test_a_client_creates_no_series(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_SERIES", 2)
    found = metrics()
    for number in range(20):
        found.add(summary(model=f"made-up-{number}", team=f"team-{number % 3}"))
    points = histogram(found.collect()[0]).data_points
    assert len(points) == 2
    assert all("gen_ai.request.model" not in (point.attributes or {}) for point in points)
