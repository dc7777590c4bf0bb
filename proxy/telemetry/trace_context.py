"""The place of a request in a distributed trace, by W3C Trace Context. Ids are in hexadecimal."""

from __future__ import annotations

import random
import time

import msgspec

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"

# Ids needn't be secret. The SDK makes them in the same way. `os.urandom` takes 5 µs.
_random = random.getrandbits


class AttemptSpan(msgspec.Struct, frozen=True, gc=False):
    """The span of an attempt: its id, and its start in nanoseconds since 1970."""

    id: str
    start: int


class Trace(msgspec.Struct, eq=False, omit_defaults=True):
    """The trace of a request, and the request's span in it.

    ``parent`` is the client's span, ``None`` if the proxy began the trace. ``state`` is the client's `tracestate`.
    ``method`` and ``scheme`` are those of the HTTP request. ``propagated`` is false if upstreams don't get the trace.
    """

    id: str
    span: str
    sampled: bool
    parent: str | None = None
    state: str = ""
    method: str = ""
    scheme: str = "http"
    propagated: bool = True
    attempts: list[AttemptSpan] = []

    def attempt(self) -> str:
        """Begin an attempt to send the request. Return the id of its span."""
        span = new_span()
        self.attempts.append(AttemptSpan(span, time.time_ns()))
        return span

    def child(self, span: str) -> Trace:
        """Return the trace of a call that the request caused, with the id of its span."""
        return Trace(self.id, span, self.sampled, self.span, self.state)


def new_span() -> str:
    return f"{_random(64):016x}"


def new_trace() -> tuple[str, str]:
    """Return random ids for a trace and its first span."""
    return f"{_random(128):032x}", f"{_random(64):016x}"


def with_trace(headers: list[tuple[str, str]], trace: Trace | None, span: str | None = None) -> list[tuple[str, str]]:
    """Return headers for an upstream, with a `traceparent` of the proxy in place of the client's.

    ``span`` is the span that the upstream continues. Default: the request's. Without a trace the headers don't change.
    """
    if trace is None or not trace.propagated:
        return headers
    # `tracestate` without a valid `traceparent` has no meaning.
    dropped = (TRACEPARENT, TRACESTATE) if trace.parent is None else (TRACEPARENT,)
    flags = "01" if trace.sampled else "00"
    parent = (TRACEPARENT, f"00-{trace.id}-{span or trace.span}-{flags}")
    return [*(pair for pair in headers if pair[0] not in dropped), parent]
