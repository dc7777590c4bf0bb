"""Trace requests with OpenTelemetry: their place in a distributed trace, and the spans of finished records.

A request gets the ids of its spans when it arrives, because `traceparent` names the span of an attempt before the
attempt has a result. The SDK's tracer can't give a span an id that is already known. So the proxy builds the SDK's
finished spans from the record, and the SDK queues, encodes, and exports them. They have names and figures only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from proxy import __version__
from proxy.telemetry.operations import OPERATION, FindUpstream, Operation, attributes_of, end_of, operations, start_of
from proxy.telemetry.record import RequestRecord
from proxy.telemetry.trace_context import TRACEPARENT, TRACESTATE, Trace, new_span, new_trace

NAME = "compaction-proxy"
"""The name of the program, as a service and as the source of spans and metrics."""

SCOPE = InstrumentationScope(NAME, __version__, "")

_PARENT, _STATE = TRACEPARENT.encode(), TRACESTATE.encode()
_PROPAGATOR = TraceContextTextMapPropagator()
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_UNSET, _ERROR = Status(StatusCode.UNSET), Status(StatusCode.ERROR)
_METHODS = frozenset({"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"})
_CLIENT_LEFT = 499

_Value = str | bool | int | float | tuple[str, ...]


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
    received: dict[str, list[str]] = {}
    for name, value in headers:
        if name in (_PARENT, _STATE):
            received.setdefault(name.decode(), []).append(value.decode("latin-1"))
    return received if len(received.get(TRACEPARENT, ())) == 1 else {}


class Spans:
    """Makes the spans of finished records. ``add`` is a sink of the recorder."""

    def __init__(self, upstreams: FindUpstream, resource: Resource, emit: Callable[[ReadableSpan], None]) -> None:
        """``resource`` has the names of this process. ``emit`` gets each span, and must not block."""
        self._upstreams = upstreams
        self._resource = resource
        self._emit = emit

    def add(self, record: RequestRecord) -> None:
        """Emit the spans of a finished record: one for the request, and one for each call to a model."""
        trace = record.trace
        if trace is None or not trace.sampled:
            return
        ids = _Ids(trace)
        parent = None if trace.parent is None else ids.context(trace.parent, remote=True)
        if record.kind == "request":
            span = ids.context(trace.span)
            self._emit(self._of_request(record, trace, span, parent))
            parent = span
        else:
            # The request's process is this one, so its span isn't remote.
            parent = ids.context(trace.parent or trace.span)
        for operation in operations(record):
            self._emit(self._of_call(record, operation, ids.context(operation.span), parent))

    def _of_request(
        self, record: RequestRecord, trace: Trace, span: SpanContext, parent: SpanContext | None
    ) -> ReadableSpan:
        # A client may send any text as the method.
        method = trace.method if trace.method in _METHODS else "_OTHER"
        name = "HTTP" if method == "_OTHER" else method
        route = None if record.api == "other" else record.path
        # By the conventions for HTTP, a status below 500 isn't an error of the server.
        failed = record.status >= 500 or (record.error is not None and record.status < 400)
        return ReadableSpan(
            name if route is None else f"{name} {route}",
            span,
            parent,
            self._resource,
            _stated(_about_request(record, trace, method, route, failed=failed)),
            kind=SpanKind.SERVER,
            status=_ERROR if failed else _UNSET,
            start_time=start_of(record),
            end_time=end_of(record),
            instrumentation_scope=SCOPE,
        )

    def _of_call(
        self, record: RequestRecord, operation: Operation, span: SpanContext, parent: SpanContext
    ) -> ReadableSpan:
        upstream, model = record.upstream or "", record.upstream_model or record.model
        failed = operation.error is not None and record.status != _CLIENT_LEFT
        return ReadableSpan(
            OPERATION if model is None else f"{OPERATION} {model}",
            span,
            parent,
            self._resource,
            {**attributes_of(upstream, self._upstreams(upstream)), **_stated(_about_call(record, operation, model))},
            kind=SpanKind.CLIENT,
            status=_ERROR if failed else _UNSET,
            start_time=operation.start,
            end_time=operation.end,
            instrumentation_scope=SCOPE,
        )


class _Ids:
    """The ids of the spans in one trace, in the SDK's form."""

    def __init__(self, trace: Trace) -> None:
        self._trace = int(trace.id, 16)
        self._state = TraceState.from_header([trace.state]) if trace.state else None

    def context(self, span: str, *, remote: bool = False) -> SpanContext:
        return SpanContext(self._trace, int(span, 16), remote, _SAMPLED, self._state)


def _about_request(
    record: RequestRecord, trace: Trace, method: str, route: str | None, *, failed: bool
) -> dict[str, _Value | None]:
    reason = record.reason
    return {
        "http.request.method": method,
        "http.response.status_code": record.status,
        "http.route": route,
        "url.path": record.path,
        "url.scheme": trace.scheme,
        "error.type": (record.error or str(record.status)) if failed else None,
        "compaction.api": record.api,
        "compaction.verdict": record.verdict,
        "compaction.team": record.team,
        "compaction.policy": record.policy,
        "compaction.upstream": record.upstream,
        "compaction.steps": record.steps or None,
        "compaction.summary": record.summary,
        "compaction.cause": record.cause,
        "compaction.retries": record.retries or None,
        "compaction.error": record.error,
        "compaction.trigger": None if reason is None else reason.trigger,
        "compaction.id": record.id,
        "compaction.tokens_before": record.before,
        "compaction.tokens_sent": record.sent,
        "compaction.tokens_forecast": record.forecast,
        "compaction.checkpoints": record.checkpoints or None,
        "compaction.level_reached": None if reason is None else reason.level,
        "compaction.size": None if reason is None else reason.size,
    }


def _about_call(record: RequestRecord, operation: Operation, model: str | None) -> dict[str, _Value | None]:
    call, usage = operation.call, operation.usage
    status = record.status if record.kind == "summary" else None if call is None else call.status
    about: dict[str, _Value | None] = {
        "gen_ai.request.model": model,
        "gen_ai.request.stream": True if record.stream else None,
        "gen_ai.conversation.compacted": True if operation.compacted else None,
        "http.request.resend_count": operation.number or None,
        "http.response.status_code": status or None,
        "error.type": operation.error,
        "compaction.kind": record.kind,
    }
    if call is not None:
        about["compaction.result"] = call.result
        if record.stream and usage is not None:
            about["gen_ai.response.time_to_first_chunk"] = call.ms / 1000
        about["compaction.tokens_sent"] = call.tokens
        about["compaction.limit"] = call.limit
    if usage is not None:
        about["gen_ai.usage.input_tokens"] = usage.input
        about["gen_ai.usage.output_tokens"] = usage.output
        about["gen_ai.usage.cache_read.input_tokens"] = usage.cache_read
        about["gen_ai.usage.cache_write.input_tokens"] = usage.cache_write
    return about


def _stated(attributes: Mapping[str, _Value | None]) -> dict[str, _Value]:
    return {name: value for name, value in attributes.items() if value is not None}
