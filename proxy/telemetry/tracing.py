"""Decide a request's place in a distributed trace when it arrives."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any

from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import SpanContext, SpanKind, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from proxy.telemetry.trace_context import TRACEPARENT, TRACESTATE, Trace, new_span, new_trace

_PARENT, _STATE = TRACEPARENT.encode(), TRACESTATE.encode()
_PROPAGATOR = TraceContextTextMapPropagator()


class Tracing:
    """Makes the trace of each request, or continues the client's."""

    def __init__(self, sampler: Sampler | None) -> None:
        """``sampler`` selects the requests to trace. Without one there are no spans, and upstreams get no trace."""
        self._sampler = sampler

    def begin(self, scope: MutableMapping[str, Any]) -> Trace:
        """Return the trace of a request that has just arrived, from its ASGI scope."""
        trace = self._trace(scope["headers"])
        trace.method, trace.scheme = scope.get("method", ""), scope.get("scheme", "http")
        return trace

    def _trace(self, headers: Iterable[tuple[bytes, bytes]]) -> Trace:
        sampler = self._sampler
        if sampler is None:
            id, span = new_trace()
            return Trace(id, span, sampled=False, propagated=False)
        carrier = _trace_headers(headers)
        if carrier:
            context = _PROPAGATOR.extract(carrier)
            parent = get_current_span(context).get_span_context()
            if parent.is_valid:
                result = sampler.should_sample(context, parent.trace_id, "", SpanKind.SERVER)
                return _continued(parent, sampled=_is_sampled(result))
        id, span = new_trace()
        result = sampler.should_sample(None, int(id, 16), "", SpanKind.SERVER)
        return Trace(id, span, _is_sampled(result))


def _is_sampled(result: SamplingResult) -> bool:
    return result.decision is Decision.RECORD_AND_SAMPLE


def _continued(parent: SpanContext, *, sampled: bool) -> Trace:
    state = parent.trace_state.to_header()
    return Trace(f"{parent.trace_id:032x}", new_span(), sampled, f"{parent.span_id:016x}", state)


def _trace_headers(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, list[str]]:
    """Return a request's trace headers. Two `traceparent` headers are invalid, as if there was none."""
    found: dict[str, list[str]] = {}
    for name, value in headers:
        if name in (_PARENT, _STATE):
            found.setdefault(name.decode(), []).append(value.decode("latin-1"))
    return found if len(found.get(TRACEPARENT, ())) == 1 else {}
