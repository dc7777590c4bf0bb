"""Run the demo: the same session directly at the upstream and through the proxy, compared in a table."""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import httpx
import openai
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from proxy.demo.agent import AGENTS, Session
from proxy.demo.apis import EveryApi
from proxy.demo.counting import RequestCounter
from proxy.demo.script import FACTS, decide, facts_in
from proxy.demo.upstream import Received, StandIn
from proxy.server.loopback import serve

MODEL = "stand-in-16k"
WINDOW = 16_000
MAX_OUTPUT = 2_000
ANSWER_WITHIN = 60.0
"""Timeout of the agent's requests, in seconds."""

TITLES = {"chat": "chat completions", "responses": "Responses", "messages": "Messages"}
"""Names of the APIs, as shown."""

Way = Callable[[str], AbstractContextManager[str]]
"""Maps the upstream's URL to the URL that the agent calls."""


def demo(turns: int = 60, api: str = "chat") -> int:
    """Run both sessions with an API of ``TITLES``, and print the table.

    Return exit status 0 if the session failed without the proxy and finished with it, and 1 otherwise. Raises
    ``ValueError`` for less than one turn.
    """
    if turns < 1:
        raise ValueError(f"The demo needs at least one turn (got {turns}).")
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        without = _shown(progress, "without the proxy", turns, straight, api)
        protected = _shown(progress, "with the proxy", turns, through_proxy, api)
    console.print(table(turns, without, protected, api))
    good, words = verdict(turns, without, protected)
    console.print(words, style="green" if good else "bold red", highlight=False)
    return 0 if good else 1


def session(turns: int, way: Way, on_turn: Callable[[], None], api: str = "chat") -> Figures:
    """Run one session of the agent against a new upstream."""
    upstream = EveryApi(window=WINDOW, max_output=MAX_OUTPUT, responder=decide, model=MODEL)
    with serve(upstream.app) as url, way(url) as entrance, client(entrance) as caller:
        seen = AGENTS[api](caller, MODEL).run(turns, on_turn)
    return figures(seen, upstream)


def client(url: str) -> openai.OpenAI:
    """Return the official client. It ignores the machine's proxy settings, and doesn't retry, to show each refusal."""
    direct = httpx.Client(trust_env=False)
    return openai.OpenAI(
        base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=ANSWER_WITHIN, http_client=direct
    )


def straight(upstream: str) -> AbstractContextManager[str]:
    """Call the upstream without the proxy."""
    return contextlib.nullcontext(upstream)


@contextlib.contextmanager
def through_proxy(upstream: str) -> Iterator[str]:
    """Start the proxy in front of the upstream, with a configuration file and a temporary store."""
    # Import here, because sessions without the proxy don't need these modules.
    from proxy.config import load
    from proxy.server.app import Proxy

    with tempfile.TemporaryDirectory(prefix="compaction-demo-") as folder:
        file = Path(folder, "config.yaml")
        file.write_text(configuration(upstream, Path(folder, "demo.db")), encoding="utf-8")
        with serve(Proxy(load(file, {}))) as url:
            yield url


def configuration(upstream: str, database: Path) -> str:
    """Return the proxy's configuration as YAML."""
    profile = {
        "context_window": WINDOW,
        "max_input_tokens": WINDOW,
        "max_output_tokens": MAX_OUTPUT,
        "tokenizer": "o200k_base",
    }
    settings = {
        "store": {"url": f"sqlite:///{database}"},
        "upstreams": {
            "main": {"provider": "openai", "base_url": f"{upstream}/v1", "api_key": "unused", "speaks": list(AGENTS)}
        },
        "models": [{"match": "*", "upstream": "main", "profile": profile}],
    }
    return yaml.safe_dump(settings, sort_keys=False)


def table(turns: int, without: Figures, protected: Figures, api: str) -> Table:
    """Return a table that compares both runs."""
    shown = Table(title=f"An agent's session of {turns:,} turns, window {WINDOW:,} tokens, {TITLES[api]}")
    shown.add_column()
    shown.add_column("without the proxy", justify="right")
    shown.add_column("with the proxy", justify="right")
    for row in rows(without, protected):
        shown.add_row(*row)
    return shown


def verdict(turns: int, without: Figures, protected: Figures) -> tuple[bool, str]:
    """Return whether the demo succeeded, and a sentence about its result."""
    if protected.error:
        return False, f"With the proxy the session failed in turn {protected.turns + 1}: {protected.error}"
    if not without.error:
        return False, (
            f"{turns} turns fit the window without the proxy: nothing was shown. Ask for more turns (--turns 60)."
        )
    return True, (
        f"Without the proxy the session failed in turn {without.turns + 1}: {without.error}\n"
        f"With the proxy it ran through all {protected.turns} turns."
    )


def _shown(progress: Progress, name: str, turns: int, way: Way, api: str) -> Figures:
    """Run a session with a progress bar."""
    bar = progress.add_task(name, total=turns)
    run = session(turns, way, lambda: progress.advance(bar), api)
    progress.stop_task(bar)
    return run


@dataclass(frozen=True, slots=True)
class Figures:
    """One run. Sizes are in the upstream's tokens. ``cacheable`` is a share from 0.0 to 1.0.

    ``prompt_tokens`` and ``largest_prompt`` cover the answered requests. ``summary_tokens`` is the additional input of
    summary requests. ``facts`` is the number of facts in the last answered request.
    """

    turns: int
    error: str | None
    prompt_tokens: int
    summary_tokens: int
    largest_prompt: int
    refused: int
    compacted: int
    summaries: int
    digests: int
    faults: int
    facts: int
    cacheable: float
    seconds: float


def figures(session: Session, upstream: StandIn) -> Figures:
    """Combine the figures of the application and the upstream."""
    answered = [received for received in upstream.conversations if received.status == 200]
    summaries = [received for received in upstream.summaries if received.status == 200]
    done = Counter(headers.get("x-compaction", "") for headers in session.headers)
    made = Counter(headers.get("x-compaction-summary", "") for headers in session.headers)
    return Figures(
        turns=session.turns,
        error=session.error,
        prompt_tokens=sum(received.tokens for received in answered),
        summary_tokens=sum(received.tokens for received in summaries),
        largest_prompt=max((received.tokens for received in answered), default=0),
        refused=sum(received.status != 200 for received in upstream.requests),
        compacted=done["compacted"],
        summaries=len(summaries),
        digests=made["digest"],
        faults=len(upstream.faults),
        facts=facts_in(answered[-1].body["messages"]) if answered else 0,
        cacheable=cacheable(answered, upstream.counter),
        seconds=session.seconds,
    )


def cacheable(requests: list[Received], counter: RequestCounter) -> float:
    """Return the cacheable share of the prompts: the prefix that each has in common with the one before it.

    The prefix consists of identical tools and whole messages, so the result is slightly too low. The first request
    doesn't count.
    """
    common = sum(_common(before.body, after.body, counter) for before, after in pairwise(requests))
    total = sum(received.tokens for received in requests[1:])
    return common / total if total else 0.0


def _common(before: Mapping[str, Any], after: Mapping[str, Any], counter: RequestCounter) -> int:
    """Return the tokens of the common prefix of two prompts. Tools come before the messages."""
    if before.get("tools") != after.get("tools"):
        return 0
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(before["messages"], after["messages"], strict=False))
    size = counter.request({**after, "messages": [message for _, message in pairs]})
    return size.total


ROWS: dict[str, Callable[[Figures], str]] = {
    "turns done": lambda run: f"{run.turns:,}",
    "error": lambda run: run.error.partition(":")[0] if run.error else "none",
    "tokens sent": lambda run: f"{run.prompt_tokens:,}",
    "tokens sent for summaries": lambda run: f"{run.summary_tokens:,}",
    "largest prompt": lambda run: f"{run.largest_prompt:,}",
    "requests refused upstream": lambda run: f"{run.refused:,}",
    "turns compacted": lambda run: f"{run.compacted:,}",
    "summaries made": lambda run: f"{run.summaries:,}" + (f" ({run.digests:,} digests)" if run.digests else ""),
    "malformed conversations": lambda run: f"{run.faults:,}",
    "early facts still visible": lambda run: f"{run.facts} of {len(FACTS)} in turn {run.turns:,}",
    "prompt a cache can hold": lambda run: f"{run.cacheable:.1%}",
    "wall time": lambda run: f"{run.seconds:.1f} s",
}
"""Table rows: their names and how to format their values."""


def rows(without: Figures, protected: Figures) -> list[tuple[str, str, str]]:
    """Return the rows of the table: name, value without the proxy, value with the proxy."""
    return [(name, show(without), show(protected)) for name, show in ROWS.items()]
