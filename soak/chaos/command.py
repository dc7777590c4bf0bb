"""Check for lost requests, mixed-up responses, and leaks during half an hour of failures.

A proxy in its own process serves twenty requests a second of mixed sizes. Clients disconnect, the upstream closes
connections at any byte, the store is locked, and the configuration is edited, sometimes into an invalid one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sqlite3
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import click

from bench import servers
from bench.table import table
from soak.chaos.load import Load
from soak.chaos.upstream import WINDOWS, Tally, Upstream
from soak.chaos.watching import Sample, Watcher, slope

WARM_UP = 8.0
"""Minutes before the measurement. By then the proxy's caches are full."""

LEAST_SAMPLES = 20
"""A slope needs at least this number of samples."""

TRIGGERS = tuple(0.80 + step / 100 for step in range(7))
"""Shares of the budget that the edits cycle through. Each one needs other summaries."""

LOCKED_EVERY, LOCKED_FOR = 45.0, 6.0
EDITED_EVERY = 6.0
SEED = 1
WRONG_EDITS = ("trigger: {fraktion: 0.8}", "keep: {fraction: 2}", "mode: enforced")

ANSWER_WITHIN = aiohttp.ClientTimeout(total=90)
"""After this time a response counts as lost."""

AT_REST = 100.0
"""Seconds after the last request until all work must have ended, and idle connections must be closed."""

FINAL_SAMPLES = 30
"""Most samples of the process at the end, half a second apart, while it seems to have a leak."""


@click.command()
@click.option("--minutes", default=30.0, show_default=True, help="Minutes to measure.")
@click.option("--warm-up", default=WARM_UP, show_default=True, help="Minutes of the same load before the measurement.")
@click.option("--rate", default=20.0, show_default=True, help="Requests a second.")
def main(minutes: float, warm_up: float, rate: float) -> None:
    """Run the check and print the result. The exit status is 1 if a response was lost or wrong, or something leaked."""
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(examined(Path(folder), minutes * 60, rate, warm_up=warm_up * 60))
    sys.exit(report(found, warm_up + minutes))


@dataclass(frozen=True)
class Found:
    """The result of a run.

    ``steady`` has the samples under load after the warm-up, and ``log`` the proxy's output.
    """

    tally: Tally
    seen: Tally
    steady: list[Sample]
    before: Sample
    after: Sample
    edits: Mapping[str, int]
    log: str

    @property
    def crashes(self) -> list[str]:
        """The lines of the log that report an internal error of the proxy."""
        return [line for line in self.log.splitlines() if "Traceback" in line or "request.crashed" in line]

    @property
    def reported(self) -> int:
        """The number of invalid configurations that the log reports."""
        events = [json.loads(line) for line in self.log.splitlines() if line.startswith("{")]
        return sum(event.get("event") == "configuration.wrong" for event in events)


async def examined(
    folder: Path, seconds: float, rate: float, warm_up: float = 0.0, every: float = EDITED_EVERY, rest: float = AT_REST
) -> Found:
    """Run the load for ``warm_up`` and then ``seconds`` seconds.

    ``every`` is the time between two edits, and ``rest`` the time after the last request, both in seconds.
    """
    with Upstream(SEED) as upstream, servers.proxy(_settings(upstream.url), folder) as server:
        watcher = Watcher(server)
        unlimited = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=ANSWER_WITHIN, connector=unlimited, trust_env=False) as http:
            load = Load(http, server.url, SEED)
            for _ in range(40):
                await load.one()
            await asyncio.sleep(3)
            before = await watcher.sample()
            disturbances = _Disturbances(folder, upstream.url, server, every)
            await _under_load(load, watcher, warm_up + seconds, rate, disturbances)
            steady = [sample for sample in watcher.samples if sample.at > before.at + warm_up]
        await asyncio.sleep(rest)
        after = await _at_rest(watcher, before)
    output = server.log.read_text(errors="replace")
    return Found(load.tally, upstream.seen, steady, before, after, disturbances.edits, output)


async def _at_rest(watcher: Watcher, before: Sample) -> Sample:
    """Return the sample at the end.

    Descriptors and sockets are counted at different times, and a task may be about to end. So an apparent leak is
    sampled again for a while.
    """
    for _ in range(FINAL_SAMPLES):
        after = await watcher.sample()
        if after.others <= before.others and after.in_flight <= before.in_flight:
            break
        await asyncio.sleep(0.5)
    return after


async def _under_load(load: Load, watcher: Watcher, seconds: float, rate: float, disturbances: _Disturbances) -> None:
    loop = asyncio.get_running_loop()
    begun, number = loop.time(), 0
    async with asyncio.TaskGroup() as group:
        others = [group.create_task(one) for one in (watcher.run(5), disturbances.edit(), disturbances.lock())]
        async with asyncio.TaskGroup() as requests:
            while loop.time() - begun < seconds:
                requests.create_task(load.one())
                number += 1
                await asyncio.sleep(max(0.0, begun + number / rate - loop.time()))
        for task in others:
            task.cancel()
    await disturbances.settle()


@dataclass
class _Disturbances:
    """Lock the store and edit the configuration, with ``every`` seconds between two edits."""

    folder: Path
    upstream: str
    server: servers.Server
    every: float
    edits: Counter[str] = field(default_factory=Counter)

    async def edit(self) -> None:
        """Edit the configuration, every third time into an invalid one. Send SIGHUP after every fifth edit."""
        for number in range(1_000_000):
            await asyncio.sleep(self.every)
            wrong = WRONG_EDITS[number // 3 % len(WRONG_EDITS)] if number % 3 == 2 else None
            self._write(TRIGGERS[number % len(TRIGGERS)], wrong)
            self.edits["wrong" if wrong else "right"] += 1
            if number % 5 == 4:
                self.server.process.send_signal(signal.SIGHUP)

    async def settle(self) -> None:
        """Write a valid configuration."""
        self._write(TRIGGERS[0])
        await asyncio.sleep(3)

    async def lock(self) -> None:
        """Lock the store, as another program could."""
        while True:
            await asyncio.sleep(LOCKED_EVERY)
            store = sqlite3.connect(self.folder / "store.db", timeout=5, isolation_level=None)
            with contextlib.closing(store):
                with contextlib.suppress(sqlite3.OperationalError):  # The proxy is writing, so skip this time.
                    store.execute("BEGIN EXCLUSIVE")
                await asyncio.sleep(LOCKED_FOR)

    def _write(self, trigger: float, wrong: str | None = None) -> None:
        text = servers.configuration(_settings(self.upstream, trigger), self.folder)
        new = self.folder / "config.new"
        new.write_text(text if wrong is None else f"{text}  broken:\n    {wrong}\n")
        new.replace(self.folder / "config.yaml")


def _settings(upstream: str, trigger: float = TRIGGERS[0]) -> dict[str, Any]:
    """Return the configuration. Its last section is the policies, so that an invalid one can be added."""
    profile = {"context_window": max(WINDOWS.values()), "tokenizer": "o200k_base"}
    return {
        "upstreams": {"main": {"base_url": f"{upstream}/v1", "api_key": "sk-upstream"}},
        "models": [{"match": "*", "upstream": "main", "profile": profile}],
        "policies": {"default": {"trigger": {"fraction": trigger}}},
    }


def report(found: Found, minutes: float) -> int:
    """Print the result. Return 1 if it misses a target, else 0."""
    tally, seen, edits, before, after = found.tally, found.seen, found.edits, found.before, found.after
    growth, flat = _growth(found.steady)
    rows: list[tuple[str, str, str, bool]] = [
        ("requests", f"{sum(tally.done.values()):,} in {minutes:g} min: {_listed(tally.done)}", "", True),
        ("responses to conversations", _listed(tally.compacted), "", True),
        ("requests upstream", _listed(seen.done), "", True),
        ("lost or wrong responses", str(len(tally.wrong)), "0", not tally.wrong),
        ("malformed requests upstream", str(len(seen.wrong)), "0", not seen.wrong),
        ("crashes in the log", str(len(found.crashes)), "0", not found.crashes),
        ("edits, valid and invalid", f"{edits['right']}, {edits['wrong']}", "", True),
        ("invalid edits in the log", str(found.reported), f"{edits['wrong']}", found.reported >= edits["wrong"]),
        *(_no_more(name, found) for name in ("in_flight", "sockets", "descriptors")),
        ("memory, MB", f"{before.memory / 1e6:.0f}, {after.memory / 1e6:.0f}", "", True),
        ("growth of memory, kB a minute", growth, "not above 0", flat),
    ]
    shown = [(name, figure, target if met else f"{target}, missed") for name, figure, target, met in rows]
    click.echo(table(("figure", "result", "target"), shown, left={"result", "target"}))
    for line in [*tally.wrong[:10], *seen.wrong[:10], *found.crashes[:10]]:
        click.echo(line)
    return 0 if all(met for *_, met in rows) else 1


def _no_more(name: str, found: Found) -> tuple[str, str, str, bool]:
    before, after = getattr(found.before, name), getattr(found.after, name)
    return f"{name}, before and after", f"{before}, {after}", "no more", after <= before


def _growth(steady: Sequence[Sample]) -> tuple[str, bool]:
    """Return the growth of memory with its interval, and whether the interval includes 0 or less."""
    if len(steady) < LEAST_SAMPLES:
        return "too few samples", True
    growth, margin = slope(steady)
    minutes, most = (steady[-1].at - steady[0].at) / 60, max(sample.memory for sample in steady)
    least = min(sample.memory for sample in steady)
    figures = f"{growth * 60 / 1e3:.1f} ± {margin * 60 / 1e3:.1f} in {minutes:.0f} min"
    return f"{figures}, between {least / 1e6:.1f} and {most / 1e6:.1f} MB", growth - margin <= 0


def _listed(counts: Any) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()))


if __name__ == "__main__":
    main()
