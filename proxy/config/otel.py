"""The section `otel`: where to send spans and metrics with OpenTelemetry."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping

from pydantic import Field, field_validator, model_validator

from proxy.config.fields import Section, wrong
from proxy.config.upstreams import Secret, check_url, checked_header_names

PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
INSTALL = "pip install 'opentelemetry-exporter-otlp-proto-http>=1.45,<1.46'"
"""The command that installs the packages of the extra `otel`. The exporter needs the SDK of its own version."""

_EXAMPLE = "endpoint: http://127.0.0.1:4318"
_SIGNAL_PATH = re.compile(r"/v1/(?:traces|metrics|logs)/*$")
_RESERVED_HEADERS = dict.fromkeys(
    ("host", "content-length", "content-type", "content-encoding", "transfer-encoding", "connection", "te"),
    "remove it. The exporter sets it for each request",
)


class OtelSettings(Section):
    """Where to send spans and metrics with OpenTelemetry."""

    endpoint: str | None = None
    """The URL of an OTLP collector over HTTP, before /v1/traces. Default: OTEL_EXPORTER_OTLP_ENDPOINT, or
    http://localhost:4318."""
    headers: Mapping[str, Secret] = Field(default_factory=dict)
    """Headers for the collector, such as its key."""
    traces: bool = True
    """Send spans, and pass the trace context on to upstreams."""
    metrics: bool = True
    """Send metrics."""

    @field_validator("endpoint")
    @classmethod
    def _is_base_url(cls, url: str | None) -> str | None:
        if url is None:
            return None
        check_url(url, example=_EXAMPLE, key='headers: {authorization: "${OTLP_KEY}"}', query=_EXAMPLE)
        if (path := _SIGNAL_PATH.search(url)) is not None:
            raise wrong(f"must end before {path[0]}, which the proxy appends", fix=_EXAMPLE)
        return url.rstrip("/")

    @field_validator("headers", mode="before")
    @classmethod
    def _has_header_names(cls, headers: object) -> object:
        return checked_header_names(headers, _RESERVED_HEADERS)

    @model_validator(mode="after")
    def _can_export(self) -> OtelSettings:
        if not self.traces and not self.metrics:
            raise wrong("sends nothing with traces: false and metrics: false", fix="otel: null", shows=False)
        if not has_packages():
            raise wrong("needs packages that aren't installed", fix=f"run {INSTALL}, or write otel: null", shows=False)
        return self


def has_packages() -> bool:
    """Return whether the optional packages are installed."""
    return all(map(_is_installed, PACKAGES))


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a package above it is missing
        return False
