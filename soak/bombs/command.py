"""Requests and upstream responses that try to cost the proxy more than their size: CPU, memory, and other clients."""

from __future__ import annotations

import fnmatch
import hashlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import yaml
from rich.console import Console
from rich.table import Table

from bench.servers import free_port
from proxy.endpoints.paths import CHAT, MESSAGES, RESPONSES
from soak.bombs import families
from soak.bombs.measuring import Cost, measured
from soak.bombs.upstream import ASKS_FOR, Response, serving
from soak.processes import running

MB = 1_000_000
BODY_LIMIT = 64 * MB
"""The proxy's ``server.body_limit`` in bytes, its default."""

MOST_GROWTH = 4 * BODY_LIMIT
"""Bytes by which any request may make the proxy's memory grow."""

CPU_SECONDS = 1.0
"""Seconds of CPU that a request or an upstream response of 64 KB may take."""

SMALL_WAIT = 0.1
"""Seconds that ``/livez`` may take while such a request is served."""

LARGE_WAIT = 0.25
"""Seconds that ``/livez`` may take while a request of any size is served."""

PASSED_ON = "/v1/embeddings"
CONVERSATIONS = {"chat": (CHAT, "messages"), "responses": (RESPONSES, "input"), "messages": (MESSAGES, "messages")}
"""The paths whose requests the proxy may compact, and the field that has the conversation."""

MODEL = "gpt-4"
"""Its window of 8,192 tokens makes the proxy compact most of the requests."""

TEAMS = {"all": "cp-all-models", "some": "cp-some-models"}
"""The keys of two teams. The second one may use some models only, so the proxy reads what it passes through."""


@dataclass(frozen=True)
class Bomb:
    """A request, and the upstream's response if that is the bomb."""

    name: str
    request: Callable[[], bytes]
    path: str = CHAT
    encoding: str | None = None
    team: str = "all"
    response: Response | None = None
    large: bool = False

    def headers(self) -> list[tuple[str, str]]:
        """Return the headers of the request."""
        found = [("content-type", "application/json"), ("authorization", f"Bearer {TEAMS[self.team]}")]
        if self.encoding is not None:
            found.append(("content-encoding", self.encoding))
        if self.response is not None:
            found.append((ASKS_FOR, self.name))
        return found

    def exceeded(self, cost: Cost) -> list[str]:
        """Return the bounds that a cost exceeds."""
        bounds = {
            "status": cost.status in (0, 500),
            "CPU": not self.large and cost.cpu > CPU_SECONDS,
            "/livez": cost.wait > (LARGE_WAIT if self.large else SMALL_WAIT),
            "memory": cost.grown > MOST_GROWTH,
        }
        return [name for name, exceeded in bounds.items() if exceeded]


@click.command()
@click.option("--family", "wanted", default="*", show_default=True, help="Names of families, with * and ?.")
@click.option("--attempts", default=3, show_default=True, help="Times that a family may exceed a bound.")
@click.option("--all", "everything", is_flag=True, help="Print every family, and not only the slowest ones.")
def main(wanted: str, attempts: int, everything: bool) -> None:
    """Send each family and print its cost. The exit status is 1 if a bound is exceeded.

    A family that exceeds a bound is sent again, because other work on the machine can cause that. The table shows the
    attempt that exceeds the fewest bounds.
    """
    chosen = [bomb for bomb in bombs() if fnmatch.fnmatchcase(bomb.name, wanted)]
    if not chosen:
        sys.exit(f"No family is named {wanted!r}. Use * in the name.")
    costs = check(chosen, attempts)
    report(costs, Console(width=130), everything=everything)
    sys.exit(1 if any(bomb.exceeded(cost) for bomb, cost in costs) else 0)


def check(chosen: Sequence[Bomb], attempts: int) -> list[tuple[Bomb, Cost]]:
    """Send each of these to a proxy of its own process, one at a time."""
    responses = {bomb.name: bomb.response for bomb in chosen if bomb.response is not None}
    with tempfile.TemporaryDirectory() as name, serving(responses) as upstream:
        folder, port = Path(name), free_port()
        file = folder / "config.yaml"
        file.write_text(yaml.safe_dump(settings(folder, upstream)), encoding="utf-8")
        command = [sys.executable, "-m", "proxy", "serve", "--config", str(file), "--port", str(port)]
        with running(command, folder / "log", f"http://127.0.0.1:{port}/livez", 60) as pid:
            warm(port, pid)
            return [(bomb, least(bomb, port, pid, attempts)) for bomb in chosen]


def warm(port: int, pid: int) -> None:
    """Send requests until the proxy has loaded the encodings and everything else that it loads once."""
    for model in (MODEL, "gpt-4o-mini"):
        sent = families.asking(model, families.text("word "), 400_000)
        cost = measured(port, pid, CHAT, sent, Bomb("", lambda: b"").headers())
        if cost.status != 200:
            raise RuntimeError(f"the proxy answered {cost.status}")


def least(bomb: Bomb, port: int, pid: int, attempts: int) -> Cost:
    """Send a request until no bound is exceeded. Return the cost of the attempt that exceeds the fewest."""
    sent, headers = bomb.request(), bomb.headers()
    costs: list[Cost] = []
    for _ in range(attempts):
        costs.append(measured(port, pid, bomb.path, sent, headers))
        if not bomb.exceeded(costs[-1]):
            break
    return min(costs, key=lambda cost: (len(bomb.exceeded(cost)), cost.cpu))


def settings(folder: Path, upstream: int) -> dict[str, Any]:
    """Return the proxy's configuration for an upstream at a port."""
    digests = {team: hashlib.sha256(key.encode()).hexdigest() for team, key in TEAMS.items()}
    teams: dict[str, Any] = {team: {"keys": [f"sha256:{digest}"]} for team, digest in digests.items()}
    teams["some"]["models"] = ["gpt-*"]
    return {
        "server": {"body_limit": BODY_LIMIT},
        "auth": {"mode": "keys"},
        "store": {"url": f"sqlite:///{folder}/store.db"},
        "upstreams": {"main": {"base_url": f"http://127.0.0.1:{upstream}/v1", "api_key": "sk-upstream"}},
        "teams": teams,
    }


def bombs() -> Iterator[Bomb]:
    """Return all families. Requests over 64 KB are built when they are sent."""
    for kind, (path, field) in CONVERSATIONS.items():
        for name, raw, how in families.requests(MODEL, field):
            yield Bomb(f"{kind}: {name}", _same(raw), path, how)
        for name, made in families.HEAVY.items():
            yield Bomb(f"large {kind}: {name}", _in_field(made, field), path, large=True)
    for team in TEAMS:
        for name, raw, how in families.passed_on(MODEL):
            yield Bomb(f"embeddings, {team} models: {name}", _same(raw), PASSED_ON, how, team)
        for name, made in (families.HEAVY | families.HEAVY_PASSED_ON).items():
            large = _in_field(made, "input")
            yield Bomb(f"large embeddings, {team} models: {name}", large, PASSED_ON, team=team, large=True)
    yield from _responses()


def _responses() -> Iterator[Bomb]:
    plain, streaming = families.chat("hi"), families.chat("hi", stream=True)
    for name, raw, how in families.errors():
        error = Response(raw, 400, encoding=how)
        yield Bomb(f"error: {name}", _same(plain), response=error)
        yield Bomb(f"error, streaming: {name}", _same(streaming), response=error)
        yield Bomb(f"error, passed through: {name}", _same(plain), PASSED_ON, response=error)
        if how is None:
            yield Bomb(f"error, 1-byte chunks: {name}", _same(plain), response=Response(raw, 400, piece=1))
            yield Bomb(f"error, status 200: {name}", _same(plain), response=Response(raw))
            events = b"data: " + raw + b"\n\n"
            yield Bomb(f"error event: {name}", _same(streaming), response=Response(events, kind="text/event-stream"))
    for name, raw in families.ANSWERS.items():
        yield Bomb(f"answer: {name}", _same(plain), response=Response(raw))
        yield Bomb(f"answer, 1-byte chunks: {name}", _same(plain), response=Response(raw, piece=1))
        yield Bomb(f"answer, 1-byte packets: {name}", _same(plain), response=Response(raw, piece=1, packets=True))
    for name, raw in families.STREAMS.items():
        kind = "text/event-stream"
        yield Bomb(f"stream: {name}", _same(streaming), response=Response(raw, kind=kind))
        yield Bomb(f"stream, 1-byte chunks: {name}", _same(streaming), response=Response(raw, kind=kind, piece=1))
        packets = Response(raw, kind=kind, piece=1, packets=True)
        yield Bomb(f"stream, 1-byte packets: {name}", _same(streaming), response=packets)


def _same(raw: bytes) -> Callable[[], bytes]:
    return lambda: raw


def _in_field(made: Callable[[], bytes], field: str) -> Callable[[], bytes]:
    return lambda: families.renamed(made(), field)


def report(costs: Sequence[tuple[Bomb, Cost]], console: Console, *, everything: bool) -> None:
    """Print the cost of each family, or those that exceed a bound and the slowest of each kind."""
    table = Table("family", "status", "CPU, s", "/livez, ms", "memory, MB", "exceeded")
    shown = set(range(len(costs))) if everything else _notable(costs)
    for number, (bomb, cost) in enumerate(costs):
        if number in shown:
            table.add_row(
                bomb.name,
                str(cost.status),
                f"{cost.cpu:.2f}",
                f"{cost.wait * 1e3:.0f}",
                f"{cost.grown / MB:.0f}",
                ", ".join(bomb.exceeded(cost)),
            )
    console.print(table)
    failed = sum(1 for bomb, cost in costs if bomb.exceeded(cost))
    console.print(
        f"{len(costs)} families, {failed} over a bound. 64 KB: {CPU_SECONDS:g} s of CPU, /livez below "
        f"{SMALL_WAIT * 1e3:g} ms. Larger ones: /livez below {LARGE_WAIT * 1e3:g} ms. "
        f"All: memory below {MOST_GROWTH / MB:g} MB."
    )


def _notable(costs: Sequence[tuple[Bomb, Cost]]) -> set[int]:
    """Return the numbers of those that exceed a bound, and of the most CPU, wait, and memory of each kind."""
    kinds: dict[str, list[int]] = {}
    for number, (bomb, _) in enumerate(costs):
        kinds.setdefault(bomb.name.partition(":")[0], []).append(number)
    notable = {number for number, (bomb, cost) in enumerate(costs) if bomb.exceeded(cost)}
    for numbers in kinds.values():
        notable.add(max(numbers, key=lambda number: costs[number][1].cpu))
        notable.add(max(numbers, key=lambda number: costs[number][1].wait))
        notable.add(max(numbers, key=lambda number: costs[number][1].grown))
    return notable
