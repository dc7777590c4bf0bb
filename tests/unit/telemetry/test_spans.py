"""Test the encoding of spans. tests/product/test_opentelemetry.py tests their content."""

from __future__ import annotations

import pytest

from proxy.config.server import INSTALL

pytest.importorskip("opentelemetry.sdk", reason=f"run: {INSTALL}")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from proxy.telemetry.record import RequestRecord, Usage
from proxy.telemetry.spans import EncodedSpans, Spans, encoded_request
from proxy.telemetry.trace_context import Trace

TRACE, SPAN, PARENT = "a" * 32, "b" * 16, "c" * 16


def spans_of(*records: RequestRecord) -> list[Span]:
    emitted: list[EncodedSpans] = []
    spans = Spans(lambda name: ("azure", "https://example.openai.azure.com/openai/v1"), emitted.append)
    for record in records:
        spans.add(record)
    content = encoded_request({"service.name": "s"}, ("n", "1"), (one.content for one in emitted))
    message = ExportTraceServiceRequest.FromString(content)
    (resource,) = message.resource_spans
    (scope,) = resource.scope_spans
    assert resource.resource.attributes[0].value.string_value == "s"
    assert (scope.scope.name, scope.scope.version) == ("n", "1")
    return list(scope.spans)


def request(status: int = 200, **values: object) -> RequestRecord:
    trace = Trace(TRACE, SPAN, sampled=True, parent=PARENT, method=str(values.pop("method", "POST")))
    made = RequestRecord("r", 1.5, path="/v1/x", status=status, phases={"total": 2.0}, trace=trace)
    for name, value in values.items():
        setattr(made, name, value)
    return made


def test_a_span_has_its_ids_and_times() -> None:
    (span,) = spans_of(request())
    assert (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()) == (TRACE, SPAN, PARENT)
    assert (span.start_time_unix_nano, span.end_time_unix_nano) == (1_500_000_000, 1_502_000_000)
    assert span.flags == 0x300


def test_a_request_fails_by_its_status_or_if_the_upstream_interrupts_it() -> None:
    found = spans_of(
        request(200),
        request(404, error="not_found"),
        request(502),
        request(200, error="upstream_interrupted"),
        request(499, error="client_disconnected"),
    )
    assert [span.status.code for span in found] == [0, 0, 2, 2, 0]


def test_names_are_few_whatever_a_client_sends() -> None:
    found = spans_of(request(method="BREW"), request(), request(api="chat"))
    assert [span.name for span in found] == ["HTTP", "POST", "POST /v1/x"]


def test_a_summary_is_a_call_below_its_request() -> None:
    summary = request(kind="summary", upstream="main", upstream_model="small", usage=Usage(300, 40, 200, 10))
    (span,) = spans_of(summary)
    assert (span.name, span.kind, span.parent_span_id.hex()) == ("chat small", Span.SPAN_KIND_CLIENT, PARENT)
    values = {one.key: one.value for one in span.attributes}
    assert values["gen_ai.provider.name"].string_value == "azure.ai.openai"
    assert (values["server.address"].string_value, values["server.port"].int_value) == (
        "example.openai.azure.com",
        443,
    )
    used = {name: value.int_value for name, value in values.items() if name.startswith("gen_ai.usage.")}
    assert used == {
        "gen_ai.usage.input_tokens": 300,
        "gen_ai.usage.output_tokens": 40,
        "gen_ai.usage.cache_read.input_tokens": 200,
        "gen_ai.usage.cache_write.input_tokens": 10,
    }


def test_records_that_are_not_sampled_have_no_spans() -> None:
    emitted: list[EncodedSpans] = []
    spans = Spans(lambda name: None, emitted.append)
    spans.add(RequestRecord("r", 0.0))
    spans.add(RequestRecord("r", 0.0, trace=Trace(TRACE, SPAN, sampled=False)))
    assert emitted == []


def test_the_queue_of_the_sdk_takes_encoded_spans() -> None:
    class Exporter(SpanExporter):
        def __init__(self) -> None:
            self.content: list[bytes] = []

        def export(self, spans: object) -> SpanExportResult:
            assert isinstance(spans, list)
            self.content += [one.content for one in spans]
            return SpanExportResult.SUCCESS

    exporter = Exporter()
    processor = BatchSpanProcessor(exporter)
    Spans(lambda name: None, processor.on_end).add(request())
    processor.shutdown()
    assert len(exporter.content) == 1
