"""The record of one request: names and figures, never content.

Headers, the log line, metrics, the ledger, and spans are derived from it. It also has the place of the request in a
distributed trace, by W3C Trace Context.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import MutableMapping
from contextvars import ContextVar
from functools import lru_cache
from random import getrandbits
from typing import Any, Literal

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
    ``method`` and ``scheme`` are those of the HTTP request.
    """

    id: str
    span: str
    sampled: bool
    parent: str | None = None
    state: str = ""
    method: str = ""
    scheme: str = "http"
    attempts: list[AttemptSpan] = []

    def attempt(self) -> str:
        span = new_span()
        self.attempts.append(AttemptSpan(span, time.time_ns()))
        return span

    def child(self, span: str) -> Trace:
        """Return the trace of a call that the request caused, with the id of its span."""
        return Trace(self.id, span, self.sampled, self.span, self.state)


def new_span() -> str:
    return f"{_random(64):016x}"


def new_trace() -> tuple[str, str]:
    return f"{_random(128):032x}", f"{_random(64):016x}"


def with_trace(headers: list[tuple[str, str]], trace: Trace | None, span: str | None = None) -> list[tuple[str, str]]:
    """Return headers for an upstream, with a `traceparent` of the proxy in place of the client's.

    ``span`` is the span that the upstream continues. Default: the request's. Without a trace the headers don't change.
    """
    if trace is None:
        return headers
    # `tracestate` without a valid `traceparent` has no meaning.
    dropped = (TRACEPARENT, TRACESTATE) if trace.parent is None else (TRACEPARENT,)
    flags = "01" if trace.sampled else "00"
    parent = (TRACEPARENT, f"00-{trace.id}-{span or trace.span}-{flags}")
    return [*(pair for pair in headers if pair[0] not in dropped), parent]


Verdict = Literal["none", "compacted", "shadow", "off", "failed", "unsupported", "refused"]

RECORD = "compaction.record"  # the key of the record in the ASGI scope

ID_LENGTH = 24

_TIME_DIGITS = 14

HIDDEN_MODEL = "(hidden)"  # Replaces text that doesn't look like a model's name. No name that is shown has parentheses.

_MODEL_NAME = re.compile(r"[\w./:@+-]{1,128}", re.ASCII)

_CLIENT = re.compile(r"[A-Za-z][\w.-]{0,39}(?:/[\w.+-]{1,40})?(?: v?\d[\w.+-]{0,30})?", re.ASCII)

# Keys of providers by their prefix, JSON Web Tokens, and keys without any punctuation.
_PROVIDER_KEY = re.compile(
    r"""(?:^|[/:@])(?:
        (?:sk|pk|rk)[-_] | eyJ[\w-]{8}
      | (?:gsk|xai|hf|r8|fw|csk|pplx|tvly|gh[pousr]|github_pat)[-_][A-Za-z0-9]{16} | (?:nvapi|glpat)-[\w-]{20}
      | AIza[\w-]{30} | (?:AKIA|ASIA)[A-Z0-9]{16}
    )
    | \A(?=\D*\d)[A-Za-z0-9]{32,}\Z""",
    re.ASCII | re.VERBOSE,
)

ACCEPTED, OVERFLOW = "accepted", "overflow"
"""Results of a call: the upstream answered, or refused the prompt as too long."""

CONTINUED = "continued"  # the result of a call that continued a response after the model read archived messages
CANCELED = "canceled"  # the error of a call to a summary model that the proxy ended itself


class Reason(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why the proxy compacted a request, or would have in shadow mode, or why it sent the request again."""

    trigger: str
    level: int | None = None
    size: int | None = None
    share: float | None = None


TIERS = ("flex", "priority", "balanced", "ultrafast")  # service tiers with prices of their own


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """The usage that an upstream reported, in its tokens. ``None``: not reported.

    ``tier`` is one of ``TIERS``, or ``fast`` for Anthropic's speed. ``compactions`` are the provider's own
    compactions and calls of other models during the request, included in the sums. Such a call has a ``model``.
    """

    input: int | None = None
    output: int | None = None
    cache_read: int | None = None
    cache_write: int | None = None
    cache_write_1h: int | None = None
    reasoning: int | None = None
    audio_input: int | None = None
    audio_output: int | None = None
    image_input: int | None = None
    image_output: int | None = None
    searches: int | None = None
    tier: str | None = None
    region: str | None = None
    compactions: tuple[Usage, ...] = ()
    estimated: bool = False
    model: str | None = None

    def plus(self, other: Usage) -> Usage:
        return Usage(*(_sum(getattr(self, name), getattr(other, name)) for name in self.__struct_fields__))

    def negative(self) -> Usage:
        """Return the usage with negative numbers, to subtract it. It isn't marked as estimated."""
        return Usage(*(_negative(getattr(self, name)) for name in self.__struct_fields__))

    @property
    def without_compactions(self) -> Usage:
        """Return the usage of the answer alone."""
        if not self.compactions:
            return self
        left: dict[str, int | None] = {}
        for name in ("input", "output", "cache_read", "cache_write", "cache_write_1h"):
            total = getattr(self, name)
            left[name] = total and max(0, total - sum(getattr(one, name) or 0 for one in self.compactions))
        return msgspec.structs.replace(self, compactions=(), **left)


class UpstreamErrorNames(msgspec.Struct, frozen=True, omit_defaults=True):
    """The names in an upstream's error. ``None``: omitted, or not a name."""

    code: str | None = None
    type: str | None = None
    param: str | None = None

    @property
    def stated(self) -> dict[str, str]:
        """Return the names that the error has."""
        names = {"code": self.code, "type": self.type, "param": self.param}
        return {field: name for field, name in names.items() if name is not None}


class UpstreamCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """One attempt to send the request. ``usage`` is its part of the record's, if the record has several attempts."""

    result: str
    status: int | None = None
    ms: float = 0.0
    tokens: int | None = None
    limit: int | None = None
    error: UpstreamErrorNames | None = None
    usage: Usage | None = None


class Cost(msgspec.Struct, frozen=True, omit_defaults=True):
    """The price of a request, in parts of ``PICO``. ``forecast`` is only for shadow mode, and includes summaries."""

    sent: int = 0
    as_received: int = 0
    forecast: int | None = None
    estimated: bool = False

    def plus(self, other: Cost) -> Cost:
        return Cost(
            self.sent + other.sent,
            self.as_received + other.as_received,
            _sum(self.forecast, other.forecast),
            self.estimated or other.estimated,
        )


def _sum(ours: Any, theirs: Any) -> Any:
    """Return the sum of two numbers or lists, and otherwise the later value, or whether one of two is true."""
    if ours is None or theirs is None:
        return theirs if ours is None else ours
    if isinstance(ours, str):
        return theirs
    return ours or theirs if isinstance(ours, bool) else ours + theirs


def _negative(value: Any) -> Any:
    """Return the opposite of a number, and a neutral value for anything else."""
    if isinstance(value, bool):
        return False
    return -value if isinstance(value, int) else () if isinstance(value, tuple) else None


class Window(msgspec.Struct, frozen=True, omit_defaults=True):
    """The parts of the sent prompt, and the room for the response, in tokens as the proxy counts them.

    ``size`` is the tokens that prompt and response share, or those of the prompt if ``answer`` is 0. ``None``: unknown.
    """

    size: int | None = None
    instructions: int = 0
    tools: int = 0
    summary: int = 0
    answer: int = 0


class Refusal(msgspec.Struct, frozen=True, omit_defaults=True):
    """The team's limit that refused a request: its name in the settings, its size, and what had been used.

    ``again`` is when requests are accepted again, in seconds since 1970.
    """

    limit: str
    size: str
    again: float
    used: str | None = None


class RequestRecord(msgspec.Struct, eq=False, omit_defaults=True):
    """One request to the proxy, or one call to a summary model. ``record_json.FIELDS`` describes its fields.

    ``time`` is in seconds since 1970. ``before``, ``sent``, and ``forecast`` are in tokens. ``retention`` has the names
    of each kind that are kept in the prompt, only in the archive, and lost.
    """

    id: str
    time: float
    kind: Literal["request", "summary"] = "request"
    parent: str | None = None
    api: str = "other"
    path: str = ""
    stream: bool = False
    tenant: str = ""
    team: str | None = None
    key: str | None = None
    client: str | None = None
    conversation: str | None = None
    user: str | None = None
    policy: str | None = None
    model: str | None = None
    upstream: str | None = None
    upstream_model: str | None = None
    verdict: Verdict = "none"
    reason: Reason | None = None
    steps: tuple[str, ...] = ()
    checkpoints: int = 0
    before: int | None = None
    sent: int | None = None
    forecast: int | None = None
    window: Window | None = None
    fits: bool = True
    summary: str | None = None
    cause: str | None = None
    replaced: str | None = None
    breaker_open: bool = False
    output: int | None = None
    calls: list[UpstreamCall] = []
    usage: Usage | None = None
    cost: Cost | None = None
    status: int = 0
    error: str | None = None
    refused_by: Refusal | None = None
    phases: dict[str, float] = {}
    archive: list[str] = []
    recalls: int = 0
    retention: dict[str, tuple[int, int, int]] = {}
    state: int = 0
    unloaded: list[str] = []
    edited: list[str] = []
    bytes_in: int = 0
    bytes_out: int = 0
    trace: Trace | None = None

    def spent(self, phase: str, milliseconds: float) -> None:
        self.phases[phase] = round(self.phases.get(phase, 0.0) + milliseconds, 3)

    @property
    def own_time(self) -> float | None:
        """Return the proxy's milliseconds until the first byte, without the body, summaries, and the upstream.

        ``None`` if they aren't known: a heartbeat begins a stream before the upstream's response.
        """
        phases = self.phases
        if not self.calls or "first_byte" not in phases:
            return None
        others = phases.get("body", 0.0) + phases.get("summary", 0.0) + sum(call.ms for call in self.calls)
        spent = phases["first_byte"] - others
        return round(spent, 3) if spent >= 0 else None

    @property
    def retries(self) -> int:
        """Return the number of attempts after the first."""
        return max(0, sum(call.result != CONTINUED for call in self.calls) - 1)

    @property
    def never_overflowed(self) -> bool:
        return all(call.result not in (OVERFLOW, "empty") for call in self.calls)

    @property
    def failed(self) -> bool:
        """Return whether the response was an error, or had one."""
        return self.status >= 400 or self.error is not None

    @property
    def upstream_error(self) -> UpstreamErrorNames | None:
        """Return the names in the upstream's last error; ``None`` if there was none."""
        return next((call.error for call in reversed(self.calls) if call.error is not None), None)

    @property
    def share_kept(self) -> float | None:
        """Return the share of the counted names that the prompt has; ``None`` if none were counted."""
        counts = self.retention.values()
        return sum(kept for kept, *_ in counts) / sum(map(sum, counts)) if counts else None


current: ContextVar[RequestRecord | None] = ContextVar("request_record", default=None)
"""The record of the request that this task works for. Log lines name it."""


def summary_record(parent: RequestRecord, upstream: str, model: str) -> RequestRecord:
    """Return the record of a call to a summary model, made for a request."""
    return RequestRecord(
        new_id(),
        time.time(),
        "summary",
        parent.id,
        api=parent.api,
        tenant=parent.tenant,
        team=parent.team,
        key=parent.key,
        conversation=parent.conversation,
        user=parent.user,
        policy=parent.policy,
        model=shown_model(model),
        upstream=upstream,
        upstream_model=shown_model(model),
    )


def shown_model(model: str) -> str:
    """Return a model's name, or ``HIDDEN_MODEL`` for text that isn't one or that looks like a key.

    The client may send any text as a model's name, even a key.
    """
    return model if _MODEL_NAME.fullmatch(model) and not _has_key(model) else HIDDEN_MODEL


def shown_client(agent: str) -> str | None:
    """Return the product and the version in a ``user-agent``, as in ``OpenAI/Python 2.1.0``; ``None`` without one."""
    found = _CLIENT.match(agent)
    return None if found is None else HIDDEN_MODEL if _has_key(found[0]) else found[0]


@lru_cache(1_000)  # the search takes longer than many other steps of a request
def _has_key(short: str) -> bool:
    return _PROVIDER_KEY.search(short) is not None


def new_id() -> str:
    """Return an id for a request: 14 hex digits of the time in microseconds, and 10 random ones. Ids sort by time."""
    # Ids needn't be secret. `os.urandom` takes longer, and gives up the interpreter lock.
    return f"{time.time_ns() // 1_000:014x}{getrandbits(40):010x}"


def first_id(seconds: float) -> str:
    """Return the lowest id of a time in seconds since 1970."""
    return f"{max(0, int(seconds * 1_000_000)):0{_TIME_DIGITS}x}".ljust(ID_LENGTH, "0")


def record_of(scope: MutableMapping[str, Any]) -> RequestRecord:
    """Return the record in an ASGI scope. Add one if there is none, as in a test of a single endpoint."""
    record: RequestRecord | None = scope.get(RECORD)
    if record is None:
        record = RequestRecord(new_id(), time.time(), path=scope.get("path", ""))
        scope[RECORD] = record
    return record
