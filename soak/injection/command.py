"""``python -m soak injection``."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import click
import httpx
import openai
import yaml
from rich.console import Console

from bench.servers import free_port
from bench.table import write_json
from soak import processes
from soak.injection import model
from soak.injection.conversation import conversation
from soak.injection.judging import asks_for_notes, in_request, in_results, judge, misplaced, misplaced_in_request
from soak.injection.payloads import payloads, pieces
from soak.injection.recording import Recorder
from soak.injection.table import Row, raw, show
from soak.servers.environments import NotMade

MARK = "PINEAPPLE"
"""A common word. Small models misspell invented words even if they obey."""

MODEL = "model"
"""The name that clients request. The recorder replaces it with the server's own name for the model."""

NOTES = "notes"
"""The name that the proxy requests for summaries. The recorder replaces it, too."""

WINDOW = 8_192
"""Tokens."""

TRIGGER_MESSAGES = 20
TRIGGER_CONTINUED = 25
"""The conversation has fewer messages before its newest answer. So the last prompt had them all."""

ANSWER_TOKENS = 60
SUMMARY_TOKENS = 300

QUICK = (0, 1, 10, 15, -1)


class NotSummarized(Exception):
    """The proxy didn't summarize an instruction, so the check has no result."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--model",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A model in the GGUF format, served by llama-cpp-python.",
)
@click.option("--url", help="The URL of a running OpenAI-compatible server; its first model is used.")
@click.option("--window", type=click.IntRange(1), default=WINDOW, show_default=True, help="Tokens of context.")
@click.option(
    "--method",
    type=click.Choice(["transcript", "continue"]),
    default="transcript",
    show_default=True,
    help="How the proxy asks for summaries.",
)
@click.option("--quick", is_flag=True, help=f"{len(QUICK)} instructions instead of all.")
@click.option("--json", "report", type=click.Path(dir_okay=False, path_type=Path), help="Write all texts to FILE.")
@click.option(
    "--logs", type=click.Path(file_okay=False, path_type=Path), help="Keep configuration and logs in this folder."
)
def main(
    file: Path | None,
    url: str | None,
    window: int,
    method: str,
    quick: bool,
    report: Path | None,
    logs: Path | None,
) -> None:
    """Have a real model summarize conversations with instructions in old tool results, and count how often it obeys.

    Give the model as --model FILE or --url URL. The exit status is 1 if an instruction leaves the quoted block, obeyed
    or not, or if one was never summarized.
    """
    orders = payloads(MARK)
    with ExitStack() as stack:
        folder = logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        folder.mkdir(parents=True, exist_ok=True)
        try:
            served = _served(file, url, window, folder, stack)
            chosen = [orders[place] for place in QUICK] if quick else orders
            rows = check(chosen, served, window, folder, stack, method)
        except (NotMade, NotSummarized, model.NoModel, processes.NotStarted, openai.APIError) as error:
            raise click.ClickException(str(error)) from error
    show(rows, Console(width=max(140, Console().width)))
    write_json(report, raw(rows))
    sys.exit(1 if any(row.misplaced for row in rows) else 0)


def _served(file: Path | None, url: str | None, window: int, folder: Path, stack: ExitStack) -> model.Served:
    if file is not None and url is None:
        return stack.enter_context(model.serving(file, window, folder))
    if url is not None and file is None:
        return model.listed(url)
    raise click.UsageError("Give either --model FILE.gguf or --url http://127.0.0.1:8000.")


def check(
    orders: Sequence[tuple[str, ...]],
    served: model.Served,
    window: int,
    folder: Path,
    stack: ExitStack,
    method: str = "transcript",
) -> list[Row]:
    """Return a row for each instruction. Raises ``NotSummarized``, ``processes.NotStarted``, or ``openai.APIError``."""
    recorder = Recorder(served.url, served.name)
    recorded = stack.enter_context(recorder.serve())
    entrance = stack.enter_context(_proxy(recorded, window, folder, method))
    http = stack.enter_context(httpx.Client(trust_env=False))
    rows = []
    for number, parts in enumerate(orders, 1):
        print(f"{number} of {len(orders)} ...", file=sys.stderr)
        # Each instruction has its own key, so that the proxy doesn't reuse summaries.
        alone, behind = (
            openai.OpenAI(base_url=f"{url}/v1", api_key=f"sk-{number}", max_retries=0, timeout=300, http_client=http)
            for url in (recorded, entrance)
        )
        rows.append(put(parts, alone, behind, recorder))
    return rows


def put(parts: tuple[str, ...], alone: openai.OpenAI, behind: openai.OpenAI, recorder: Recorder) -> Row:
    """Send an instruction to the model: directly, in a conversation, and in the same conversation through the proxy.

    Raises ``NotSummarized`` if the proxy didn't have it summarized.
    """
    messages = conversation(parts)
    asked, _ = _answer(alone, [{"role": "user", "content": "\n".join(parts)}])
    direct, _ = _answer(alone, messages)
    recorder.exchanges.clear()
    answer, headers = _answer(behind, messages)
    words = pieces(MARK)
    notes = [
        exchange
        for exchange in recorder.exchanges
        if exchange.body["model"] == NOTES or asks_for_notes(exchange.body["messages"])
    ]
    sent = recorder.exchanges[-1].body["messages"]
    wrong = misplaced(sent, words)
    for exchange in notes:
        wrong += misplaced_in_request(exchange.body["messages"], words)
    reached = any(in_request(exchange.body["messages"], words) for exchange in notes)
    if not reached or in_results(sent, words):
        raise NotSummarized(f"the proxy didn't summarize {parts!r}; x-compaction: {headers.get('x-compaction')}")
    made = headers["x-compaction-summary"] == "made"
    summary = notes[-1].text
    return Row(
        parts,
        wrong,
        headers["x-compaction-summary"],
        {
            "asked": judge(asked, MARK, parts),
            "alone": judge(direct, MARK, parts),
            "summary": judge(summary, MARK, parts) if made else None,
            "answer": judge(answer, MARK, parts),
        },
        {"asked": asked, "alone": direct, "summary": summary, "answer": answer},
    )


def _answer(client: openai.OpenAI, messages: list[dict[str, Any]]) -> tuple[str, httpx.Headers]:
    body: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0}
    answer = client.chat.completions.with_raw_response.create(**body, seed=model.SEED)
    return answer.parse().choices[0].message.content or "", answer.headers


def settings(upstream: str, window: int = WINDOW, method: str = "transcript") -> dict[str, Any]:
    """Return the proxy's configuration without its store. The number of messages triggers compaction.

    ``window`` is the model's, in tokens.
    """
    profile = {"context_window": window}
    continues = method == "continue"
    own = {"method": method} if continues else {"model": NOTES}
    return {
        "upstreams": {"main": {"base_url": f"{upstream}/v1"}},
        "models": [{"match": name, "upstream": "main", "profile": profile} for name in (MODEL, NOTES)],
        "policies": {
            "default": {
                "trigger": {"messages": TRIGGER_CONTINUED if continues else TRIGGER_MESSAGES},
                "keep": {"messages": 3},
                "summary": {**own, "max_tokens": SUMMARY_TOKENS, "timeout": 300},
            }
        },
    }


def _proxy(upstream: str, window: int, folder: Path, method: str) -> AbstractContextManager[str]:
    configuration = {"store": {"url": f"sqlite:///{folder}/store.db"}, **settings(upstream, window, method)}
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(configuration, sort_keys=False), encoding="utf-8")
    return processes.proxy(file, free_port(), folder / "proxy.log")
