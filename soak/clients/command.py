"""Drive real clients with default settings, in sessions longer than the window."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import click
import httpx

from bench import servers
from bench.table import table
from proxy import __version__
from proxy.recall.tool import NAME
from proxy.server.loopback import serve
from soak.clients import page
from soak.clients.install import NotInstalled
from soak.clients.programs import CLIENTS, MODEL, Api, Client
from soak.clients.scripts import DONE, Loop, Reading
from soak.clients.strict_chat import MAX_OUTPUT, StrictChat
from tests.kit.agent_script import Received, Script, step
from tests.kit.strict_messages import StrictMessages
from tests.kit.strict_responses import StrictResponses

WINDOW = 30_000
TURNS = 41
MINUTES = 15
ONCE_SECONDS = 60
KEYS = ("sk-soak", "sk-ant-soak")
"""The keys that the clients send."""
RESULTS = {
    "tool": "tool_call_id",
    "tool_result": "tool_use_id",
    "function_call_output": "call_id",
    "custom_tool_call_output": "call_id",
}
"""The field with the call's id in each kind of result."""
PRINTED = (".jsonl", ".log")
"""The suffixes of the files with the output of a client."""
CLAUDE_RATIO = 1.6
"""Tokens per token of ``o200k_base``, as the proxy assumes for Claude Code's default model."""

StandIn = StrictChat | StrictResponses | StrictMessages


@dataclass
class Row:
    """The results of a client. ``requests``, ``refused``, and ``faults`` are those of the upstream.

    ``reads`` are the calls of the proxy's tool. It's ``None`` if the requests never get the tool. ``after_402`` are the
    requests of a further run whose team has used up its budget.
    """

    client: str
    version: str = ""
    turns: int = 0
    results: int = 0
    errors: list[str] = field(default_factory=list)
    requests: int = 0
    compacted: int = 0
    summaries: int = 0
    reads: int | None = None
    after_402: int | None = None
    refused: int = 0
    faults: list[str] = field(default_factory=list)
    skipped: str = ""

    def met(self, turns: int) -> bool | None:
        """Return whether the session reached its end without an error. ``None`` if the client didn't run."""
        if self.skipped:
            return None
        reached = self.turns >= turns or self.results >= turns - 1
        worked = self.compacted > 0 and self.reads != 0
        return reached and worked and not (self.errors or self.faults or self.refused)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--client", "names", type=click.Choice(list(CLIENTS)), multiple=True, help="May be repeated. Default: all of them."
)
@click.option("--bridge", is_flag=True, help="The upstream has only chat completions, with a strict chat template.")
@click.option("--turns", default=TURNS, show_default=True, help="Turns of a session, or tool results of an agent.")
@click.option("--recall", is_flag=True, help="Let the models read archived messages by the proxy's tool.")
@click.option(
    "--keep", type=click.Path(file_okay=False, path_type=Path), help="Keep installations and logs in this folder."
)
@click.option("--write", type=click.Path(dir_okay=False, path_type=Path), help="Put the rows into this page.")
def main(names: Sequence[str], bridge: bool, turns: int, recall: bool, keep: Path | None, write: Path | None) -> None:
    """Install real clients, and drive each with default settings through the proxy to a strict stand-in.

    The exit status is 1 if a client showed an error, didn't reach its last turn, or wasn't compacted. It's also 1 if
    the upstream rejected a request.
    """
    rows: list[Row] = []
    with ExitStack() as stack:
        folder = (keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))).resolve()
        for name in names or CLIENTS:
            print(f"{name} ...", file=sys.stderr)
            place = folder / name.replace(" ", "-").lower()
            place.mkdir(parents=True, exist_ok=True)
            row = check(name, CLIENTS[name], turns, place, bridge=bridge, recall=recall)
            rows.append(row)
            if write is not None:
                page.written(write, [_page_row(row, CLIENTS[name], turns, bridge=bridge)])
    show(rows, turns)
    sys.exit(1 if any(row.met(turns) is False for row in rows) else 0)


def check(name: str, client: Client, turns: int, folder: Path, *, bridge: bool = False, recall: bool = False) -> Row:
    """Install and drive a client. Return the results."""
    row = Row(name)
    bridge = bridge or client.bridge
    try:
        row.version = client.install(client.packages, folder / "installed")
    except NotInstalled as error:
        row.skipped = str(error)
        return row
    reading = Reading(
        step if client.tool is None else Loop(client.tool, -(-turns // client.asks)).step,
        lambda: recall and f'"name": "{NAME}", "description"' in json.dumps(upstream.requests[-1].body),
    )
    window = int(WINDOW * client.windows)
    upstream = _stand_in(client.api, window, reading.step, bridge=bridge)
    work = folder / "work"
    work.mkdir(exist_ok=True)
    for stored in folder.glob("store.db*"):  # of an earlier run with the same conversation
        stored.unlink()
    with ExitStack() as stack:
        address = stack.enter_context(serve(upstream.app))
        configuration = settings(address, window, client.api, recall, bridge=bridge)
        proxy = stack.enter_context(servers.proxy(configuration, folder))
        lines, row.errors = _run(client, proxy.url, work, turns)
        row.compacted = proxy.metric("compaction_requests_total", "compacted")
    _fill(row, client, lines, upstream)
    row.errors += [*_lost(client, upstream), *_failed(upstream)]
    row.after_402 = _after_402(client, folder)
    if recall:
        row.reads = reading.reads if client.recalls else None
        if any(NAME in work.with_suffix(end).read_text(encoding="utf-8", errors="replace") for end in PRINTED):
            row.errors.append("the client saw the proxy's tool")
    return row


def _after_402(client: Client, folder: Path) -> int:
    """Return how often a client sends a request that the proxy refuses, because the team's budget is used up."""
    work = folder / "refused"
    work.mkdir(exist_ok=True)
    upstream = StrictChat(WINDOW, script=step)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
    keys = [f"sha256:{sha256(key.encode()).hexdigest()}" for key in KEYS]
    team = {"keys": keys, "limits": {"spend": {"tokens": 1, "per": "month"}}}
    with ExitStack() as stack:
        own = settings(stack.enter_context(serve(upstream.app)), WINDOW, "chat", recall=False)
        own["upstreams"]["main"]["api_key"] = "none"
        shared = {"auth": {"mode": "keys"}, "teams": {"soak": team}, "store": {"url": "sqlite://"}}
        proxy = stack.enter_context(servers.proxy({**own, **shared}, work))
        http = stack.enter_context(httpx.Client(trust_env=False, headers={"authorization": f"Bearer {KEYS[0]}"}))
        while http.post(f"{proxy.url}/v1/chat/completions", json=body).status_code != 402:
            time.sleep(0.1)
        before = proxy.metric("compaction_refusals_total", "budget")
        _run(client, proxy.url, work, 1, ONCE_SECONDS)
        return proxy.metric("compaction_refusals_total", "budget") - before


def _stand_in(api: Api, window: int, script: Script, *, bridge: bool) -> StandIn:
    if bridge:
        return StrictChat(window, script=script, alternate=True, max_output=window)
    if api == "messages":
        return StrictMessages(window, check="off", ratio=CLAUDE_RATIO, script=script)
    return StrictChat(window, script=script) if api == "chat" else StrictResponses(window, script=script)


def settings(upstream: str, window: int, api: str, recall: bool, *, bridge: bool = False) -> dict[str, Any]:
    """Return the proxy's configuration. Only the window of chat completions includes the output."""
    limits: dict[str, Any] = {"max_output_tokens": MAX_OUTPUT} if api == "chat" else {"max_input_tokens": window}
    if bridge:
        limits = {"max_output_tokens": window, "strict_alternation": True}
    profile = {"context_window": window, "max_output_tokens": 4_000, **limits}
    speaks = ["chat"] if bridge else ["chat", "responses", "messages"]
    return {
        "upstreams": {"main": {"base_url": f"{upstream}/v1", "speaks": speaks}},
        "models": [{"match": "*", "upstream": "main", "profile": {**profile, "tokenizer": "o200k_base"}}],
        "policies": {"default": {"recall": {"tool": "auto" if recall else "off"}}},
    }


def _run(
    client: Client, url: str, work: Path, turns: int, seconds: float = MINUTES * 60
) -> tuple[list[dict[str, Any]], list[str]]:
    """Run a client. Return the JSON objects that it printed, and the errors of its process.

    It has a home of its own, ``work``, and neither the keys nor the proxies of this process.
    """
    command = client.command(work.with_name("installed"), work, url)
    names = ("PATH", "LANG", "LC_ALL", "SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS")
    kept = {name: os.environ[name] for name in names if name in os.environ}
    own = {"HOME": str(work), "SOAK_TURNS": str(turns), "NO_PROXY": "127.0.0.1", **client.variables(url)}
    output, log = map(work.with_suffix, PRINTED)
    errors = []
    with output.open("wb") as out, log.open("wb") as err:
        try:
            done = subprocess.run(  # noqa: S603 - fixed commands
                command,
                cwd=work,
                env={**kept, **own},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                timeout=seconds,
            )
            if done.returncode:
                errors.append(f"exit status {done.returncode}: {servers.tail(log, 3)[-300:]}")
        except (OSError, subprocess.TimeoutExpired) as error:
            errors.append(str(error)[:300])
    printed = output.read_text(encoding="utf-8", errors="replace").splitlines()
    return [json.loads(line) for line in printed if line.startswith("{")], errors


def _fill(row: Row, client: Client, lines: Sequence[Mapping[str, Any]], upstream: StandIn) -> None:
    row.requests = len(upstream.requests)
    row.results = len({call for one in upstream.conversations for call in _answered(one)})
    row.refused = len(upstream.refused)
    row.faults = sorted({*upstream.faults, *(fault.message for fault in upstream.chat.faults)})
    row.summaries = len(upstream.chat.summaries)
    if not isinstance(upstream, StrictChat):
        row.summaries += sum(one.summary for one in upstream.requests)
    if client.tool is None:
        row.turns = sum(line.get("error") is None for line in lines)
        row.errors += [line["error"] for line in lines if line.get("error")]
        return
    row.turns = int(any(DONE in json.dumps(line) for line in lines))
    row.errors += [json.dumps(line)[:300] for line in lines if _is_error(line)]


def _lost(client: Client, upstream: StandIn) -> list[str]:
    """Return an error for each text that a client relies on and a compacted prompt lacks."""
    bodies = [json.dumps(received.body, ensure_ascii=False) for received in upstream.conversations]
    compacted = [body for body in bodies if "<conversation_summary>" in body]
    lacking = {text: sum(text not in body for body in compacted) for text in client.keeps}
    return [f"{text!r} is missing in {n} of {len(compacted)} compacted prompts" for text, n in lacking.items() if n]


def _failed(upstream: StandIn) -> list[str]:
    """Return an error for each of the agent's calls whose result doesn't have the second of its numbers."""
    newest = [(answered[-1], received) for received in upstream.conversations if (answered := _answered(received))]
    loops = [(id_, int(id_.rpartition("_")[2]) + 1, one) for id_, one in newest if id_.startswith("call_loop_")]
    return [f"{id_} failed" for id_, number, one in loops if f"{number}001" not in json.dumps(one.body)]


def _is_error(line: Mapping[str, Any]) -> bool:
    item = line.get("item")
    kinds = [line.get("type"), item.get("type") if isinstance(item, Mapping) else None]
    return "error" in kinds or "turn.failed" in kinds or line.get("is_error") is True


def _answered(received: Received) -> list[str]:
    """Return the ids of the calls whose results are in a request."""
    given = received.body.get("messages") or received.body.get("input", [])
    items = [item for item in given if isinstance(item, dict)]
    items += [block for item in items if isinstance(item.get("content"), list) for block in item["content"]]
    return [item[RESULTS[kind]] for item in items if (kind := item.get("type", item.get("role"))) in RESULTS]


def _page_row(row: Row, client: Client, turns: int, *, bridge: bool) -> list[str]:
    """Return the cells of the page's row."""
    api = f"{client.api}, chat upstream" if bridge or client.bridge else client.api
    session = f"{turns} tool calls" if client.tool else f"{turns} turns, {row.results} results"
    result = {True: "passed", False: "failed", None: "not installed"}[row.met(turns)]
    if row.refused and replace(row, refused=0).met(turns):
        result = f"passed, {row.refused} refused and retried"
    figures = ["–" if one is None else str(one) for one in (row.requests, row.compacted, row.summaries, row.after_402)]
    day = datetime.now(UTC).date().isoformat()
    return [row.client, row.version or "–", api, session, *figures, result, __version__, day]


def show(rows: Sequence[Row], turns: int) -> None:
    """Print all rows, and the errors below."""
    names = ("turns", "results", "errors", "requests", "compacted", "summaries", "reads", "refused", "faults", "met")
    cells: list[list[object]] = []
    for row in rows:
        numbers = [row.turns, row.results, len(row.errors), row.requests, row.compacted, row.summaries]
        reads, met = "" if row.reads is None else row.reads, {True: "yes", False: "no", None: ""}[row.met(turns)]
        cells.append([row.client, row.version, *numbers, reads, row.refused, len(row.faults), met])
    click.echo(table(("client", "version", *names), cells, left={"version"}))
    for row in rows:
        for text in [*row.errors, *row.faults, *([f"not installed: {row.skipped}"] if row.skipped else [])]:
            click.echo(f"{row.client}: {text}")


if __name__ == "__main__":
    main()
