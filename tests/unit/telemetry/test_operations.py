"""Test which calls to models a record describes, with their times and errors."""

from __future__ import annotations

from typing import Any

from proxy.telemetry.operations import operations
from proxy.telemetry.record import RequestRecord, UpstreamCall, Usage
from proxy.telemetry.trace_context import AttemptSpan, Trace

SECOND = 1_000_000_000
START = 1_700_000_000


def record(*attempts: UpstreamCall | None, **values: Any) -> RequestRecord:
    """A record of ten seconds. Its attempts begin one second after each other. ``None``: the client left meanwhile."""
    made = RequestRecord("r", float(START), phases={"total": 10_000.0}, **values)
    spans = [AttemptSpan(f"{number:016x}", (START + number) * SECOND) for number in range(len(attempts))]
    made.trace = Trace("a" * 32, "b" * 16, sampled=True, attempts=spans)
    made.calls = [call for call in attempts if call is not None]
    return made


def test_an_attempt_ends_with_its_response_and_the_last_one_with_the_request() -> None:
    calls = UpstreamCall("overflow", 400, 500.0, 90), UpstreamCall("accepted", 200, 700.0, 50, usage=Usage(50, 5))
    one, two = operations(record(*calls, before=90, verdict="compacted", status=200, usage=Usage(50, 5)))
    assert (one.start, one.end) == (START * SECOND, START * SECOND + SECOND // 2)
    assert (two.start, two.end) == ((START + 1) * SECOND, (START + 10) * SECOND)
    assert (one.error, two.error) == ("overflow", None)
    assert (one.compacted, two.compacted) == (False, True)
    assert (one.usage, two.usage) == (None, Usage(50, 5))
    assert (one.number, two.number) == (0, 1)


def test_errors_are_statuses_results_or_codes() -> None:
    (refused,) = operations(record(UpstreamCall("error", 401, 5.0), status=401))
    (lost,) = operations(record(UpstreamCall("upstream_timeout", None, 5.0), status=504, error="upstream_timeout"))
    (broken,) = operations(record(UpstreamCall("accepted", 200, 5.0), status=200, error="upstream_interrupted"))
    (left,) = operations(record(None, status=499, error="client_disconnected"))
    assert [one.error for one in (refused, lost, broken, left)] == [
        "401",
        "upstream_timeout",
        "upstream_interrupted",
        "client_disconnected",
    ]
    assert lost.end - lost.start == SECOND // 200
    assert left.end == (START + 10) * SECOND


def test_a_summary_is_one_call() -> None:
    call = record(kind="summary", status=503)
    (operation,) = operations(call)
    assert (operation.span, operation.error) == ("b" * 16, "503")
    assert operation.end - operation.start == 10 * SECOND


def test_without_a_trace_there_are_none() -> None:
    assert list(operations(RequestRecord("r", 0.0))) == []
