"""``python -m bench.crossings``."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
import uvloop
import yaml
from rich.console import Console

from bench import servers
from bench.client import Caller, request
from bench.crossings.conversations import MODEL, Growing, Kind
from bench.crossings.table import DEADLINE, SUMMARY, Side, raw, show
from bench.crossings.turns import converse_all
from bench.crossings.upstream import SUMMARIZER
from bench.table import write_json
from proxy.summary.settings import SummarySettings

WINDOW = 16_000

HEAD_STARTS: Mapping[str, Mapping[str, object]] = {
    "at 75 % (default)": {},
    "never": {"prepare": None},
}
"""The settings of the policy, by the name in the table."""


@dataclass(frozen=True, slots=True)
class Part:
    """A number of conversations of one kind, with ``turns`` each.

    Each fills a share of the window before its first turn, between ``begun`` and ``LATEST``.
    """

    kind: Kind
    conversations: int
    turns: int
    begun: float


@dataclass(frozen=True, slots=True)
class Scale:
    """The conversations for each proxy, and the factor by which everything is faster than with people."""

    parts: Sequence[Part]
    speed: float


FULL = Scale((Part("agent", 30, 90, 0.45), Part("chat", 10, 32, 0.62)), 10)
QUICK = Scale((Part("agent", 5, 15, 0.69),), 40)

LATEST = 0.70
"""A share of the window. The proxy prepares no summary yet."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True, help="A few conversations for a few seconds, to check that everything runs.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write every crossing to FILE.")
def main(quick: bool, file: Path | None) -> None:
    """Measure how often clients wait for a summary, and print the table.

    The table shows missed targets. The exit status is 0 if every measurement ran.
    """
    scale = QUICK if quick else FULL
    sides = measure(scale)
    show(sides, scale.speed, Console(width=max(140, Console().width)))
    write_json(file, raw(sides, scale.speed))


def measure(scale: Scale) -> list[Side]:
    """Return all rows. The proxies run at the same time, with the same conversations.

    No process is pinned to a core, because the benchmark measures waiting and not CPU.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as name, ExitStack() as running:
        takes = str(SUMMARY / scale.speed)
        upstream = running.enter_context(servers.upstream(None, "bench.crossings.upstream", takes))
        proxies = []
        for policy in HEAD_STARTS.values():
            configure = partial(configuration, policy=policy, speed=scale.speed)
            proxies.append(running.enter_context(servers.proxy(None, upstream, Path(name), configure)))
        conversations = [_conversations(scale) for _ in proxies]
        first = request(Growing("chat", WINDOW, turns=1, seed=0, begun=0.5).body)
        for proxy in proxies:
            caller = Caller(proxy)
            caller.ask(first)  # The first request loads the tokenizer.
            caller.close()
        taken = uvloop.run(converse_all([proxy.port for proxy in proxies], conversations, scale.speed))
    return [Side(name, turns) for name, turns in zip(HEAD_STARTS, taken, strict=True)]


def configuration(upstream_port: int, database: Path, *, policy: Mapping[str, object], speed: float) -> str:
    """Return the proxy's configuration as YAML: the default policy with ``policy``, and times divided by ``speed``."""
    profile = {"context_window": WINDOW, "max_output_tokens": 2_000, "tokenizer": "o200k_base"}
    summary = {"model": SUMMARIZER, "timeout": SummarySettings().timeout / speed}
    settings = {
        "server": {"deadline": DEADLINE / speed},
        "store": {"url": f"sqlite:///{database}"},
        "upstreams": {"main": {"provider": "openai", "base_url": f"http://127.0.0.1:{upstream_port}/v1"}},
        "models": [{"match": model, "upstream": "main", "profile": profile} for model in (MODEL, SUMMARIZER)],
        "policies": {"default": {"summary": summary, **policy}},
    }
    return yaml.safe_dump(settings, sort_keys=False)


def _conversations(scale: Scale) -> list[Growing]:
    rng = random.Random(2)
    parts = [part for part in scale.parts for _ in range(part.conversations)]
    return [
        Growing(part.kind, WINDOW, turns=part.turns, seed=seed, begun=rng.uniform(part.begun, LATEST))
        for seed, part in enumerate(parts, 1)
    ]


if __name__ == "__main__":
    main()
