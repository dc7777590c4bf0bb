"""Test the ids of spans, and the headers for upstreams."""

from __future__ import annotations

import re

from proxy.telemetry.trace_context import Trace, new_span, new_trace, with_trace

CLIENT = [("accept", "*/*"), ("traceparent", "00-client"), ("tracestate", "vendor=1")]


def test_ids_have_the_length_of_the_standard() -> None:
    trace, span = new_trace()
    assert re.fullmatch("[0-9a-f]{32}", trace)
    assert re.fullmatch("[0-9a-f]{16}", span)
    assert new_span() != new_span()


def test_headers_name_the_span_that_the_upstream_continues() -> None:
    trace = Trace("a" * 32, "b" * 16, sampled=True, parent="c" * 16)
    sent = with_trace(CLIENT, trace, "d" * 16)
    assert sent == [CLIENT[0], CLIENT[2], ("traceparent", f"00-{'a' * 32}-{'d' * 16}-01")]
    assert with_trace([], trace) == [("traceparent", f"00-{'a' * 32}-{'b' * 16}-01")]
    unsampled = Trace("a" * 32, "b" * 16, sampled=False)
    assert with_trace(CLIENT, unsampled) == [CLIENT[0], ("traceparent", f"00-{'a' * 32}-{'b' * 16}-00")]


def test_headers_without_a_trace_are_unchanged() -> None:
    assert with_trace(CLIENT, None) is CLIENT
    assert with_trace(CLIENT, Trace("a" * 32, "b" * 16, sampled=False, propagated=False)) is CLIENT


def test_a_call_of_a_request_is_below_its_span() -> None:
    trace = Trace("a" * 32, "b" * 16, sampled=True, parent="c" * 16, state="vendor=1")
    child = trace.child("d" * 16)
    assert (child.id, child.span, child.parent, child.state) == (trace.id, "d" * 16, trace.span, "vendor=1")
    assert child.attempts is not trace.attempts
