"""Trace requests with OpenTelemetry: their place in a distributed trace, and the spans of finished records.

A request gets the ids of its spans when it arrives, because `traceparent` names the span of an attempt before the
attempt has a result. The SDK's tracer can't give a span an id that is already known. So the proxy builds the SDK's
finished spans from the record, and the SDK queues, encodes, and exports them. They have names and figures only.

The attributes of calls to models follow OpenTelemetry's conventions for generative AI. The names aren't stable yet.
Source: github.com/open-telemetry/semantic-conventions-genai.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

import msgspec
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from proxy.constants import __version__
from proxy.telemetry.record import (
    ACCEPTED,
    TRACEPARENT,
    TRACESTATE,
    RequestRecord,
    Trace,
    UpstreamCall,
    Usage,
    new_span,
    new_trace,
)

OPERATION = "chat"  # the operation of all three APIs

_PROVIDERS = {
    "azure": "azure.ai.openai",
    "azure_ai": "azure.ai.inference",
    "bedrock": "aws.bedrock",
    "bedrock_converse": "aws.bedrock",
    "cohere_chat": "cohere",
    "gemini": "gcp.gemini",
    "mistral": "mistral_ai",
    "vertex_ai": "gcp.vertex_ai",
    "vertex_ai_beta": "gcp.vertex_ai",
    "watsonx": "ibm.watsonx.ai",
    "xai": "x_ai",
}
"""The conventions' names of providers, where they differ from LiteLLM's."""

_PORTS = {"http": 80, "https": 443}

Upstream = tuple[str, str | None]  # the provider of an upstream by its name in LiteLLM, and its base URL

FindUpstream = Callable[[str], Upstream | None]
"""Returns the upstream of a name, or ``None`` if the configuration doesn't have it anymore."""

Attributes = Mapping[str, str | int]


class Operation(msgspec.Struct, eq=False):
    """One call to a model. ``start`` and ``end`` are in nanoseconds since 1970.

    ``number`` is 0 for the first attempt. ``error`` is a status, a result, or an error code. ``compacted`` says that
    the prompt isn't the one that the client sent.
    """

    span: str
    start: int
    end: int
    number: int = 0
    call: UpstreamCall | None = None
    usage: Usage | None = None
    error: str | None = None
    compacted: bool = False


def start_of(record: RequestRecord) -> int:
    return int(record.time * 1e9)


def end_of(record: RequestRecord) -> int:
    return start_of(record) + _nanoseconds(record.phases.get("total", 0.0))


def operations(record: RequestRecord) -> Iterator[Operation]:
    """Yield the calls to models that a finished record describes. The record must have a trace."""
    trace = record.trace
    if trace is None:
        return
    if record.kind == "summary":
        error = None if record.status == 200 else record.error or str(record.status)
        yield Operation(trace.span, start_of(record), end_of(record), usage=record.usage, error=error)
        return
    last = len(trace.attempts) - 1
    for number, attempt in enumerate(trace.attempts):
        call = record.calls[number] if number < len(record.calls) else None
        end = end_of(record)
        if call is not None and (number < last or call.status is None):
            end = attempt.start + _nanoseconds(call.ms)
        # A record with one attempt states its usage once.
        usage = record.usage if len(record.calls) < 2 else None if call is None else call.usage
        error = record.error if number == last else None
        if call is not None and call.result not in (ACCEPTED, "error"):
            error = call.result
        elif call is not None and call.status is not None and call.status >= 400:
            error = str(call.status)
        compacted = call is not None and call.tokens is not None and call.tokens != record.before
        if number == last:
            compacted = record.verdict == "compacted"
        yield Operation(attempt.id, attempt.start, max(attempt.start, end), number, call, usage, error, compacted)


def _nanoseconds(milliseconds: float) -> int:
    return int(milliseconds * 1e6)


@lru_cache(1_000)
def attributes_of(name: str, upstream: Upstream | None) -> Attributes:
    attributes: dict[str, str | int] = {"gen_ai.operation.name": OPERATION, "compaction.upstream": name}
    if upstream is None:
        return attributes
    provider, base_url = upstream
    attributes["gen_ai.provider.name"] = _PROVIDERS.get(provider, provider)
    if base_url is not None and (address := urlsplit(base_url)).hostname:
        attributes["server.address"] = address.hostname
        attributes["server.port"] = address.port or _PORTS[address.scheme]
    return attributes


NAME = "compaction-proxy"  # the name of the program, as a service and as the source of spans

SCOPE = InstrumentationScope(NAME, __version__, "")

_PARENT, _STATE = TRACEPARENT.encode(), TRACESTATE.encode()
_PROPAGATOR = TraceContextTextMapPropagator()
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_UNSET, _ERROR = Status(StatusCode.UNSET), Status(StatusCode.ERROR)
_METHODS = frozenset({"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"})
_CLIENT_LEFT = 499
_OF_RECORD = ("api", "verdict", "team", "policy", "upstream", "summary", "cause", "error", "id")
"""Fields of a record that the span of a request has under the same names."""

_Value = str | bool | int | float | tuple[str, ...]


class Tracing:
    """Makes the trace of each request, or continues the client's."""

    def __init__(self, sampler: Sampler) -> None:
        """``sampler`` selects the requests to trace."""
        self._sampler = sampler

    def begin(self, scope: MutableMapping[str, Any]) -> Trace:
        """Return the trace of a request that has just arrived, from its ASGI scope."""
        trace = self._trace(scope["headers"])
        trace.method, trace.scheme = scope.get("method", ""), scope.get("scheme", "http")
        return trace

    def _trace(self, headers: Iterable[tuple[bytes, bytes]]) -> Trace:
        sampler = self._sampler
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
        reason = record.reason
        about: dict[str, _Value | None] = {
            "http.request.method": method,
            "http.response.status_code": record.status,
            "http.route": route,
            "url.path": record.path,
            "url.scheme": trace.scheme,
            "error.type": (record.error or str(record.status)) if failed else None,
            **{f"compaction.{name}": getattr(record, name) for name in _OF_RECORD},
            **{f"compaction.{name}": getattr(record, name) or None for name in ("steps", "retries", "checkpoints")},
            "compaction.tokens_before": record.before,
            "compaction.tokens_sent": record.sent,
            "compaction.tokens_forecast": record.forecast,
            "compaction.trigger": None if reason is None else reason.trigger,
            "compaction.level_reached": None if reason is None else reason.level,
            "compaction.size": None if reason is None else reason.size,
        }
        return ReadableSpan(
            name if route is None else f"{name} {route}",
            span,
            parent,
            self._resource,
            {name: value for name, value in about.items() if value is not None},
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
        stated = {name: value for name, value in about.items() if value is not None}
        return ReadableSpan(
            OPERATION if model is None else f"{OPERATION} {model}",
            span,
            parent,
            self._resource,
            {**attributes_of(upstream, self._upstreams(upstream)), **stated},
            kind=SpanKind.CLIENT,
            status=_ERROR if operation.error is not None and record.status != _CLIENT_LEFT else _UNSET,
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
