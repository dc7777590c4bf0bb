"""The requests sent to both servers. Rounds alternate between the pass-through and the proxy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from statistics import median

from bench import bodies
from bench.bodies import APIS, CHAT, Api
from bench.client import ask, check, request
from bench.rows import MILLI, Row, Scale
from bench.servers import Place, Server

AT_ONCE = (1, 16, 64)
WARM_UP = 5
STORED = ("compacted", "stored")
THRESHOLD = {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20)}
"""By default, the C library returns the memory of a large body after each request, which causes page faults. Both
servers have this threshold for turns of 1.1 MB."""


@dataclass(frozen=True, slots=True)
class Case:
    """Requests, of which ``times`` are sent per round to each server, over ``at_once`` connections.

    ``rows`` have each round's CPU per request and the median latency, in this order.
    ``expected`` has the values that the proxy must return in ``x-compaction`` and ``x-compaction-summary``.
    After ``warm`` requests all connections, counts, and summaries are cached.
    """

    requests: Iterator[bytes]
    times: int
    rows: Sequence[Row]
    at_once: int = 1
    expected: tuple[str, str] = ("none", "")
    warm: int = WARM_UP


def requests(place: Place, scale: Scale, apis: Sequence[str]) -> list[Row]:
    """Measure small requests."""
    with place.both() as (theirs, ours):
        return measure(theirs, ours, [case for api in apis for case in small(scale, APIS[api])], scale.rounds)


def turns(place: Place, scale: Scale, apis: Sequence[str]) -> list[Row]:
    """Measure an agent's turns: conversations of 100 KB and 1.1 MB of which only the last message is new."""
    rows = []
    for large in (False, True):
        with place.both(environment=THRESHOLD if large else {}) as (theirs, ours):
            rows += measure(theirs, ours, known(scale, apis, large=large), scale.rounds)
    return rows


def small(scale: Scale, api: Api) -> list[Case]:
    """Return the cases of a small request."""
    sent = request(api.small(), api.path)
    return [
        Case(repeat(sent), max(scale.small, many), _both(f"{api.name}, small{_at_once(many)}"), at_once=many)
        for many in AT_ONCE
    ]


def known(scale: Scale, apis: Sequence[str], *, large: bool) -> list[Case]:
    """Return the cases of an agent's turn."""
    name, size, count = "100 KB", 100_000, bodies.SHORT_MESSAGES
    if large:
        name, size, count = "1.1 MB", bodies.CONVERSATION_BYTES, bodies.CONVERSATION_MESSAGES
    made = []
    for api in (APIS[each] for each in apis):
        for many in (1, 4) if large else (1, 16):
            bodies_ = api.turns("bench-1m", size, count, conversations=many)
            rows = _both(f"{api.name}, {name} with a new last message{_at_once(many)}")
            sent = map(partial(request, path=api.path), bodies_)  # A generator would read the path of the last API.
            times = scale.large if large else 4 * scale.large
            made.append(Case(sent, times, rows, at_once=many, warm=max(WARM_UP, 2 * many)))
    if large and "chat" in apis:
        # The facts about all their messages fit in the cache, unless it charges much more than it holds.
        many = scale.conversations
        row = Row(f"chat, 1.1 MB, {many} conversations in turn, stored summaries put in: CPU", "ms")
        sent = map(request, CHAT.turns("bench-128k", conversations=many))
        made.append(Case(sent, many, [row], expected=STORED, warm=2 * many))
    return made


def measure(passthrough: Server, proxy: Server, chosen: Sequence[Case], rounds: int) -> list[Row]:
    """Return the rows of the cases. Raises ``Broken`` if the proxy's headers differ from those that a case expects."""
    for case in chosen:
        ask(passthrough, case.requests, case.warm)
        check(ask(proxy, case.requests, case.warm).last, case.expected, case.rows[0].name)
    for _ in range(rounds):
        for case in chosen:
            for server in (passthrough, proxy):
                load = ask(server, case.requests, case.times, case.at_once)
                for row, seconds in zip(case.rows, (load.cpu, median(load.latencies)), strict=False):
                    row.add(MILLI * seconds, ours=server is proxy)
    return [row for case in chosen for row in case.rows]


def _both(name: str) -> list[Row]:
    return [Row(f"{name}: CPU", "ms"), Row(f"{name}: latency", "ms")]


def _at_once(many: int) -> str:
    return f", {many} at once" if many > 1 else ""
