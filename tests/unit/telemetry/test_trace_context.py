"""Test the ids of spans, and the headers for upstreams."""

from proxy.telemetry.record import Trace, with_trace

CLIENT = [("accept", "*/*"), ("traceparent", "00-client"), ("tracestate", "vendor=1")]


def test_headers_name_the_span_that_the_upstream_continues() -> None:
    trace = Trace("a" * 32, "b" * 16, sampled=True, parent="c" * 16)
    sent = with_trace(CLIENT, trace, "d" * 16)
    assert sent == [CLIENT[0], CLIENT[2], ("traceparent", f"00-{'a' * 32}-{'d' * 16}-01")]
    assert with_trace([], trace) == [("traceparent", f"00-{'a' * 32}-{'b' * 16}-01")]
    unsampled = Trace("a" * 32, "b" * 16, sampled=False)
    assert with_trace(CLIENT, unsampled) == [CLIENT[0], ("traceparent", f"00-{'a' * 32}-{'b' * 16}-00")]


def test_headers_without_a_trace_are_unchanged() -> None:
    assert with_trace(CLIENT, None) is CLIENT
