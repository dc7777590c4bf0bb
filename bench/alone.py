"""Figures of the proxy alone: start, memory, and delays of the event loop under load."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import count
from statistics import quantiles

import uvloop

from bench import bodies, calls, compactions
from bench.client import Broken, Caller, pings, request
from bench.figures import MILLI, Row, Scale, Target
from bench.servers import Server
from tests.kit.client import connected

PING_SECONDS = 0.005
SETTLING_SECONDS = 0.02
LOADING_SECONDS, LOADING_CPU = 0.5, 0.05
"""A server that uses less CPU in this time isn't loading a tokenizer."""

Start = Callable[[], AbstractContextManager[Server]]
Step = Callable[[], None]


def starts(passthrough: Start, proxy: Start, scale: Scale, step: Step) -> list[Row]:
    """Measure seconds from the start of the process to the first response, and memory.

    The memory is measured after that response, and again after the proxy has counted messages.
    """
    begun = Row("start to first answer", "s", Target("figure", 1.5))
    rest = Row("memory at rest", "MB", Target("figure", 140.0))
    counted = Row("memory, counting with o200k", "MB")
    known = request(bodies.conversation("bench-1m"))
    for _ in range(scale.starts):
        for start, ours in ((passthrough, False), (proxy, True)):
            with start() as server:
                caller = Caller(server)
                caller.ask(request(bodies.small()))
                _side(begun, ours).append(time.perf_counter() - server.spawned)
                time.sleep(0.2)
                _side(rest, ours).append(server.megabytes)
                if ours:
                    caller.ask(known)
                    time.sleep(0.2)
                    counted.proxy.append(server.megabytes)
                caller.close()
        step()
    return [begun, rest, counted]


def event_loop(passthrough: Server, proxy: Server, scale: Scale) -> list[Row]:
    """Measure the latency of ``GET /livez`` while the proxy counts large bodies for the first time.

    The pass-through has no such path. It returns 404 while it forwards the same bodies, so its figure is the delay that
    the machine itself causes.
    """
    usual = Row("/livez while 4 MB bodies are counted: p99", "ms", Target("figure", 20.0))
    worst = Row("/livez while 4 MB bodies are counted: worst", "ms")
    cold = [request(bodies.conversation("bench-4m", bodies.COLD_BYTES, seed=100 + n)) for n in range(scale.cold)]
    # The first count of a process loads the tokenizer.
    Caller(proxy).ask(request(bodies.conversation("bench-4m", bodies.COLD_BYTES, seed=99)))
    # A round has two bodies, so that it has enough pings for a 99th percentile.
    for some in (cold[start : start + 2] for start in range(0, scale.cold, 2)):
        for server, ours in ((passthrough, False), (proxy, True)):
            latencies = [MILLI * seconds for seconds in uvloop.run(_pinged(server, some, counted=ours))]
            _side(usual, ours).append(quantiles(latencies, n=100, method="inclusive")[98])
            _side(worst, ours).append(max(latencies))
    return [usual, worst]


async def _pinged(server: Server, cold: Sequence[bytes], *, counted: bool) -> list[float]:
    caller = Caller(server)

    def load() -> None:
        for sent in cold:
            answer = caller.ask(sent)
            if counted and b"\r\nx-compaction-tokens-before: " not in answer:
                raise Broken("a large body was not counted")

    busy = asyncio.ensure_future(asyncio.to_thread(load))
    latencies = await pings(server, PING_SECONDS, busy)
    await busy
    caller.close()
    return latencies


def cold(passthrough: Server, start: Start, scale: Scale) -> list[Row]:
    """Measure large conversations that a process gets for the first time. ``start`` starts the proxy."""
    name = "1.1 MB conversation"
    counted = Row(f"{name}, first sight: CPU", "ms")
    worst = Row("/livez while such conversations arrive: worst", "ms")
    talks = [request(bodies.conversation("bench-1m", seed=300 + n)) for n in range(1 + scale.large)]
    others = iter([request(bodies.conversation("bench-1m", seed=200 + n)) for n in range(6)])
    reference = Caller(passthrough)
    with start() as server:
        caller = Caller(server)
        _warm(server, caller, others)
        for sent in talks:
            counted.proxy.append(MILLI * _cpu(server, caller, sent))
            counted.reference.append(MILLI * _cpu(passthrough, reference, sent))
        caller.close()
    reference.close()
    with start() as server:
        caller = Caller(server)
        _warm(server, caller, others)
        caller.close()
        for pinged, ours in ((passthrough, False), (server, True)):
            _side(worst, ours).append(MILLI * max(uvloop.run(_pinged(pinged, talks, counted=ours))))
    return [counted, worst]


def _warm(server: Server, caller: Caller, others: Iterator[bytes]) -> None:
    """Send two conversations that no store has. The first one loads the tokenizers, and the second one uses them."""
    for _ in range(2):
        caller.ask(next(others))
        before = -LOADING_SECONDS
        while (now := server.cpu) - before > LOADING_CPU:
            before = now
            time.sleep(LOADING_SECONDS)


def _cpu(server: Server, caller: Caller, sent: bytes) -> float:
    """Return the CPU seconds of a request, with the work that a server does right after its response."""
    before = server.cpu
    caller.ask(sent)
    time.sleep(SETTLING_SECONDS)
    return server.cpu - before


def blocking(scale: Scale) -> list[Row]:
    """Measure how long a line of a first compaction may keep all other threads waiting, in this process."""
    size = compactions.SIZES[1]
    row = Row(f"longest hold of the interpreter next to a first compaction of {size.name}", "ms", Target("figure", 1.0))
    kind = calls.Kind(map(size.conversation, count(1)), compactions.EXTRACT)
    lines = calls.Lines()
    with calls.served(lines) as url, contextlib.closing(connected(url)) as connection:
        calls.ask(connection, row.name, kind)  # The first one loads the tokenizer.
        for _ in range(scale.rounds):
            lines.longest = 0.0
            calls.ask(connection, row.name, kind)
            row.proxy.append(MILLI * lines.longest)
    return [row]


def _side(row: Row, ours: bool) -> list[float]:
    return row.proxy if ours else row.reference
