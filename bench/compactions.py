"""First compactions: their CPU, and the latency of small requests next to them.

A first compaction is that of a conversation whose messages the process has never seen. No model can write
summaries, so the summary is an extract. LangChain's ``SummarizationMiddleware`` compacts the same conversations,
with an exact count, but it has no index, no archive, and no records.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, cycle, islice, repeat, takewhile
from statistics import median, quantiles

import uvloop

from bench import bodies, servers
from bench.bodies import CHAT
from bench.client import ask, check, connection, request
from bench.quality.langchain import langchain
from bench.rows import MILLI, Row, Scale
from bench.servers import Place, Server

AT_ONCE, OTHERS = 4, 4
"""Large requests at once, and the connections that send small ones next to them."""
BESIDE_SECONDS = 1.0
"""The pass-through forwards the same bodies again and again for this time, because it is soon done with them."""
IDLE_SECONDS = 0.05
"""A server is idle when it uses hardly any CPU in this time."""
IDLE_CPU = 0.0005


@dataclass(frozen=True, slots=True)
class Size:
    """Conversations of one size, and the model that gets them.

    ``expected`` are the values of ``x-compaction`` and ``x-compaction-summary``.
    """

    name: str
    model: str
    length: int
    messages: int
    expected: tuple[str, str] = ("compacted", "digest")

    def conversation(self, seed: int) -> bytes:
        """Return a request with a conversation that has no message in common with another seed's, except the last."""
        return request(CHAT.conversation(self.model, self.length, self.messages, seed=seed))

    def conversations(self) -> Iterator[bytes]:
        """Yield requests with new conversations."""
        return map(self.conversation, _seeds)


LARGE = (bodies.CONVERSATION_BYTES, bodies.CONVERSATION_MESSAGES)
_seeds = count(10_000)

SIZES = (
    Size("first compaction of 110 KB, window of 16K", "bench-16k", bodies.SHORT_BYTES, bodies.SHORT_MESSAGES),
    Size("first compaction of 1.1 MB, window of 64K", "bench-64k", *LARGE),
    Size("first count of 1.1 MB", "bench-1m", *LARGE, expected=("none", "")),
)


def first(place: Place, scale: Scale, apis: Sequence[str]) -> list[Row]:
    """Measure the CPU of first compactions and of first counts."""
    rows = []
    with contextlib.ExitStack() as stack:
        theirs, ours = stack.enter_context(place.both(summarizes=False))
        with servers.pinned(place.core):  # LangChain's process inherits the core.
            other = stack.enter_context(langchain())
        for size, times in zip(SIZES, (*scale.compactions, scale.compactions[1]), strict=True):
            check(ask(ours, size.conversations(), 1).last, size.expected, size.name)
            plain, compared = Row(f"{size.name}: CPU", "ms"), Row(f"{size.name}: CPU", "ms", compared="LangChain")
            for _ in range(scale.rounds):
                seeds = [next(_seeds) for _ in range(times)]
                for server in (theirs, ours):
                    cpu = median(_cpu(server, size.conversation(seed)) for seed in seeds)
                    plain.add(MILLI * cpu, ours=server is ours)
                if other is not None and size.expected[0] == "compacted":
                    compared.add(plain.proxy[-1], ours=True)
                    chats = (bodies.messages(size.length, size.messages, seed=seed) for seed in seeds)
                    cpu = median(other.cpu(chat, bodies.WINDOWS[size.model]) for chat in chats)
                    compared.add(MILLI * cpu, ours=False)
            rows += [plain, compared]
    return [row for row in rows if row.proxy]


def beside(place: Place, scale: Scale, apis: Sequence[str]) -> list[Row]:
    """Measure the latency of small requests next to ``AT_ONCE`` large ones."""
    rows = []
    with place.both(summarizes=False) as both:
        for server in both:
            for size in SIZES:
                ask(server, size.conversations(), 1)
        for size, times in zip(SIZES, (*scale.beside, scale.beside[1]), strict=True):
            made = [Row(f"small, next to {AT_ONCE} at once ({size.name}): {kind}", "ms") for kind in ("median", "p99")]
            for _ in range(scale.rounds):
                sent = [*islice(size.conversations(), times)]
                _round(both, size, [sent[start : start + AT_ONCE] for start in range(0, times, AT_ONCE)], made)
            rows += made
    return rows


def _round(both: tuple[Server, Server], size: Size, bursts: Sequence[Sequence[bytes]], rows: Sequence[Row]) -> None:
    passthrough, proxy = both
    for server, chosen in ((passthrough, _during(bursts)), (proxy, bursts)):
        latencies, last = uvloop.run(_beside(server, chosen))
        if server is proxy:
            check(last, size.expected, size.name)
        figures = (median(latencies), quantiles(latencies, n=100, method="inclusive")[98])
        for row, seconds in zip(rows, figures, strict=True):
            row.add(MILLI * seconds, ours=server is proxy)


async def _beside(server: Server, bursts: Iterable[Sequence[bytes]]) -> tuple[list[float], bytes]:
    """Send bursts of large requests at once, and small ones until each burst is answered.

    Return the seconds of the small ones, and one response to a large one.
    """
    latencies: list[float] = []
    last = b""
    for burst in bursts:
        busy = [await connection(server, iter((sent,)), []) for sent in burst]
        ended = asyncio.Event()
        small = _until(ended, request(CHAT.small()))
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


def _cpu(server: Server, sent: bytes) -> float:
    """Return the CPU seconds of a request, until the server is idle again."""
    before = server.cpu
    ask(server, iter([sent]), 1)
    latest = server.cpu
    while True:
        time.sleep(IDLE_SECONDS)
        earlier, latest = latest, server.cpu
        if latest - earlier < IDLE_CPU:
            return earlier - before
