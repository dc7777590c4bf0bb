"""Derive OpenTelemetry spans from finished records. They have names and figures, never content.

The SDK's spans and their encoding take 200 µs per request. So the sink encodes spans itself, and encodes the attributes
that many spans share only once. In protobuf, two messages in a row merge into one.
"""

from __future__ import annotations

import struct
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

# In protobuf, a field begins with its number and kind. These have a fixed length: ids, times, and flags.
_FIXED = struct.Struct("<2s16s2s8s1sQ1sQ2sI")
_DOUBLE = struct.Struct("<d")
_BYTES = [bytes([value]) for value in range(0x80)]
_HEADS = [bytes([number << 3 | 2]) for number in range(16)]
_ATTRIBUTES = Span.ATTRIBUTES_FIELD_NUMBER
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
            content += _span(self._shared_by_calls(record, operation) + _of_call(record, trace, operation, parent))
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
    content = _ids_and_times(trace, trace.span, trace.parent, start_of(record), end_of(record), remote=True)
    content += _attribute("compaction.id", record.id)
    if record.before is not None:
        content += _attribute("compaction.tokens_before", record.before)
    if record.sent is not None:
        content += _attribute("compaction.tokens_sent", record.sent)
    if record.forecast is not None:
        content += _attribute("compaction.tokens_forecast", record.forecast)
    if record.checkpoints:
        content += _attribute("compaction.checkpoints", record.checkpoints)
    if reason is not None and reason.level is not None:
        content += _attribute("compaction.level_reached", reason.level)
    if reason is not None and reason.size is not None:
        content += _attribute("compaction.size", reason.size)
    return content


def _of_call(record: RequestRecord, trace: Trace, operation: Operation, parent: str) -> bytes:
    call, usage = operation.call, operation.usage
    content = _ids_and_times(trace, operation.span, parent, operation.start, operation.end, remote=False)
    if call is not None:
        if record.stream and usage is not None:
            content += _attribute("gen_ai.response.time_to_first_chunk", call.ms / 1000)
        if call.tokens is not None:
            content += _attribute("compaction.tokens_sent", call.tokens)
        if call.limit is not None:
            content += _attribute("compaction.limit", call.limit)
    if usage is not None:
        if usage.input is not None:
            content += _attribute("gen_ai.usage.input_tokens", usage.input)
        if usage.output is not None:
            content += _attribute("gen_ai.usage.output_tokens", usage.output)
        if usage.cache_read is not None:
            content += _attribute("gen_ai.usage.cache_read.input_tokens", usage.cache_read)
        if usage.cache_write is not None:
            content += _attribute("gen_ai.usage.cache_write.input_tokens", usage.cache_write)
    return content


def _ids_and_times(trace: Trace, span: str, parent: str | None, start: int, end: int, *, remote: bool) -> bytes:
    """Return fields of ``Span`` that differ between spans."""
    ids = bytes.fromhex(trace.id), bytes.fromhex(span)
    flags = _REMOTE if remote and parent is not None else _LOCAL
    content = _FIXED.pack(b"\x0a\x10", ids[0], b"\x12\x08", ids[1], b"\x39", start, b"\x41", end, b"\x85\x01", flags)
    if parent is not None:
        content += b"\x22\x08" + bytes.fromhex(parent)
    if trace.state:
        content += _field(Span.TRACE_STATE_FIELD_NUMBER, trace.state.encode())
    return content


def _attribute(name: str, value: str | float) -> bytes:
    """Return an attribute of a span. An integer isn't negative."""
    if isinstance(value, str):
        content = _field(AnyValue.STRING_VALUE_FIELD_NUMBER, value.encode())
    elif isinstance(value, float):
        content = b"\x21" + _DOUBLE.pack(value)
    else:
        content = b"\x18" + _varint(value)
    return _field(_ATTRIBUTES, _name(name) + _field(2, content))


@lru_cache
def _name(name: str) -> bytes:
    return bytes(KeyValue(key=name).SerializeToString())


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
    """Return a field of a protobuf message that holds bytes or another message. ``number`` is at most 15."""
    return _HEADS[number] + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    if value <= 0x7F:
        return _BYTES[value]
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
