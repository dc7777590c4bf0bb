"""Send spans to an OpenTelemetry collector, by OTLP over HTTP.

The SDK exports in a thread of its own, with a bounded queue. A collector that is slow or lost costs spans, and never
delays a request. Settings that the configuration omits come from the SDK's `OTEL_*` variables.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence

import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult

from proxy.constants import __version__
from proxy.telemetry.tracing import NAME, FindUpstream, Spans, Tracing

log = structlog.get_logger(__name__)

CLOSING_SECONDS = 3.0  # seconds to send the last spans when the process ends


class _SpanExporter(OTLPSpanExporter):
    """The SDK's exporter, which logs when exports begin to fail, and when they work again."""

    def __init__(self, endpoint: str | None, headers: Mapping[str, str]) -> None:
        super().__init__(endpoint=None if endpoint is None else f"{endpoint}/v1/traces", headers=headers)
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        failed = result is not SpanExportResult.SUCCESS
        if failed is not self._failing:
            self._failing = failed
            if failed:
                log.warning("otel.export_failed")
            else:
                log.info("otel.export_recovered")
        return result


class OtelExport:
    """The spans of one process. Make it in the process that serves, because it starts threads."""

    def __init__(self, endpoint: str | None, headers: Mapping[str, str], upstreams: FindUpstream) -> None:
        """``endpoint`` is the collector's URL before `/v1/traces`."""
        # The exporter logs each attempt to reach the collector. `_SpanExporter` logs the changes.
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
        resource = _resource()
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self.tracing = Tracing(provider.sampler)
        exporter = _SpanExporter(endpoint, headers)
        processor = BatchSpanProcessor(exporter)
        self.spans = Spans(upstreams, resource, processor.on_end)
        self._close: Callable[[], object] = processor.shutdown
        self._abort: Callable[[], object] = exporter.shutdown

    async def aclose(self) -> None:
        """Send the spans that wait, and give up after ``CLOSING_SECONDS``."""
        # Python waits for threads of an executor at exit, but not for daemons.
        ended = _in_daemon(self._close)
        try:
            async with asyncio.timeout(CLOSING_SECONDS):
                await ended.wait()
        except TimeoutError:
            log.warning("otel.not_sent", seconds=CLOSING_SECONDS)
            self._abort()


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


def _resource() -> Resource:
    """Return the names of this process. `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` override them."""
    names = {"service.name": NAME, "service.version": __version__, "service.instance.id": str(uuid.uuid4())}
    return Resource.create(names).merge(OTELResourceDetector().detect())
