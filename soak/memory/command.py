"""Check that ever new conversations take a bounded amount of memory, and no more CPU time with each request.

Thirteen teams use all three APIs. Each conversation has two requests and never returns. Half of the requests are over
the trigger, so the proxy makes summaries and archives messages.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

import aiohttp
import click

from bench import servers
from tests.kit.raw_upstream import Arrived, RawUpstream, Step
from tests.kit.three_apis import APIS, PATHS, Answer, request

TEAMS = 13
WINDOW = 4_000
LEVEL_AFTER = 50_000
"""Requests after which memory must not grow anymore. The caches are full after about 42,000."""

MOST = 450_000_000
"""Bytes of resident memory that the proxy may take."""

GROWTH = 1.05
"""The factor by which memory may still vary."""

DEARER = 1.15
"""The factor by which the CPU time of a request may vary."""

STRETCH = 2_000
"""Requests between two samples."""

AT_ONCE = 16
SUMMARY = "Goal: go on as agreed. Done so far: what was asked for, with {}. Next: the rest of the work, step by step."


@dataclass(frozen=True, slots=True)
class Sample:
    """The proxy after a number of requests: resident bytes, and the CPU seconds of each request since the last one."""

    requests: int
    memory: int
    cpu: float


@click.command()
@click.option("--minutes", default=60.0, show_default=True, help="Minutes of load.")
@click.option("--rate", default=120.0, show_default=True, help="Requests a second; 0 for as many as possible.")
@click.option("--requests", default=inf, help="Stop after this number of requests.")
def main(minutes: float, rate: float, requests: float) -> None:
    """Run the check and print the samples. The exit status is 1 if memory or CPU time grew."""
    with tempfile.TemporaryDirectory() as folder:
        load = asyncio.run(loaded(Path(folder), minutes * 60, rate, requests))
    sys.exit(report(load))


class Load:
    """Send conversations, and sample the proxy."""

    def __init__(self, http: aiohttp.ClientSession, server: servers.Server) -> None:
        self.samples: list[Sample] = []
        self.failed: list[str] = []
        self.compacted = self.sent = 0
        self._http = http
        self._server = server
        self._chance = random.Random(1)  # noqa: S311 - no secret
        self._cpu = server.cpu

    async def one(self, number: int) -> None:
        """Send both requests of a conversation."""
        api = APIS[number % len(APIS)]
        messages = conversation(self._chance, number, large=number % 2 == 0)
        for turn in range(2):
            raw = request(api, "m", messages, stream=False)
            headers = {"authorization": f"Bearer {key_of(number % TEAMS)}", "content-type": "application/json"}
            async with self._http.post(self._server.url + PATHS[api], data=raw, headers=headers) as answer:
                text = await answer.text()
                self.compacted += answer.headers.get("x-compaction") == "compacted"
            if answer.status != 200:
                self.failed.append(f"{answer.status}: {text[:300]}")
            self.sent += 1
            if self.sent % STRETCH == 0:
                self.sample()
            messages += [{"role": "assistant", "content": f"Answer {turn}."}, {"role": "user", "content": "Go on."}]

    def sample(self) -> None:
        """Take a sample."""
        before = self.samples[-1].requests if self.samples else 0
        seconds, since = self._server.cpu, self.sent - before
        sample = Sample(self.sent, self._server.memory, (seconds - self._cpu) / max(1, since))
        self.samples.append(sample)
        self._cpu = seconds
        click.echo(f"{sample.requests:,} requests: {sample.memory / 1e6:.0f} MB, {sample.cpu * 1e3:.1f} ms of CPU each")


async def loaded(folder: Path, seconds: float, rate: float, most: float = inf) -> Load:
    """Run the load for ``seconds``, or until ``most`` requests were sent."""
    with Upstream() as upstream, servers.proxy(_settings(upstream.url), folder) as server:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(trust_env=False, connector=connector) as http:
            load = Load(http, server)
            await _under_load(load, seconds, rate, most)
            if not load.samples:
                load.sample()
    return load


async def _under_load(load: Load, seconds: float, rate: float, most: float) -> None:
    loop = asyncio.get_running_loop()
    begun, number, slots = loop.time(), 0, asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        try:
            await load.one(number)
        finally:
            slots.release()

    async with asyncio.TaskGroup() as tasks:
        while loop.time() - begun < seconds and 2 * number < most:
            await slots.acquire()
            tasks.create_task(one(number))
            number += 1
            if rate:
                await asyncio.sleep(max(0.0, begun + 2 * number / rate - loop.time()))


def conversation(chance: random.Random, number: int, *, large: bool) -> list[dict[str, Any]]:
    """Return a conversation with new words. A large one is over the trigger."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
    for turn in range(8 if large else 2):
        for role in ("user", "assistant"):
            words = " ".join(f"w{chance.randrange(1_000_000)}_item" for _ in range(70))
            messages.append({"role": role, "content": f"turn {turn} of {number}: {words} in src/file_{number}.py"})
    return [*messages, {"role": "user", "content": f"And now, {number}?"}]


def key_of(team: int) -> str:
    """Return the key of a team."""
    return f"cp-team-{team}"


class Upstream(RawUpstream):
    """An upstream that answers every request with another text."""

    def __init__(self) -> None:
        super().__init__(self._steps)

    def _steps(self, arrived: Arrived) -> Sequence[Step]:
        self.arrived.clear()
        api = next(api for api, path in PATHS.items() if path == arrived.target)
        digest = hashlib.sha256(arrived.body).hexdigest()
        return Answer(text=SUMMARY.format(digest), id=digest[:20]).steps(api, stream=False)


def _settings(upstream: str) -> dict[str, Any]:
    digests = [hashlib.sha256(key_of(team).encode()).hexdigest() for team in range(TEAMS)]
    profile = {"context_window": WINDOW, "tokenizer": "o200k_base"}
    return {
        "auth": {"mode": "keys"},
        "upstreams": {"main": {"base_url": f"{upstream}/v1", "api_key": "sk-up", "speaks": [*APIS]}},
        "models": [{"match": "*", "upstream": "main", "profile": profile}],
        "teams": {f"team-{team}": {"keys": [f"sha256:{digest}"]} for team, digest in enumerate(digests)},
    }


def report(load: Load) -> int:
    """Print the result. Return 1 if memory or CPU time grew, or a request failed."""
    click.echo(f"{load.sent:,} requests, {load.compacted:,} compacted, {len(load.failed)} failed")
    problems = [*load.failed[:5], *grown(load.samples)]
    for problem in problems:
        click.echo(problem)
    return 1 if problems else 0


def grown(samples: Sequence[Sample]) -> list[str]:
    """Return what grew after memory should be level."""
    largest = max((sample.memory for sample in samples), default=0)
    problems = [] if largest <= MOST else [f"memory reached {largest / 1e6:.0f} MB, target: {MOST / 1e6:.0f} MB"]
    level = [sample for sample in samples if sample.requests > LEVEL_AFTER]
    if len(level) >= 6:
        third = len(level) // 3
        first, last = level[:third], level[-third:]
        if fmean(one.memory for one in last) > GROWTH * fmean(one.memory for one in first):
            problems.append("memory grew after it should be level")
        if fmean(one.cpu for one in last) > DEARER * fmean(one.cpu for one in first):
            problems.append("the CPU time of a request grew")
    return problems


if __name__ == "__main__":
    main()
