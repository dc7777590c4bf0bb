"""Test a request's place in a trace, by its headers and the sampler, and the spans of records.

tests/product/test_opentelemetry.py tests the content of spans.
"""

from typing import Any

import pytest

from proxy.config.server import INSTALL

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason=f"run: {INSTALL}")

from opentelemetry.sdk.trace.sampling import DEFAULT_OFF, DEFAULT_ON

from proxy.telemetry.record import RequestRecord, Trace
from proxy.telemetry.tracing import Tracing

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


SPAN = "b" * 16


def request(status: int = 200, **values: object) -> RequestRecord:
    trace = Trace(TRACE, SPAN, sampled=True, parent=PARENT, method=str(values.pop("method", "POST")))
    made = RequestRecord("r", 1.5, path="/v1/x", status=status, phases={"total": 2.0}, trace=trace)
    for name, value in values.items():
        setattr(made, name, value)
    return made
