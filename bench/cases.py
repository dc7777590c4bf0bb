"""The requests sent to both servers. Rounds alternate between the pass-through and the proxy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import uvloop

from bench import bodies
from bench.client import Broken, Caller, Load, concurrent, request, sequential, verdicts
from bench.figures import MICRO, MILLI, Row, Scale, Target
from bench.servers import Server

AT_ONCE = (16, 64)
SLOW = 150
BURST = 2_000
PACED = 200
WARM_UP = 5


@dataclass(frozen=True, slots=True)
class Case:
    """A request that is sent ``times`` per round to each server, over ``at_once`` connections.

    ``rows`` receive each round's CPU per request and the median latency, in this order. A CPU figure is divided by
    ``per``. ``expected`` has the values that the proxy must return in ``x-compaction`` and ``x-compaction-summary``.
    """

    sent: bytes
    times: int
    rows: Sequence[Row]
    per: int = 1
    at_once: int = 1
    expected: tuple[str, str] = ("none", "")

    def warm(self, caller: Caller) -> bytes:
        """Send the request until connections, counts, and summaries are cached. Return the last response."""
        return [caller.ask(self.sent) for _ in range(WARM_UP)][-1]

    def load(self, server: Server, caller: Caller) -> Load:
        """Run one round on one server."""
        if self.at_once == 1:
            return sequential(server, caller, self.sent, self.times)
        return uvloop.run(concurrent(server, self.sent, self.times, self.at_once))


def cases(scale: Scale, apis: Sequence[str]) -> list[Case]:
    """Return the cases of some APIs. Chat completions have more cases than the others."""
    return [case for api in apis for case in (_chat(scale) if api == "chat" else _key(scale, api))]


def _key(scale: Scale, name: str) -> list[Case]:
    api = bodies.APIS[name]
    large = f"{name}, 1.1 MB conversation"
    return [
        Case(
            request(api.small(), api.path),
            scale.small,
            [Row(f"{name}, small request: CPU", "ms", Target("ratio", 1.4)), Row(f"{name}, small: latency", "ms")],
        ),
        Case(
            request(api.conversation("bench-1m"), api.path),
            scale.large,
            [Row(f"{large}, counts known: CPU", "ms", Target("ratio", 0.9)), Row(f"{large}: latency", "ms")],
        ),
        Case(
            request(api.small(stream=True, user=f"burst-{BURST}"), api.path),
            scale.streams,
            [Row(f"{name}, stream chunk, burst of {BURST:,}: CPU", "µs", Target("ratio", 1.1))],
            per=BURST,
        ),
    ]


def _chat(scale: Scale) -> list[Case]:
    ratio = Target("ratio", 1.35)
    small = request(bodies.small())
    slow = request(bodies.small(user=f"slow-{SLOW}"))
    known = request(bodies.conversation("bench-1m"))
    spliced = request(bodies.conversation("bench-128k"))
    burst = request(bodies.small(stream=True, user=f"burst-{BURST}"))
    paced = request(bodies.small(stream=True, user=f"paced-{PACED}"))
    large = "1.1 MB conversation"
    return [
        Case(
            small,
            scale.small,
            [Row("small request: CPU", "ms", ratio), Row("small request: latency", "ms")],
        ),
        *(
            Case(
                small,
                scale.at_once,
                [Row(f"small, {many} at once: CPU", "ms", ratio), Row(f"small, {many} at once: latency", "ms")],
                at_once=many,
            )
            for many in AT_ONCE
        ),
        Case(
            slow,
            scale.slow,
            [Row(f"small, {AT_ONCE[0]} at once, upstream takes {SLOW} ms: CPU", "ms", Target("ratio", 1.4))],
            at_once=AT_ONCE[0],
        ),
        Case(
            known,
            scale.large,
            [Row(f"{large}, counts known: CPU", "ms", Target("ratio", 0.8)), Row(f"{large}: latency", "ms")],
        ),
        Case(
            spliced,
            scale.large,
            [
                Row(f"{large}, stored summary put in: CPU", "ms", Target("figure", 3.0)),
                Row(f"{large}, stored summary: latency", "ms"),
            ],
            expected=("compacted", "stored"),
        ),
        Case(
            burst,
            scale.streams,
            [Row(f"stream chunk, burst of {BURST:,}: CPU", "µs", Target("ratio", 1.0))],
            per=BURST,
        ),
        Case(paced, scale.streams, [Row("stream chunk, 1 ms apart: CPU", "µs")], per=PACED),
    ]


def measure(
    passthrough: Server, proxy: Server, scale: Scale, apis: Sequence[str], step: Callable[[], None]
) -> list[Row]:
    """Return the rows of some APIs' cases. Call ``step`` after each round.

    Raises ``Broken`` if the proxy's headers differ from those that a case expects.
    """
    chosen = cases(scale, apis)
    theirs, ours = Caller(passthrough), Caller(proxy)
    for case in chosen:
        case.warm(theirs)
        reported = verdicts(case.warm(ours))
        if reported != case.expected:
            raise Broken(f"{case.rows[0].name}: the proxy reported {reported} instead of {case.expected}")
    for _ in range(scale.rounds):
        for case in chosen:
            for server, caller in ((passthrough, theirs), (proxy, ours)):
                _record(case, case.load(server, caller), ours=server is proxy)
        step()
    theirs.close()
    ours.close()
    return [row for case in chosen for row in case.rows]


def _record(case: Case, load: Load, *, ours: bool) -> None:
    for row, seconds in zip(case.rows, (load.cpu / case.per, median(load.latencies)), strict=False):
        figure = seconds * (MICRO if row.unit == "µs" else MILLI)
        (row.proxy if ours else row.reference).append(figure)
