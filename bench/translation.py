"""``python -m bench.translation``: measure the CPU of a translated turn, compared with LiteLLM.

The proxy's bridge and LiteLLM's ``anthropic_messages`` and ``aresponses`` run in this process, in turn. Both call the
benchmark's upstream, which has chat completions. Neither server is part of the figures, and neither is compaction.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import click
import msgspec
from rich.console import Console
from rich.table import Table

from bench import servers
from bench.bodies import APIS, Api
from bench.client import Broken
from bench.figures import MICRO
from bench.table import digits, write_json
from proxy.upstream.bridge.transport import Bridge
from proxy.upstream.litellm import library
from proxy.upstream.relay import Address, RelayTransport
from proxy.upstream.transport import Outgoing

SIZES = {"small request": 0, "100 kB": 100_000}
FUNCTIONS = {"messages": "anthropic_messages", "responses": "aresponses"}

Turn = Callable[[], Awaitable[str]]
"""Runs a turn, and returns its answer as JSON."""


@dataclass(frozen=True, slots=True)
class Line:
    """The CPU of a turn in µs, by round."""

    name: str
    proxy: list[float] = field(default_factory=list)
    litellm: list[float] = field(default_factory=list)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True, help="Few rounds.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write every round to FILE.")
def main(quick: bool, file: Path | None) -> None:
    """Measure translated turns, and print the table."""
    own, other = servers.cores()
    with servers.upstream(other) as upstream, servers.pinned(own):
        url = f"http://127.0.0.1:{upstream.port}/v1"
        lines = asyncio.run(measure(url, rounds=2 if quick else 9, turns=5 if quick else 100))
    show(lines)
    write_json(file, [{"name": line.name, "proxy": line.proxy, "litellm": line.litellm} for line in lines])


async def measure(url: str, rounds: int, turns: int) -> list[Line]:
    """Return the lines. Raises ``Broken`` if an answer lacks the upstream's text."""
    litellm = await library.load()
    # LiteLLM looks for its server in each call. Without the server's packages, it would compile that module each time.
    sys.modules["litellm.proxy.proxy_server"] = cast(ModuleType, SimpleNamespace(llm_router=None))
    relay = RelayTransport(Address(url), upstream="main", api_key="sk-bench", headers={})
    lines = []
    for name, function in FUNCTIONS.items():
        for size, length in SIZES.items():
            api = APIS[name]
            body = api.conversation("bench", length) if length else api.small()
            both = ours(api, body, relay), theirs(getattr(litellm, function), body, url)
            line = Line(f"/v1/{name}, {size}")
            for turn in both:
                if "keep the service fast" not in await turn():
                    raise Broken(f"{line.name}: the answer has another text")
            for _ in range(rounds):
                for turn, figures in zip(both, (line.proxy, line.litellm), strict=True):
                    began = time.process_time()
                    for _ in range(turns):
                        await turn()
                    figures.append(MICRO * (time.process_time() - began) / turns)
            lines.append(line)
    await relay.aclose()
    return lines


def ours(api: Api, body: bytes, relay: RelayTransport) -> Turn:
    """Return the turn over the proxy's bridge."""
    bridge = Bridge("responses" if api.name == "responses" else "messages", "chat", relay)

    async def turn() -> str:
        asked = Outgoing(body=body, model="bench", stream=False, headers=[], credential=None, timeout=60.0)
        answer = await bridge.send(asked)
        return b"".join([part async for part in answer.body]).decode()

    return turn


def theirs(function: Callable[..., Awaitable[Any]], body: bytes, url: str) -> Turn:
    """Return the turn by a function of LiteLLM, from the body to the answer's JSON."""

    async def turn() -> str:
        fields = {**msgspec.json.decode(body), "model": "hosted_vllm/bench", "stream": False}
        answer = await function(**fields, api_base=url, api_key="sk-bench", max_retries=0)
        made = answer if isinstance(answer, dict) else answer.model_dump(mode="json")
        return msgspec.json.encode(made).decode()

    return turn


def show(lines: list[Line]) -> None:
    """Print the table: medians of all rounds, and the ratio."""
    table = Table(title="CPU of a translated turn, in µs")
    for name in ("turn", "LiteLLM", "proxy", "ratio"):
        table.add_column(name, justify="left" if name == "turn" else "right")
    for line in lines:
        theirs, own = median(line.litellm), median(line.proxy)
        table.add_row(line.name, digits(theirs), digits(own), f"{own / theirs:.2f} ×")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
