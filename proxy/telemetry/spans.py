"""Derive OpenTelemetry spans from finished records. They have names and figures, never content.

The SDK's spans and their encoding take 120 µs per request. So the sink encodes spans itself, and encodes the attributes
that many spans share only once. In protobuf, two messages in a row merge into one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, SpanFlags, Status
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import INVALID_SPAN, SpanContext, TraceFlags

from proxy.telemetry.gen_ai import OPERATION, FindUpstream, attributes_of
from proxy.telemetry.operations import Operation, end_of, operations, start_of
from proxy.telemetry.record import RequestRecord
from proxy.telemetry.trace_context import Trace

Value = str | bool | int | float | tuple[str, ...]
Attributes = tuple[tuple[str, Value | None], ...]
"""Names and values. ``None``: omitted."""

_SPANS = ScopeSpans.SPANS_FIELD_NUMBER
_SERVER, _CLIENT = Span.SpanKind.SPAN_KIND_SERVER, Span.SpanKind.SPAN_KIND_CLIENT
_METHODS = frozenset({"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"})
_CLIENT_LEFT = 499

_LOCAL = SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK
_REMOTE = _LOCAL | SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK

_invalid = INVALID_SPAN.get_span_context()
_SAMPLED = SpanContext(_invalid.trace_id, _invalid.span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


class EncodedSpans(ReadableSpan):
    """The spans of a record for the SDK's queue, which reads only whether they are sampled."""

    def __init__(self, content: bytes) -> None:
        """``content`` has the spans as fields of ``ScopeSpans``."""
        self._context = _SAMPLED
        self.content = content


class Spans:
    """Encodes the spans of finished records. ``add`` is a sink of the recorder."""

    def __init__(self, upstreams: FindUpstream, emit: Callable[[EncodedSpans], None]) -> None:
        """``emit`` gets the spans of each record. It must not block."""
        self._upstreams = upstreams
        self._emit = emit

    def add(self, record: RequestRecord) -> None:
        """Emit the spans of a finished record: one for the request, and one for each call to a model."""
        trace = record.trace
        if trace is None or not trace.sampled:
            return
        content, parent = b"", trace.span
        if record.kind == "request":
            content = _span(_shared_by_requests(record, trace) + _of_request(record, trace))
        else:
            parent = trace.parent or trace.span
        for operation in operations(record):
            content += _span(self._shared_by_calls(record, operation) + _of_call(record, operation, parent))
        self._emit(EncodedSpans(content))

    def _shared_by_calls(self, record: RequestRecord, operation: Operation) -> bytes:
        upstream, model, call = record.upstream or "", record.upstream_model or record.model, operation.call
        status = record.status if record.kind == "summary" else None if call is None else call.status
        return _shared(
            OPERATION if model is None else f"{OPERATION} {model}",
            _CLIENT,
            operation.error is not None and record.status != _CLIENT_LEFT,
            (
                *attributes_of(upstream, self._upstreams(upstream)).items(),
                ("gen_ai.request.model", model),
                ("gen_ai.request.stream", True if record.stream else None),
                ("gen_ai.conversation.compacted", True if operation.compacted else None),
                ("http.request.resend_count", operation.number or None),
                ("http.response.status_code", status or None),
                ("error.type", operation.error),
                ("compaction.kind", record.kind),
                ("compaction.result", None if call is None else call.result),
            ),
        )


def encoded_request(resource: Mapping[str, Value], scope: tuple[str, str], spans: Iterable[bytes]) -> bytes:
    """Return spans as an OTLP request. They have the form of ``EncodedSpans``.

    ``scope`` is the name and the version of the program that made them.
    """
    name, version = scope
    scoped = ScopeSpans(scope=InstrumentationScope(name=name, version=version)).SerializeToString()
    scoped += b"".join(spans)
    own = ResourceSpans(resource=Resource(attributes=_key_values(tuple(resource.items())))).SerializeToString()
    # `resource_spans` of a request has the number 1.
    return _field(1, own + _field(ResourceSpans.SCOPE_SPANS_FIELD_NUMBER, scoped))


def _shared_by_requests(record: RequestRecord, trace: Trace) -> bytes:
    method = trace.method if trace.method in _METHODS else "_OTHER"
    name = "HTTP" if method == "_OTHER" else method
    route = None if record.api == "other" else record.path
    # By the conventions for HTTP, a status below 500 isn't an error of the server.
    failed = record.status >= 500 or (record.error is not None and record.status < 400)
    return _shared(
        name if route is None else f"{name} {route}",
        _SERVER,
        failed,
        (
            ("http.request.method", method),
            ("http.response.status_code", record.status),
            ("http.route", route),
            ("url.path", record.path),
            ("url.scheme", trace.scheme),
            ("error.type", (record.error or str(record.status)) if failed else None),
            ("compaction.api", record.api),
            ("compaction.verdict", record.verdict),
            ("compaction.team", record.team),
            ("compaction.policy", record.policy),
            ("compaction.upstream", record.upstream),
            ("compaction.steps", record.steps or None),
            ("compaction.summary", record.summary),
            ("compaction.cause", record.cause),
            ("compaction.retries", record.retries or None),
            ("compaction.error", record.error),
            ("compaction.trigger", None if record.reason is None else record.reason.trigger),
        ),
    )


def _of_request(record: RequestRecord, trace: Trace) -> bytes:
    reason = record.reason
    span = Span(
        trace_id=bytes.fromhex(trace.id),
        span_id=bytes.fromhex(trace.span),
        parent_span_id=bytes.fromhex(trace.parent or ""),
        flags=_LOCAL if trace.parent is None else _REMOTE,
        trace_state=trace.state,
        start_time_unix_nano=start_of(record),
        end_time_unix_nano=end_of(record),
        attributes=_key_values(
            (
                ("compaction.id", record.id),
                ("compaction.tokens_before", record.before),
                ("compaction.tokens_sent", record.sent),
                ("compaction.tokens_forecast", record.forecast),
                ("compaction.checkpoints", record.checkpoints or None),
                ("compaction.level_reached", None if reason is None else reason.level),
                ("compaction.size", None if reason is None else reason.size),
            )
        ),
    )
    return bytes(span.SerializeToString())


def _of_call(record: RequestRecord, operation: Operation, parent: str) -> bytes:
    trace, call, usage = record.trace, operation.call, operation.usage
    attributes: Attributes = ()
    if call is not None:
        first = call.ms / 1000 if record.stream and usage is not None else None
        attributes = (
            ("gen_ai.response.time_to_first_chunk", first),
            ("compaction.tokens_sent", call.tokens),
            ("compaction.limit", call.limit),
        )
    if usage is not None:
        attributes += (
            ("gen_ai.usage.input_tokens", usage.input),
            ("gen_ai.usage.output_tokens", usage.output),
            ("gen_ai.usage.cache_read.input_tokens", usage.cache_read),
            ("gen_ai.usage.cache_write.input_tokens", usage.cache_write),
        )
    span = Span(
        trace_id=bytes.fromhex("" if trace is None else trace.id),
        span_id=bytes.fromhex(operation.span),
        parent_span_id=bytes.fromhex(parent),
        flags=_LOCAL,
        trace_state="" if trace is None else trace.state,
        start_time_unix_nano=operation.start,
        end_time_unix_nano=operation.end,
        attributes=_key_values(attributes),
    )
    return bytes(span.SerializeToString())


@lru_cache(2_000)
def _shared(name: str, kind: Span.SpanKind.ValueType, failed: bool, attributes: Attributes) -> bytes:
    status = Status(code=Status.StatusCode.STATUS_CODE_ERROR) if failed else None
    span = Span(name=name, kind=kind, status=status, attributes=_key_values(attributes))
    return bytes(span.SerializeToString())


def _key_values(attributes: Attributes) -> list[KeyValue]:
    return [KeyValue(key=name, value=_any(value)) for name, value in attributes if value is not None]


def _any(value: Value | Sequence[str]) -> AnyValue:
    if isinstance(value, str):
        return AnyValue(string_value=value)
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value)
    return AnyValue(array_value=ArrayValue(values=map(_any, value)))


def _span(content: bytes) -> bytes:
    return _field(_SPANS, content)


def _field(number: int, content: bytes) -> bytes:
    """Return a field of a protobuf message that holds bytes or another message."""
    head = bytearray([number << 3 | 2])
    length = len(content)
    while length > 0x7F:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    head.append(length)
    return bytes(head) + content
