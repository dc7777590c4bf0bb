"""Test a request's place in a trace, by its headers and the sampler, and the spans of records.

tests/product/test_opentelemetry.py tests the content of spans.
"""

from __future__ import annotations

from typing import Any

import pytest

from proxy.config.server import INSTALL

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason=f"run: {INSTALL}")

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.sampling import DEFAULT_OFF, DEFAULT_ON

from proxy import __version__
from proxy.telemetry.record import RequestRecord, Usage
from proxy.telemetry.trace_context import Trace
from proxy.telemetry.tracing import NAME, Spans, Tracing

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def scope(*headers: tuple[str, str]) -> dict[str, Any]:
    return {"method": "POST", "headers": [(name.encode(), value.encode()) for name, value in headers]}


def test_a_request_continues_the_clients_trace() -> None:
    given = scope(("traceparent", f"00-{TRACE}-{PARENT}-01"), ("tracestate", "a=1"), ("tracestate", "b=2"))
    trace = Tracing(DEFAULT_OFF).begin(given)
    assert (trace.id, trace.parent, trace.sampled, trace.state) == (TRACE, PARENT, True, "a=1,b=2")
    assert trace.span != PARENT
    assert (trace.method, trace.scheme) == ("POST", "http")
    assert not Tracing(DEFAULT_ON).begin(scope(("traceparent", f"00-{TRACE}-{PARENT}-00"))).sampled


@pytest.mark.parametrize(
    "headers",
    [
        (),
        (("traceparent", "nonsense"),),
        (("traceparent", f"00-{'0' * 32}-{PARENT}-01"),),
        (("traceparent", f"ff-{TRACE}-{PARENT}-01"),),
        (("traceparent", f"00-{TRACE}-{PARENT}-01"), ("traceparent", f"00-{TRACE}-{PARENT}-01")),
        (("traceparent", "é" * 10_000),),
        (("tracestate", "a=1"),),
    ],
)
def test_without_a_valid_parent_a_trace_begins(headers: tuple[tuple[str, str], ...]) -> None:
    trace = Tracing(DEFAULT_ON).begin(scope(*headers))
    assert (trace.parent, trace.sampled, trace.state) == (None, True, "")
    assert trace.id != TRACE
    assert not Tracing(DEFAULT_OFF).begin(scope(*headers)).sampled


def test_without_a_sampler_upstreams_get_no_trace() -> None:
    trace = Tracing(None).begin(scope(("traceparent", f"00-{TRACE}-{PARENT}-01")))
    assert (trace.propagated, trace.sampled, trace.parent) == (False, False, None)


SPAN = "b" * 16


def spans_of(*records: RequestRecord) -> list[Span]:
    """Return the spans of records as a collector reads them."""
    emitted: list[ReadableSpan] = []
    upstreams = {"main": ("azure", "https://example.openai.azure.com/openai/v1")}
    spans = Spans(upstreams.get, Resource({"service.name": "s"}), emitted.append)
    for record in records:
        spans.add(record)
    message = ExportTraceServiceRequest.FromString(encode_spans(emitted).SerializeToString())
    (resource,) = message.resource_spans
    (scope,) = resource.scope_spans
    assert resource.resource.attributes[0].value.string_value == "s"
    assert (scope.scope.name, scope.scope.version) == (NAME, __version__)
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
    emitted: list[ReadableSpan] = []
    spans = Spans(lambda name: None, Resource({}), emitted.append)
    spans.add(RequestRecord("r", 0.0))
    spans.add(RequestRecord("r", 0.0, trace=Trace(TRACE, SPAN, sampled=False)))
    assert emitted == []
