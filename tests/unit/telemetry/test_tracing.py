"""Test how a request's headers and the sampler decide its place in a trace."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.config.server import INSTALL

pytest.importorskip("opentelemetry.sdk", reason=f"run: {INSTALL}")

from opentelemetry.sdk.trace.sampling import DEFAULT_OFF, DEFAULT_ON

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


def test_without_a_sampler_upstreams_get_no_trace() -> None:
    trace = Tracing(None).begin(scope(("traceparent", f"00-{TRACE}-{PARENT}-01")))
    assert (trace.propagated, trace.sampled, trace.parent) == (False, False, None)
