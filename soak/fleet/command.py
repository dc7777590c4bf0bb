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
from pathlib import Path
from typing import Any

import click
import httpx
import yaml

from soak.fleet.disturbances import KEPT, Disturbances
from soak.fleet.gate import running as relay
from soak.fleet.load import APIS, CALM_PHASE, PROBE, WINDOW, Agents, Upstreams
from soak.fleet.replicas import Replica, crashes, running
from soak.fleet.table import Found, report
from soak.fleet.team import MODEL, TEAM, Team
from tests.kit.object_server import CREDENTIALS, object_server
from tests.kit.redis_server import MISSING, PROGRAM, redis_server

REPLICAS = 3
AGENTS = 6
LASTS = 15.0
"""Seconds of a failure."""

WARNINGS = {"PYTHONWARNINGS": "always::ResourceWarning"}
"""Variables of the replicas, so that they report connections that nobody closed."""

CALM = 8.0
"""Seconds between the recovery from a failure and the next one."""

RECOVERED_WITHIN = 40.0
"""Seconds after a failure until all replicas must share summaries again. The circuit breaker's pause is 30 seconds."""


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
    sys.exit(report(found, f"Three replicas, {AGENTS} agents, {minutes:g} minutes"))


def examined(folder: Path, seconds: float, lasts: float, only: Sequence[str] = (), agents: int = AGENTS) -> Found:
    """Run the load for about ``seconds``, and at least one failure of each kind."""
    phase = [CALM_PHASE]
    upstreams = Upstreams()
    with contextlib.ExitStack() as stack:
        replicas: list[Replica] = []
        load = Agents(replicas, agents, phase)
        team = Team(replicas, load.tally, phase)
        urls = {**stack.enter_context(upstreams.serving()), MODEL: stack.enter_context(team.serving())}
        server = stack.enter_context(redis_server(folder / "redis1", KEPT))
        objects = stack.enter_context(object_server())
        gate = stack.enter_context(relay(server.port))
        files = list(_configurations(folder, urls, gate.port, objects.endpoint))
        replicas += stack.enter_context(running(files, folder, {**CREDENTIALS, **WARNINGS}))
        disturbances = Disturbances(replicas, server, gate, objects, folder, lasts, upstreams.summarised)
        stack.callback(disturbances.end)
        chosen = {name: run for name, run in disturbances.all.items() if not only or any(text in name for text in only)}
        found = Found(load.tally, upstreams, [CALM_PHASE, *chosen], concurrent=team.most, refused=team.refused)
        with load.working(), team.working():
            began = time.monotonic()
            for number, (name, run) in enumerate(itertools.cycle(chosen.items())):
                if number >= len(chosen) and time.monotonic() - began > seconds:
                    break
                time.sleep(min(CALM, lasts))
                upstreams.judge(phase[0])
                found.alone[phase[0]] += _counted_alone(replicas) - found.alone.total()
                phase[0] = name
                print(f"{time.monotonic() - began:6.0f} s  {name}", file=sys.stderr, flush=True)
                run()
                took = _recovered(replicas, found.probes)
                worst = found.recovered.get(name, 0.0)
                found.recovered[name] = None if took is None or worst is None else max(worst, took)
                upstreams.judge(name)
                found.alone[name] += _counted_alone(replicas) - found.alone.total()
                phase[0] = CALM_PHASE
                found.memory = max(found.memory, *(replica.memory for replica in replicas))
        time.sleep(2)
        upstreams.judge(CALM_PHASE, all_of_them=True)
        found.kills = disturbances.kills
    found.crashes = [line for replica in replicas for line in crashes(replica.log)]
    return found


def _counted_alone(replicas: Sequence[Replica]) -> int:
    return sum(replica.counted_alone for replica in replicas)


def _recovered(replicas: Sequence[Replica], probes: list[str]) -> float | None:
    """Return the seconds until all replicas are ready and share summaries and limits; ``None`` if they don't in time.

    Add the key of the shared summary to ``probes``.
    """
    began = time.monotonic()
    for attempt in itertools.count():
        if time.monotonic() - began > RECOVERED_WITHIN:
            return None
        ready = all((replica.answers("/readyz") or "").strip() == "ready" for replica in replicas)
        key = f"{PROBE}-{began}-{attempt}"
        if ready and all(replica.shares_limits for replica in replicas) and _shared(replicas, key):
            probes.append(key)
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
        "teams": {MODEL: TEAM},
        "upstreams": {
            MODEL: {"base_url": f"{urls[MODEL]}/v1"},
            "chat": {"base_url": f"{urls['chat']}/v1"},
            "responses": {"base_url": f"{urls['responses']}/v1"},
            "messages": {"base_url": urls["messages"], "provider": "anthropic"},
        },
        "models": [{"match": api, "upstream": api, "profile": {**profile, **limit}} for api in (*APIS, MODEL)],
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(settings, sort_keys=False))
    for _ in range(REPLICAS):
        yield file


if __name__ == "__main__":
    main()
