"""The calls to models behind a record, attempts to send a request or one call to a summary model, and their metrics.

Their attributes follow OpenTelemetry's conventions for generative AI. The names aren't stable yet.
Source: github.com/open-telemetry/semantic-conventions-genai.

The labels of metrics are names from the configuration. A model that the configuration doesn't name has no label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from functools import lru_cache
from urllib.parse import urlsplit

import msgspec
from opentelemetry.metrics import Meter

from proxy.telemetry.record import ACCEPTED, RequestRecord, UpstreamCall, Usage

OPERATION = "chat"
"""The operation of all three APIs."""

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

Upstream = tuple[str, str | None]
"""The provider of an upstream by its name in LiteLLM, and its base URL."""

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
    """Return the start of a record, in nanoseconds since 1970."""
    return int(record.time * 1e9)


def end_of(record: RequestRecord) -> int:
    """Return the end of a record, in nanoseconds since 1970."""
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
        yield Operation(
            attempt.id,
            attempt.start,
            max(attempt.start, end),
            number,
            call,
            _usage_of(record, call),
            _error_of(record, call, last=number == last),
            _is_compacted(record, call, last=number == last),
        )


def _usage_of(record: RequestRecord, call: UpstreamCall | None) -> Usage | None:
    """Return the usage of an attempt. A record with one attempt states it once."""
    if len(record.calls) < 2:
        return record.usage
    return None if call is None else call.usage


def _error_of(record: RequestRecord, call: UpstreamCall | None, *, last: bool) -> str | None:
    if call is not None and call.result not in (ACCEPTED, "error"):
        return call.result
    if call is not None and call.status is not None and call.status >= 400:
        return str(call.status)
    return record.error if last else None


def _is_compacted(record: RequestRecord, call: UpstreamCall | None, *, last: bool) -> bool:
    if last:
        return record.verdict == "compacted"
    return call is not None and call.tokens is not None and call.tokens != record.before


def _nanoseconds(milliseconds: float) -> int:
    return int(milliseconds * 1e6)


@lru_cache(1_000)
def attributes_of(name: str, upstream: Upstream | None) -> Attributes:
    """Return the attributes of all calls to an upstream."""
    attributes: dict[str, str | int] = {"gen_ai.operation.name": OPERATION, "compaction.upstream": name}
    if upstream is None:
        return attributes
    provider, base_url = upstream
    attributes["gen_ai.provider.name"] = _PROVIDERS.get(provider, provider)
    if base_url is not None and (address := urlsplit(base_url)).hostname:
        attributes["server.address"] = address.hostname
        attributes["server.port"] = address.port or _PORTS[address.scheme]
    return attributes


DURATION, USAGE = "gen_ai.client.operation.duration", "gen_ai.client.token.usage"

# The conventions' buckets.
_SECONDS = tuple(0.01 * 2**power for power in range(14))
_TOKENS = tuple(float(4**power) for power in range(14))


class OperationMetrics:
    """Histograms of the duration and the tokens of calls to models. ``add`` is a sink of the recorder."""

    def __init__(self, meter: Meter, upstreams: FindUpstream, models: Callable[[], Set[str]]) -> None:
        """``models`` returns the configured models."""
        self._upstreams = upstreams
        self._models = models
        self._durations = meter.create_histogram(
            DURATION, "s", "Duration of calls to models.", explicit_bucket_boundaries_advisory=_SECONDS
        )
        self._usages = meter.create_histogram(
            USAGE, "{token}", "Tokens that calls to models used.", explicit_bucket_boundaries_advisory=_TOKENS
        )

    def add(self, record: RequestRecord) -> None:
        """Count the calls of a finished record."""
        shared = self._labels(record)
        for operation in operations(record):
            error = {} if operation.error is None else {"error.type": operation.error}
            self._durations.record((operation.end - operation.start) / 1e9, {**shared, **error})
            if (usage := operation.usage) is not None:
                for kind, tokens in (("input", usage.input), ("output", usage.output)):
                    if tokens is not None:
                        self._usages.record(tokens, {**shared, "gen_ai.token.type": kind})

    def _labels(self, record: RequestRecord) -> Attributes:
        upstream, model = record.upstream or "", record.upstream_model
        named = {
            "compaction.team": record.team,
            "compaction.policy": record.policy,
            "gen_ai.request.model": model if model in self._models() else None,
        }
        return {
            **attributes_of(upstream, self._upstreams(upstream)),
            "compaction.kind": record.kind,
            **{label: value for label, value in named.items() if value is not None},
        }
