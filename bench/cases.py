"""The requests sent to both servers. Rounds alternate between the pass-through and the proxy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from statistics import median

import uvloop

from bench import bodies
from bench.client import Broken, Caller, Load, concurrent, request, sequential, verdicts
from bench.figures import MICRO, MILLI, Row, Scale, Target
from bench.servers import Server

AT_ONCE = (16, 64)
SMALL: Mapping[str, tuple[float, float, float]] = {
    "chat": (1.25, 1.35, 1.35),
    "responses": (1.4, 1.6, 1.55),
    "messages": (1.4, 1.6, 1.55),
}
"""The targets of a small request alone, and of 16 and 64 at once."""
SLOW = 150
BURST = 2_000
PACED = 200
WARM_UP = 5


@dataclass(frozen=True, slots=True)
class Case:
    """Requests, of which ``times`` are sent per round to each server, over ``at_once`` connections.

    ``rows`` receive each round's CPU per request and the median latency, in this order. A CPU figure is divided by
    ``per``. ``expected`` has the values that the proxy must return in ``x-compaction`` and ``x-compaction-summary``.
    After ``warm`` requests all connections, counts, and summaries are cached.
    """

    requests: Iterator[bytes]
    times: int
    rows: Sequence[Row]
    per: int = 1
    at_once: int = 1
    expected: tuple[str, str] = ("none", "")
    warm: int = WARM_UP

    def warm_up(self, caller: Caller) -> bytes:
        """Send the first requests. Return the last response."""
        return [caller.ask(next(self.requests)) for _ in range(self.warm)][-1]

    def load(self, server: Server, caller: Caller) -> Load:
        """Run one round on one server."""
        if self.at_once == 1:
            return sequential(server, caller, self.requests, self.times)
        return uvloop.run(concurrent(server, self.requests, self.times, self.at_once))


def usual(scale: Scale, apis: Sequence[str]) -> list[Case]:
    """Return the usual cases of some APIs. Chat completions have more cases than the others."""
    return [
        case for api in apis for case in (_small(scale, api) + (_chat(scale) if api == "chat" else _key(scale, api)))
    ]


def known(scale: Scale, apis: Sequence[str], *, large: bool) -> list[Case]:
    """Return the cases of an agent's turn: a conversation of 100 KB or 1.1 MB of which only the last message is new."""
    name, size, count = "100 KB", 100_000, bodies.SHORT_MESSAGES
    if large:
        name, size, count = "1.1 MB", bodies.CONVERSATION_BYTES, bodies.CONVERSATION_MESSAGES
    made = []
    for api in (bodies.APIS[each] for each in apis):
        for many, at_most in ((1, 0.8), (4, 1.0)) if large else ((1, 1.5), (16, 1.8)):
            turns = api.turns("bench-1m", size, count, conversations=many)
            place = f"{api.name}, {name} with a new last message" + (f", {many} at once" if many > 1 else "")
            made.append(
                Case(
                    # A generator would read the path of the last API.
                    map(partial(request, path=api.path), turns),
                    scale.large if large else 4 * scale.large,
                    [Row(f"{place}: CPU", "ms", Target("ratio", at_most)), Row(f"{place}: latency", "ms")],
                    at_once=many,
                    warm=max(WARM_UP, 2 * many),
                )
            )
    if large and "chat" in apis:
        # The facts about all their messages fit in the cache, unless it charges much more than it holds.
        many, turns = scale.conversations, bodies.CHAT.turns("bench-128k", conversations=scale.conversations)
        name = f"chat, 1.1 MB, {many} conversations in turn, stored summaries put in: CPU"
        row = Row(name, "ms", Target("figure", 10.0))
        made.append(Case(map(request, turns), many, [row], expected=("compacted", "stored"), warm=2 * many))
    return made


def _small(scale: Scale, name: str) -> list[Case]:
    api = bodies.APIS[name]
    made = []
    for many, at_most in zip((1, *AT_ONCE), SMALL[name], strict=True):
        place = f"{name}, small" + (f", {many} at once" if many > 1 else "")
        made.append(
            Case(
                repeat(request(api.small(), api.path)),
                scale.small if many == 1 else scale.at_once,
                [Row(f"{place}: CPU", "ms", Target("ratio", at_most)), Row(f"{place}: latency", "ms")],
                at_once=many,
            )
        )
    return made


def _key(scale: Scale, name: str) -> list[Case]:
    api = bodies.APIS[name]
    large = f"{name}, 1.1 MB conversation"
    return [
        Case(
            repeat(request(api.conversation("bench-1m"), api.path)),
            scale.large,
            [Row(f"{large}, counts known: CPU", "ms", Target("ratio", 0.9)), Row(f"{large}: latency", "ms")],
        ),
        Case(
            repeat(request(api.small(stream=True, user=f"burst-{BURST}"), api.path)),
            scale.streams,
            [Row(f"{name}, stream chunk, burst of {BURST:,}: CPU", "µs", Target("ratio", 1.1))],
            per=BURST,
        ),
    ]


def _chat(scale: Scale) -> list[Case]:
    slow = repeat(request(bodies.small(user=f"slow-{SLOW}")))
    same = repeat(request(bodies.conversation("bench-1m")))
    spliced = repeat(request(bodies.conversation("bench-128k")))
    short = repeat(request(bodies.conversation("bench-16k", 100_000, bodies.SHORT_MESSAGES)))
    burst = repeat(request(bodies.small(stream=True, user=f"burst-{BURST}")))
    paced = repeat(request(bodies.small(stream=True, user=f"paced-{PACED}")))
    large = "1.1 MB conversation"
    return [
        Case(
            slow,
            scale.slow,
            [Row(f"small, {AT_ONCE[0]} at once, upstream takes {SLOW} ms: CPU", "ms", Target("ratio", 1.4))],
            at_once=AT_ONCE[0],
        ),
        Case(
            same,
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
            short,
            scale.large,
            [
                Row("100 KB conversation, stored summary put in: CPU", "ms", Target("figure", 1.5)),
                Row("100 KB conversation, stored summary: latency", "ms"),
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
    passthrough: Server, proxy: Server, chosen: Sequence[Case], rounds: int, step: Callable[[], None]
) -> list[Row]:
    """Return the rows of the cases. Call ``step`` after each round.

    Raises ``Broken`` if the proxy's headers differ from those that a case expects.
    """
    theirs, ours = Caller(passthrough), Caller(proxy)
    for case in chosen:
        case.warm_up(theirs)
        reported = verdicts(case.warm_up(ours))
        if reported != case.expected:
            raise Broken(f"{case.rows[0].name}: the proxy reported {reported} instead of {case.expected}")
    for _ in range(rounds):
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
