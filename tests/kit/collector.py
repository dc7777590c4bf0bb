"""An OpenTelemetry collector on loopback, which decodes the spans that it gets."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from proxy.server.loopback import serve


@dataclass(frozen=True)
class SpanSeen:
    """A span. Ids are hexadecimal; ``parent`` is empty without one."""

    name: str
    kind: str
    trace: str
    id: str
    parent: str
    start: int
    end: int
    failed: bool
    state: str
    attributes: dict[str, Any]


@dataclass
class Collector:
    url: str = ""
    status: int = 200
    raw: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)
    spans: list[SpanSeen] = field(default_factory=list)

    async def traces(self, request: Request) -> Response:
        message = ExportTraceServiceRequest.FromString(await self._body(request))
        for resource in message.resource_spans:
            self.resources.append(_values(resource.resource.attributes))
            for scope in resource.scope_spans:
                self.spans += [_span(span) for span in scope.spans]
        return Response(status_code=self.status)

    async def _body(self, request: Request) -> bytes:
        body = await request.body()
        self.raw.append(body)
        self.headers.append(dict(request.headers))
        return body

    def servers(self) -> list[SpanSeen]:
        """Return the spans of requests in the order of their start."""
        return sorted((one for one in self.spans if one.kind == "SERVER"), key=lambda one: one.start)

    def children(self, parent: SpanSeen) -> list[SpanSeen]:
        """Return the spans below a span in the order of their start."""
        return sorted((one for one in self.spans if one.parent == parent.id), key=lambda one: one.start)


@contextlib.contextmanager
def collecting(status: int = 200) -> Iterator[Collector]:
    """Run a collector. ``status`` is the status of its responses."""
    collector = Collector(status=status)
    app = Starlette(routes=[Route("/v1/traces", collector.traces, methods=["POST"])])
    with serve(app) as url:
        collector.url = url
        yield collector


def _span(span: Any) -> SpanSeen:
    kind = span.DESCRIPTOR.fields_by_name["kind"].enum_type.values_by_number[span.kind].name
    return SpanSeen(
        span.name,
        kind.removeprefix("SPAN_KIND_"),
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.code == 2,
        span.trace_state,
        _values(span.attributes),
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    found = getattr(value, kind)
    return [_value(one) for one in found.values] if kind == "array_value" else found
