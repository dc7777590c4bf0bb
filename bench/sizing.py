"""``python -m bench.sizing``: measure the figures for sizing a fleet.

- CPU, memory, and rate of one worker and of two, for small requests
- CPU of a compacted turn, with a store in a file and on Redis
- what a conversation takes in the store, and its summary calls

It starts a Redis server of its own.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from statistics import median
from typing import Any

import click
import uvloop
import yaml
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from bench import bodies, servers
from bench.client import Broken, Caller, concurrent, request, sequential, verdicts
from bench.crossings.conversations import MODEL, Growing
from bench.crossings.upstream import SUMMARIZER
from bench.table import digits, write_json
from tests.kit.redis_server import MISSING, PROGRAM, RedisServer, redis_server

AT_ONCE = 32
BURST = 64
SETTLED_SECONDS = 0.5
"""Seconds in which the workers accept a burst of connections, or notice its end."""
WINDOW = 128_000
LATEST_WRITES = 2.0
"""Seconds after the last response in which the proxy writes to the store."""

_TOKENS = re.compile(rb"\r\nx-compaction-tokens-(before|after): *(\d+)", re.IGNORECASE)
_METRICS = b"GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Scale:
    """The rounds, the requests of each, and the conversations with their turns."""

    rounds: int
    requests: int
    compacted: int
    conversations: int
    turns: int


FULL = Scale(rounds=7, requests=3_000, compacted=40, conversations=5, turns=150)
QUICK = Scale(rounds=1, requests=100, compacted=2, conversations=1, turns=60)


@dataclass(frozen=True, slots=True)
class Figure:
    """A line of the table."""

    name: str
    unit: str
    figures: list[float]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True, help="Few requests, to check that everything runs.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write every round to FILE.")
def main(quick: bool, file: Path | None) -> None:
    """Measure the figures for sizing a fleet, and print the table."""
    if PROGRAM is None:
        raise click.ClickException(MISSING)
    scale = QUICK if quick else FULL
    with tempfile.TemporaryDirectory(prefix="bench-") as name, redis_server(Path(name) / "redis") as redis:
        rows = [
            *workers(scale, Path(name)),
            *stores(scale, Path(name), redis),
            *conversations(scale, Path(name), redis),
        ]
    table = Table("figure", "median", "lowest", "highest", title="Sizes")
    for row in rows:
        shown = (f"{digits(value)} {row.unit}" for value in (median(row.figures), min(row.figures), max(row.figures)))
        table.add_row(row.name, *shown)
    Console(width=max(110, Console().width)).print(table)
    write_json(file, [asdict(row) for row in rows])


def workers(scale: Scale, folder: Path) -> Iterator[Figure]:
    """Measure one worker and two with small requests, ``AT_ONCE`` at a time, in alternating rounds."""
    sent = request(bodies.small())
    with (
        servers.upstream(None) as upstream,
        servers.proxy(None, upstream, folder) as one,
        servers.proxy(None, upstream, folder, options=("--workers", "2")) as two,
    ):
        rounds: dict[int, list[_Round]] = {1: [], 2: []}
        for number in range(scale.rounds + 1):
            for count, server in ((1, one), (2, two)):
                _await_workers(server, count)
                measured = _round(server, sent, scale.requests)
                if number:  # the first one fills caches
                    rounds[count].append(measured)
        for count, some in rounds.items():
            name = f"{count} worker{'s' if count > 1 else ''}"
            yield Figure(f"{name}: CPU of a small request", "ms", [1e3 * each.cpu for each in some])
            yield Figure(f"{name}: requests per second of CPU", "/s", [1 / each.cpu for each in some])
            yield Figure(f"{name}: requests per second, with client and upstream", "/s", [each.rate for each in some])
            yield Figure(f"{name}: share of the busiest", "%", [100 * each.busiest for each in some])
            server = one if count == 1 else two
            memory = [worker.memory_full_info() for worker in server.workers]
            yield Figure(f"{name}: resident memory of each", "MB", [each.rss / 1e6 for each in memory])
            yield Figure(f"{name}: memory of each that isn't shared", "MB", [each.uss / 1e6 for each in memory])
        bursts = [100 * _fullest(two) for _ in range(scale.rounds)]
        yield Figure(f"2 workers: share of the fuller one in a burst of {BURST} connections", "%", bursts)
        # Workers share no data, so each needs a core. The busiest one limits the rate.
        pairs = [(first.cpu / second.cpu, second.busiest) for first, second in zip(rounds[1], rounds[2], strict=True)]
        yield Figure(
            "2 workers, a core each, evenly loaded: rate of 1 worker times", "×", [2 * ratio for ratio, _ in pairs]
        )
        yield Figure(
            "2 workers, a core each, as loaded here: rate of 1 worker times",
            "×",
            [ratio / most for ratio, most in pairs],
        )


@dataclass(frozen=True, slots=True)
class _Round:
    """CPU seconds of a request, requests per second, and the busiest worker's share of the CPU."""

    cpu: float
    rate: float
    busiest: float


def _round(server: servers.Server, sent: bytes, times: int) -> _Round:
    pids = [worker.pid for worker in server.workers]
    before = [servers.cpu_seconds(pid) for pid in pids]
    start = time.perf_counter()
    uvloop.run(concurrent(server, repeat(sent), times, AT_ONCE))
    rate = times / (time.perf_counter() - start)
    used = [servers.cpu_seconds(pid) - earlier for pid, earlier in zip(pids, before, strict=True)]
    return _Round(sum(used) / times, rate, max(used) / sum(used))


def _fullest(server: servers.Server) -> float:
    """Open connections at once. Return the share of the worker with the most."""
    with contextlib.ExitStack() as closing:
        ports = {closing.enter_context(server.connected()).getsockname()[1] for _ in range(BURST)}
        time.sleep(SETTLED_SECONDS)
        clients = [{one.raddr.port for one in worker.net_connections("tcp") if one.raddr} for worker in server.workers]
    time.sleep(SETTLED_SECONDS)
    return max(len(ports & one) for one in clients) / BURST


def _await_workers(server: servers.Server, count: int) -> None:
    """Wait until the server accepts connections and has this number of workers."""
    server.connected().close()
    latest = time.perf_counter() + servers.START_SECONDS
    while len(server.workers) < count:
        if time.perf_counter() > latest:
            raise Broken(f"the server has {len(server.workers)} workers instead of {count}")
        time.sleep(0.05)


def stores(scale: Scale, folder: Path, redis: RedisServer) -> Iterator[Figure]:
    """Measure a turn whose summary is stored, with a file and with Redis as the store, in alternating rounds."""
    core, client_core = servers.cores()
    sent = request(bodies.conversation("bench-128k"))
    with (
        servers.pinned(client_core),
        servers.upstream(client_core) as upstream,
        servers.proxy(core, upstream, folder) as file,
        servers.proxy(
            core, upstream, folder, lambda port, _: _on_redis(servers.configuration(port, _), redis)
        ) as other,
    ):
        callers = {"file": (file, Caller(file)), "Redis": (other, Caller(other))}
        for _, caller in callers.values():
            reported = [verdicts(caller.ask(sent)) for _ in range(5)][-1]
            if reported != ("compacted", "stored"):
                raise Broken(f"the proxy reported {reported}")
        taken: dict[str, list[float]] = {name: [] for name in callers}
        for _ in range(scale.rounds):
            for name, (server, caller) in callers.items():
                taken[name].append(sequential(server, caller, repeat(sent), scale.compacted).cpu)
        for name, seconds in taken.items():
            yield Figure(f"store in {name}: CPU of a compacted turn of 1.1 MB", "ms", [1e3 * each for each in seconds])
        ratios = [later / first for first, later in zip(taken["file"], taken["Redis"], strict=True)]
        yield Figure("compacted turn: CPU with Redis, times that with a file", "×", ratios)


def _on_redis(text: str, redis: RedisServer) -> str:
    settings = yaml.safe_load(text)
    return yaml.safe_dump({**settings, "store": {"url": redis.url}})


def conversations(scale: Scale, folder: Path, redis: RedisServer) -> Iterator[Figure]:
    """Send agents' conversations, and measure the store and the summary calls."""
    databases: list[Path] = []

    def in_file(port: int, database: Path) -> str:
        databases.append(database)
        return _configuration(port, f"sqlite:///{database}")

    with servers.upstream(None, "bench.crossings.upstream", "0") as upstream:
        with servers.proxy(None, upstream, folder, in_file) as proxy:
            removed, calls = zip(*(_converse(proxy, scale, seed) for seed in range(scale.conversations)), strict=True)
            time.sleep(LATEST_WRITES)
            with contextlib.closing(sqlite3.connect(databases[0])) as database:
                query = "SELECT SUM(LENGTH(value)) FROM entries WHERE kind LIKE 'archive%'"
                archived = float(database.execute(query).fetchone()[0])
        with redis.client() as client:
            client.flushall()
            measure = partial(_measure_redis, client)
            with servers.proxy(None, upstream, folder, lambda port, _: _configuration(port, redis.url)) as proxy:
                start = measure()
                for seed in range(scale.conversations):
                    _converse(proxy, scale, seed)
                time.sleep(LATEST_WRITES)
                end = measure()
    yield Figure("conversation: tokens removed at its end", "", [float(each) for each in removed])
    yield Figure("conversation: calls to the summary model", "", list(calls))
    yield Figure("conversation: archive bytes for each removed token", "", [archived / sum(removed)])
    yield Figure(
        "conversation: commands to Redis for each turn", "", [(end[0] - start[0]) / scale.conversations / scale.turns]
    )
    yield Figure("conversation: memory of Redis", "kB", [(end[1] - start[1]) / 1e3 / scale.conversations])


def _configuration(port: int, store: str) -> str:
    """Return the defaults with a store. The agents' model has a window of ``WINDOW`` tokens."""
    profile = {"context_window": WINDOW, "max_output_tokens": 8_000, "tokenizer": "o200k_base"}
    settings: dict[str, Any] = {
        "store": {"url": store},
        "upstreams": {"main": {"provider": "openai", "base_url": f"http://127.0.0.1:{port}/v1"}},
        "models": [{"match": model, "upstream": "main", "profile": profile} for model in (MODEL, SUMMARIZER)],
        "policies": {"default": {"summary": {"model": SUMMARIZER}}},
    }
    return yaml.safe_dump(settings, sort_keys=False)


def _converse(proxy: servers.Server, scale: Scale, seed: int) -> tuple[int, float]:
    """Send a conversation. Return the tokens that its last request lacks, and its summary calls."""
    growing = Growing("agent", WINDOW, turns=scale.turns, seed=seed, begun=0.45)
    caller = Caller(proxy)
    before = _summaries(caller)
    for _ in range(growing.turns):
        answer = caller.ask(request(growing.body))
        growing.grow()
    time.sleep(0.5)  # the metrics are updated every 0.1 seconds
    calls = _summaries(caller) - before
    caller.close()
    sizes = {name: int(tokens) for name, tokens in _TOKENS.findall(answer)}
    if not sizes or sizes[b"after"] >= sizes[b"before"]:
        raise Broken(f"the last turn wasn't compacted: {answer[:500]!r}")
    return sizes[b"before"] - sizes[b"after"], calls


def _summaries(caller: Caller) -> float:
    text = caller.ask(_METRICS).partition(b"\r\n\r\n")[2].decode()
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return sum(sample.value for sample in samples if sample.name == "compaction_summaries_seconds_count")


def _measure_redis(client: Any) -> tuple[int, int]:
    """Return the number of commands so far, and the bytes in use."""
    return client.info("stats")["total_commands_processed"], client.info("memory")["used_memory_dataset"]


if __name__ == "__main__":
    main()
