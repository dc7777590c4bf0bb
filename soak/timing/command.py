"""Check whether response times reveal another team's conversations.

Two teams use one proxy. One team has sent half of the conversations before, so the proxy stored their summaries. The
other team sends all of them for the first time, in random order. If the two halves took different times, it could find
out which conversations the first team has.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from math import erfc, sqrt
from pathlib import Path
from statistics import median
from typing import Any

import click
import httpx
import yaml
from rich.console import Console
from rich.table import Table
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from proxy.config import load
from proxy.server.app import create_app
from proxy.server.loopback import serve
from tests.kit.upstream import is_summary_request

WINDOW = 4_000
KEYS = {"first": "cp-first", "second": "cp-second"}
WORDS = "harbour ticket deploy orange window lantern gravel signal meadow copper letter engine"

LEAST_P = 0.01
"""The halves differ if the p-value is below this level."""


@click.command()
@click.option("--samples", default=500, show_default=True, help="Responses of each kind.")
@click.option("--seed", default=1, show_default=True)
def main(samples: int, seed: int) -> None:
    """Measure the response times. The exit status is 1 if the halves differ."""
    chance = random.Random(seed)  # noqa: S311 - no secret
    with tempfile.TemporaryDirectory() as folder, _proxy(Path(folder)) as (url, upstream):
        unknown, stored, own = _measured(url, samples, chance, lambda: upstream.summaries)
    table = Table("sent by the second team, ms", "median", "p (Mann-Whitney)")
    table.add_row("new to both teams", f"{median(unknown) * 1e3:.2f}", "")
    p = mann_whitney(unknown, stored)
    table.add_row("stored for the first team", f"{median(stored) * 1e3:.2f}", f"{p:.3f}, target: over {LEAST_P}")
    table.add_row("sent again by the second team", f"{median(own) * 1e3:.2f}", f"{mann_whitney(unknown, own):.3g}")
    Console(width=100).print(table)
    sys.exit(0 if p > LEAST_P else 1)


def _measured(
    url: str, samples: int, chance: random.Random, made: Callable[[], int]
) -> tuple[list[float], list[float], list[float]]:
    """Return the seconds of the second team's responses to three kinds of conversations.

    The kinds are: new to both teams, stored for the first team, and sent again.
    """
    with httpx.Client(trust_env=False, timeout=60) as http:

        def ask(team: str, number: int) -> float:
            begun = time.perf_counter()
            answer = http.post(
                f"{url}/v1/chat/completions",
                json={"model": "m", "messages": conversation(number)},
                headers={"authorization": f"Bearer {KEYS[team]}"},
            )
            taken = time.perf_counter() - begun
            if answer.status_code != 200 or answer.headers["x-compaction"] != "compacted":
                raise RuntimeError(f"the proxy returned {answer.status_code}: {answer.text[:300]}")
            return taken

        numbers = list(range(2 * samples))
        chance.shuffle(numbers)
        known = set(numbers[:samples])
        for number in sorted(known):
            ask("first", number)
        chance.shuffle(numbers)
        for number in range(-20, 0):
            ask("second", number)
        before = made()
        taken = {number: ask("second", number) for number in numbers}
        if made() - before < 2 * samples:
            raise RuntimeError("the second team didn't get its own summaries")
        own = [ask("second", number) for number in numbers[:samples]]
    return [taken[n] for n in numbers if n not in known], [taken[n] for n in numbers if n in known], own


class Forgetful:
    """An upstream whose time doesn't depend on the request. It stores nothing."""

    def __init__(self) -> None:
        self.summaries = 0
        self.app = Starlette(routes=[Route("/v1/chat/completions", self._answer, methods=["POST"])])

    async def _answer(self, request: Request) -> Response:
        self.summaries += is_summary_request(await request.json())
        message = {"role": "assistant", "content": "Goal: go on. Done so far: what was asked for."}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return JSONResponse({"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]})


@contextlib.contextmanager
def _proxy(folder: Path) -> Iterator[tuple[str, Forgetful]]:
    upstream = Forgetful()
    with serve(upstream.app) as url:
        profile = {"context_window": WINDOW, "tokenizer": "o200k_base"}
        digests = {team: hashlib.sha256(key.encode()).hexdigest() for team, key in KEYS.items()}
        settings: dict[str, Any] = {
            "auth": {"mode": "keys"},
            "store": {"url": f"sqlite:///{folder}/store.db"},
            "upstreams": {"main": {"base_url": f"{url}/v1", "api_key": "sk-upstream"}},
            "models": [{"match": "*", "upstream": "main", "profile": profile}],
            "teams": {team: {"keys": [f"sha256:{digest}"]} for team, digest in digests.items()},
        }
        file = folder / "config.yaml"
        file.write_text(yaml.safe_dump(settings))
        with serve(create_app(load(file, {}))) as entrance:
            yield entrance, upstream


def conversation(number: int) -> list[dict[str, str]]:
    """Return a conversation over the trigger. Each number gives other words."""
    chance = random.Random(number)  # noqa: S311 - no secret
    messages = [{"role": "system", "content": "Be brief."}]
    for turn in range(8):
        words = " ".join(chance.choices(WORDS.split(), k=190))
        messages.append({"role": "user", "content": f"turn {turn} of {number}: {words}"})
        messages.append({"role": "assistant", "content": " ".join(chance.choices(WORDS.split(), k=190))})
    return [*messages, {"role": "user", "content": f"And now, {number}?"}]


def mann_whitney(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the two-sided p-value of the Mann-Whitney U test, in the normal approximation without ties."""
    ranked = sorted([(value, 0) for value in a] + [(value, 1) for value in b])
    ranks = sum(rank for rank, (_, group) in enumerate(ranked, start=1) if group == 0)
    u = ranks - len(a) * (len(a) + 1) / 2
    spread = sqrt(len(a) * len(b) * (len(a) + len(b) + 1) / 12)
    return erfc(abs(u - len(a) * len(b) / 2) / spread / sqrt(2))
