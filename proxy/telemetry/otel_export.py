"""Send spans and metrics to an OpenTelemetry collector, by OTLP over HTTP.

The SDK exports in threads of its own, with a bounded queue. A collector that is slow or lost costs spans and metrics,
and never delays a request. Settings that the configuration omits come from the SDK's `OTEL_*` variables.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence, Set

import structlog
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExportResult, MetricsData, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult

from proxy import __version__
from proxy.telemetry.record import RequestRecord
from proxy.telemetry.tracing import NAME, FindUpstream, OperationMetrics, Spans, Tracing

log = structlog.get_logger(__name__)

CLOSING_SECONDS = 3.0  # seconds to send the last spans and metrics when the process ends

INTERVAL_SECONDS = 60.0
"""Seconds between two exports of metrics, unless `OTEL_METRIC_EXPORT_INTERVAL` (milliseconds) sets it."""

Sink = Callable[[RequestRecord], None]


class _Health:
    """Logs when exports begin to fail, and when they work again."""

    def __init__(self, signal: str) -> None:
        self._signal = signal
        self._failing = False

    def note(self, *, failed: bool) -> None:
        if failed is not self._failing:
            self._failing = failed
            if failed:
                log.warning("otel.export_failed", signal=self._signal)
            else:
                log.info("otel.export_recovered", signal=self._signal)


class _SpanExporter(OTLPSpanExporter):
    """The SDK's exporter, which also reports its health."""

    def __init__(self, endpoint: str | None, headers: Mapping[str, str]) -> None:
        super().__init__(endpoint=_url(endpoint, "traces"), headers=headers)
        self._health = _Health("traces")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        self._health.note(failed=result is not SpanExportResult.SUCCESS)
        return result


class _MetricExporter(OTLPMetricExporter):
    """The same for metrics."""

    def __init__(self, endpoint: str | None, headers: Mapping[str, str]) -> None:
        super().__init__(endpoint=_url(endpoint, "metrics"), headers=dict(headers))
        self._health = _Health("metrics")

    def export(
        self, metrics_data: MetricsData, timeout_millis: float | None = 10_000, **kwargs: object
    ) -> MetricExportResult:
        result = super().export(metrics_data, timeout_millis, **kwargs)
        self._health.note(failed=result is not MetricExportResult.SUCCESS)
        return result


class OtelExport:
    """The spans and metrics of one process. Make it in the process that serves, because it starts threads."""

    def __init__(
        self,
        endpoint: str | None,
        headers: Mapping[str, str],
        *,
        traces: bool,
        metrics: bool,
        upstreams: FindUpstream,
        models: Callable[[], Set[str]],
    ) -> None:
        """``endpoint`` is the collector's URL before `/v1/traces`. ``models`` returns the configured models."""
        # The exporters log each attempt to reach the collector. `_Health` logs the changes.
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
        resource = _resource()
        self.sinks: list[Sink] = []
        """Sinks of the recorder."""
        self._closers: list[tuple[Callable[[], object], Callable[[], object]]] = []
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self.tracing = Tracing(provider.sampler if traces else None)
        if traces:
            spans = _SpanExporter(endpoint, headers)
            processor = BatchSpanProcessor(spans)
            self.sinks.append(Spans(upstreams, resource, processor.on_end).add)
            self._closers.append((processor.shutdown, spans.shutdown))
        if metrics:
            series = _MetricExporter(endpoint, headers)
            reader = PeriodicExportingMetricReader(series, 1000 * _interval())
            meters = MeterProvider([reader], resource, shutdown_on_exit=False)
            self.sinks.append(OperationMetrics(meters.get_meter(NAME, __version__), upstreams, models).add)
            self._closers.append((meters.shutdown, series.shutdown))

    async def aclose(self) -> None:
        """Send the spans and metrics that wait, and give up after ``CLOSING_SECONDS``."""
        # Python waits for threads of an executor at exit, but not for daemons.
        ended = [_in_daemon(shutdown) for shutdown, _ in self._closers]
        try:
            async with asyncio.timeout(CLOSING_SECONDS):
                for one in ended:
                    await one.wait()
        except TimeoutError:
            log.warning("otel.not_sent", seconds=CLOSING_SECONDS)
            for _, abort in self._closers:
                abort()


def _in_daemon(shutdown: Callable[[], object]) -> asyncio.Event:
    """Shut down in a thread. Return an event that is set at the end."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def run() -> None:
        try:
            shutdown()
        finally:
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits anymore
                loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=run, daemon=True, name="otel-close").start()
    return ended


def is_disabled() -> bool:
    return os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


def _interval() -> float:
    """Return the seconds between two exports of metrics. Log a value that is no time, as the SDK does."""
    name = "OTEL_METRIC_EXPORT_INTERVAL"
    given = os.environ.get(name, "").strip()
    if not given:
        return INTERVAL_SECONDS
    if given.isascii() and given.isdecimal() and (milliseconds := int(given)) > 0:
        return milliseconds / 1000
    log.warning("otel.variable_ignored", variable=name, used=INTERVAL_SECONDS)
    return INTERVAL_SECONDS


def _url(endpoint: str | None, signal: str) -> str | None:
    return None if endpoint is None else f"{endpoint}/v1/{signal}"


def _resource() -> Resource:
    """Return the names of this process. `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` override them."""
    names = {"service.name": NAME, "service.version": __version__, "service.instance.id": str(uuid.uuid4())}
    return Resource.create(names).merge(OTELResourceDetector().detect())
