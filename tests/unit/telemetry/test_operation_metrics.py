"""Test the histograms of calls to models."""

from __future__ import annotations

import pytest

from proxy.config.server import INSTALL

pytest.importorskip("opentelemetry.sdk", reason=f"run: {INSTALL}")

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader

from proxy.telemetry.record import RequestRecord, Trace, Usage
from proxy.telemetry.tracing import OperationMetrics


def summary(milliseconds: float = 30.0, model: str = "small", **values: object) -> RequestRecord:
    made = RequestRecord("r", 1.0, "summary", upstream="main", upstream_model=model, status=200)
    made.phases, made.usage = {"total": milliseconds}, Usage(100, 7)
    made.trace = Trace("a" * 32, "b" * 16, sampled=False)
    for name, value in values.items():
        setattr(made, name, value)
    return made


def histograms(*records: RequestRecord) -> list[list[HistogramDataPoint]]:
    """The points of both histograms after these records."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    sink = OperationMetrics(provider.get_meter("test"), lambda name: ("openai", None), lambda: frozenset({"small"}))
    for record in records:
        sink.add(record)
    found = reader.get_metrics_data()
    provider.shutdown()
    assert found is not None
    (scope,) = found.resource_metrics[0].scope_metrics
    return [
        [point for point in metric.data.data_points if isinstance(point, HistogramDataPoint)]
        for metric in scope.metrics
    ]


def test_values_fall_into_buckets_by_labels() -> None:
    failed = summary(status=500, usage=None, team="search")
    durations, usage = histograms(summary(10.0), summary(30.0), summary(5_000_000.0), failed)
    one, other = durations
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
    assert {str((point.attributes or {})["gen_ai.token.type"]): point.sum for point in usage} == {
        "input": 300,
        "output": 21,
    }


def test_a_client_creates_no_series() -> None:
    durations, _ = histograms(*(summary(model=f"made-up-{number}") for number in range(20)))
    (point,) = durations
    assert "gen_ai.request.model" not in (point.attributes or {})
