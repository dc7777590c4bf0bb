"""Check that a fleet of three replicas loses nothing while replicas, Redis, and object storage fail.

Agents of the official SDKs work on all three APIs. Each request goes to a random replica. Strict upstreams judge every
request. One failure follows the other until the time is over.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import httpx
import yaml
from rich.console import Console
from rich.table import Table

from soak.fleet.disturbances import Disturbances
from soak.fleet.gate import Gate
from soak.fleet.load import APIS, WINDOW, Agents, Tally, Upstreams
from soak.fleet.replicas import Replica, events, running
from tests.kit.object_server import CREDENTIALS, object_server
from tests.kit.redis_server import MISSING, PROGRAM, redis_server

REPLICAS = 3
AGENTS = 6
LASTS = 15.0
"""Seconds of a failure."""

CALM = 8.0
"""Seconds between the recovery from a failure and the next one."""

RECOVERED_WITHIN = 40.0
"""Seconds after a failure until all replicas must share summaries again. The circuit breaker's pause is 30 seconds."""

LONGEST = 15.0
"""Seconds that a request may take while something fails, without the time of a killed replica's start."""

MEMORY = 600e6
"""Bytes of a replica at most."""

CALM_PHASE = "no failure"


@dataclass
class Found:
    """The result of a run. ``recovered`` has the longest recovery by failure, in seconds; ``None``: never."""

    tally: Tally
    upstreams: Upstreams
    kills: int
    crashes: list[str]
    memory: int
    phases: list[str]
    recovered: dict[str, float | None] = field(default_factory=dict)


@click.command()
@click.option("--minutes", default=20.0, show_default=True, help="Minutes of load.")
@click.option("--lasts", default=LASTS, show_default=True, help="Seconds of a failure.")
@click.option("--only", multiple=True, help="Only failures whose names contain this text.")
def main(minutes: float, lasts: float, only: Sequence[str]) -> None:
    """Run the check and print the result. The exit status is 1 if something was lost, wrong, or didn't recover."""
    if PROGRAM is None:
        raise click.ClickException(MISSING)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        found = examined(Path(folder), minutes * 60, lasts, only)
    sys.exit(report(found, minutes))


def examined(folder: Path, seconds: float, lasts: float, only: Sequence[str] = (), agents: int = AGENTS) -> Found:
    """Run the load for about ``seconds``, and at least one failure of each kind."""
    phase = [CALM_PHASE]
    upstreams = Upstreams()
    with contextlib.ExitStack() as stack:
        urls = stack.enter_context(upstreams.serving())
        server = stack.enter_context(redis_server(folder / "redis1"))
        objects = stack.enter_context(object_server())
        gate = Gate(server.port)
        stack.enter_context(gate.serving())
        files = list(_configurations(folder, urls, gate.port, objects.endpoint))
        replicas = stack.enter_context(running(files, folder, CREDENTIALS))
        disturbances = Disturbances(replicas, server, gate, objects, folder, lasts)
        stack.callback(disturbances.end)
        chosen = {name: run for name, run in disturbances.all.items() if not only or any(text in name for text in only)}
        load = Agents(replicas, agents, phase)
        found = Found(load.tally, upstreams, 0, [], 0, [CALM_PHASE, *chosen])
        with load.working():
            began = time.monotonic()
            for number, (name, run) in enumerate(itertools.cycle(chosen.items())):
                if number >= len(chosen) and time.monotonic() - began > seconds:
                    break
                time.sleep(min(CALM, lasts))
                upstreams.judge(phase[0])
                phase[0] = name
                print(f"{time.monotonic() - began:6.0f} s  {name}", file=sys.stderr, flush=True)
                run()
                took = _recovered(replicas)
                worst = found.recovered.get(name, 0.0)
                found.recovered[name] = None if took is None or worst is None else max(worst, took)
                upstreams.judge(name)
                phase[0] = CALM_PHASE
                found.memory = max(found.memory, *(replica.memory for replica in replicas))
        time.sleep(2)
        upstreams.judge(CALM_PHASE, all_of_them=True)
        found.kills = disturbances.kills
    found.crashes = [line for replica in replicas for line in events(replica.log)["crashes"]]
    return found


def _recovered(replicas: Sequence[Replica]) -> float | None:
    """Return the seconds until all replicas are ready and share a summary; ``None`` if they don't in time."""
    began = time.monotonic()
    for attempt in itertools.count():
        if time.monotonic() - began > RECOVERED_WITHIN:
            return None
        ready = all((replica.answers("/readyz") or "").strip() == "ready" for replica in replicas)
        if _shared(replicas, f"sk-probe-{began}-{attempt}") and ready:
            return time.monotonic() - began
        time.sleep(0.5)
    raise AssertionError("unreachable")


def _shared(replicas: Sequence[Replica], key: str) -> bool:
    """Return whether the other replicas use a summary that the first one made."""
    messages = [{"role": "system", "content": "Be brief."}]
    for number in range(30):
        text = f"{key} {number} " + "word " * 500
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    messages.append({"role": "user", "content": "What now?"})
    seen = []
    with httpx.Client(trust_env=False, timeout=60) as http:
        for replica in replicas:
            response = http.post(
                f"{replica.url}/v1/chat/completions",
                json={"model": "chat", "messages": messages},
                headers={"authorization": f"Bearer {key}"},
            )
            seen.append(response.headers.get("x-compaction-summary"))
    return seen == ["made", *["stored"] * (len(replicas) - 1)]


def _configurations(folder: Path, urls: dict[str, str], store: int, objects: str) -> Iterator[Path]:
    profile = {"context_window": WINDOW, "tokenizer": "o200k_base"}
    limit = {"max_output_tokens": WINDOW // 4}
    settings: dict[str, Any] = {
        "store": {"url": f"redis://127.0.0.1:{store}/0"},
        "archive": {"url": "s3://bucket/archive", "endpoint": objects, "region": "us-east-1"},
        "upstreams": {
            "chat": {"base_url": f"{urls['chat']}/v1"},
            "responses": {"base_url": f"{urls['responses']}/v1"},
            "messages": {"base_url": urls["messages"], "provider": "anthropic"},
        },
        "models": [{"match": api, "upstream": api, "profile": {**profile, **limit}} for api in APIS],
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(settings, sort_keys=False))
    for _ in range(REPLICAS):
        yield file


def report(found: Found, minutes: float) -> int:
    """Print the result. Return 1 if it misses a target, else 0."""
    tally, upstreams = found.tally, found.upstreams
    table = Table(title=f"Three replicas, {AGENTS} agents, {minutes:g} minutes")
    for title in (
        "failure",
        "requests",
        "lost with a killed replica",
        "longest",
        "summaries made again",
        "recovered after",
    ):
        table.add_column(title)
    for phase in found.phases:
        recovered = found.recovered.get(phase)
        after = "" if phase == CALM_PHASE else "[red]never[/red]" if recovered is None else f"{recovered:.1f} s"
        table.add_row(
            phase,
            f"{tally.done[phase]:,}",
            str(tally.lost[phase]),
            f"{tally.longest.get(phase, 0):.1f} s",
            str(upstreams.extra[phase]),
            after,
        )
    console = Console(width=140)
    console.print(table)
    again = upstreams.extra["replicas killed"]
    checks = [
        ("requests lost or wrong", str(len(tally.wrong)), not tally.wrong),
        ("malformed requests upstream", str(len(upstreams.faults)), not upstreams.faults),
        ("sessions completed", str(tally.sessions), tally.sessions > 0),
        ("summaries made again, and kills", f"{again}, {found.kills}", again <= found.kills),
        ("without a failure", str(upstreams.extra[CALM_PHASE]), not upstreams.extra[CALM_PHASE]),
        ("crashes in the logs", str(len(found.crashes)), not found.crashes),
        ("most memory of a replica", f"{found.memory / 1e6:.0f} MB", found.memory < MEMORY),
        ("recovered from all failures", "", None not in found.recovered.values()),
        ("longest request", f"{max(tally.longest.values()):.1f} s", max(tally.longest.values()) < LONGEST),
    ]
    for name, figure, met in checks:
        console.print(f"{'met   ' if met else '[red]missed[/red]'}  {name}: {figure}")
    for line in [*tally.wrong[:15], *upstreams.faults[:10], *found.crashes[:10]]:
        console.print(line, markup=False)
    return 0 if all(met for *_, met in checks) else 1


if __name__ == "__main__":
    main()
