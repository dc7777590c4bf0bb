"""First compactions: their CPU, and the latency of small requests next to them.

A first compaction is that of a conversation whose messages the process has never seen. No model can write
summaries, so the summary is an extract. LangChain's ``SummarizationMiddleware`` compacts the same conversations,
with an exact count, but it has no index, no archive, and no records.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, cycle, repeat, takewhile
from statistics import median, quantiles

import uvloop

from bench import bodies, servers
from bench.client import Broken, Caller, connection, request, verdicts
from bench.figures import MILLI, Row, Scale, Target
from bench.quality.langchain import LangChain
from bench.servers import Server

AT_ONCE, OTHERS = 4, 4
"""Large requests at once, and the connections that send small ones next to them."""
BESIDE_SECONDS = 1.0
"""The pass-through forwards the same bodies again and again for this time, because it is soon done with them."""
IDLE_SECONDS = 0.05
"""A server is idle when it uses hardly any CPU in this time."""
IDLE_CPU = 0.0005

EXTRACT = ("compacted", "digest")
Step = Callable[[], None]

configuration = partial(servers.configuration, summarizes=False)


@dataclass(frozen=True, slots=True)
class Size:
    """Conversations of one size, and the model that gets them. ``at_most`` is the target for a compaction in ms."""

    name: str
    model: str
    length: int
    messages: int
    at_most: float

    def conversation(self, seed: int) -> bytes:
        """Return a request with a conversation that has no message in common with another seed's, except the last."""
        return request(bodies.conversation(self.model, self.length, self.messages, seed=seed))


SIZES = (
    Size("110 KB", "bench-16k", bodies.SHORT_BYTES, bodies.SHORT_MESSAGES, 30.0),
    Size("1.1 MB", "bench-64k", bodies.CONVERSATION_BYTES, bodies.CONVERSATION_MESSAGES, 200.0),
)
COUNTED = Size("1.1 MB", "bench-1m", bodies.CONVERSATION_BYTES, bodies.CONVERSATION_MESSAGES, 0.0)

_seeds = count(10_000)


def first(passthrough: Server, proxy: Server, other: LangChain | None, scale: Scale, step: Step) -> list[Row]:
    """Measure the CPU of first compactions. Call ``step`` after each round."""
    theirs, ours = Caller(passthrough), Caller(proxy)
    rows = []
    for size in SIZES:
        name = f"first compaction of {size.name}, window of {size.model.removeprefix('bench-').upper()}: CPU"
        rows.append(Row(name, "ms", Target("figure", size.at_most)))
        rows.append(Row(name, "ms", Target("ratio", 1.0), compared="LangChain"))
        _check(ours.ask(size.conversation(next(_seeds))), EXTRACT)
    for _ in range(scale.rounds):
        for number, (size, times) in enumerate(zip(SIZES, scale.compactions, strict=True)):
            seeds = [next(_seeds) for _ in range(times)]
            sent = [size.conversation(seed) for seed in seeds]
            cpu = MILLI * median(_cpu(proxy, ours, each) for each in sent)
            plain, beside = rows[2 * number : 2 * number + 2]
            plain.proxy.append(cpu)
            plain.reference.append(MILLI * median(_cpu(passthrough, theirs, each) for each in sent))
            if other is not None:
                talks = [bodies.messages(size.length, size.messages, seed=seed) for seed in seeds]
                beside.proxy.append(cpu)
                beside.reference.append(MILLI * median(other.cpu(talk, bodies.WINDOWS[size.model]) for talk in talks))
        step()
    theirs.close()
    ours.close()
    return [row for row in rows if row.proxy]


def beside(passthrough: Server, proxy: Server, scale: Scale, step: Step) -> list[Row]:
    """Measure the latency of small requests next to ``AT_ONCE`` large ones. Call ``step`` after each round."""
    cases = [
        *((size, f"first compactions of {size.name}", EXTRACT, (2.0, 3.0)) for size in SIZES),
        (COUNTED, f"cold counts of {COUNTED.name}", ("none", ""), (1.4, 1.5)),
    ]
    for server in (passthrough, proxy):
        caller = Caller(server)
        for size, *_ in cases:
            caller.ask(size.conversation(next(_seeds)))
        caller.close()
    rows = []
    for number, (size, name, expected, targets) in enumerate(cases):
        of = [
            Row(f"small, next to {AT_ONCE} {name}: {kind}", "ms", Target("ratio", at_most))
            for kind, at_most in zip(("median", "p99"), targets, strict=True)
        ]
        times = scale.beside[0 if number == 0 else 1]
        for _ in range(scale.rounds):
            sent = [size.conversation(next(_seeds)) for _ in range(times)]
            bursts = [sent[start : start + AT_ONCE] for start in range(0, times, AT_ONCE)]
            for server, chosen in ((passthrough, _during(bursts)), (proxy, bursts)):
                latencies, last = uvloop.run(_beside(server, chosen))
                if server is proxy:
                    _check(last, expected)
                figures = (median(latencies), quantiles(latencies, n=100, method="inclusive")[98])
                for row, seconds in zip(of, figures, strict=True):
                    (row.proxy if server is proxy else row.reference).append(MILLI * seconds)
            step()
        rows += of
    return rows


async def _beside(server: Server, bursts: Iterable[Sequence[bytes]]) -> tuple[list[float], bytes]:
    """Send bursts of large requests at once, and small ones until each burst is answered.

    Return the seconds of the small ones, and one response to a large one.
    """
    latencies: list[float] = []
    last = b""
    for burst in bursts:
        busy = [await connection(server, iter((sent,)), []) for sent in burst]
        ended = asyncio.Event()
        small = _until(ended, request(bodies.small()))
        waiting = [await connection(server, small, latencies) for _ in range(OTHERS)]
        for caller in (*busy, *waiting):
            caller.begin()
        await asyncio.gather(*(caller.done for caller in busy))
        ended.set()
        await asyncio.gather(*(caller.done for caller in waiting))
        last = busy[-1].last
        for caller in (*busy, *waiting):
            caller.close()
    return latencies, last


def _until(ended: asyncio.Event, sent: bytes) -> Iterator[bytes]:
    return takewhile(lambda _: not ended.is_set(), repeat(sent))


def _during(bursts: Sequence[Sequence[bytes]]) -> Iterator[Sequence[bytes]]:
    """Yield the bursts again and again for ``BESIDE_SECONDS``."""
    latest = time.perf_counter() + BESIDE_SECONDS
    return takewhile(lambda _: time.perf_counter() < latest, cycle(bursts))


def _cpu(server: Server, caller: Caller, sent: bytes) -> float:
    """Return the CPU seconds of a request, until the server is idle again."""
    before = server.cpu
    caller.ask(sent)
    latest = server.cpu
    while True:
        time.sleep(IDLE_SECONDS)
        earlier, latest = latest, server.cpu
        if latest - earlier < IDLE_CPU:
            return earlier - before


def _check(answer: bytes, expected: tuple[str, str]) -> None:
    if (reported := verdicts(answer)) != expected:
        raise Broken(f"the proxy reported {reported} instead of {expected}")
