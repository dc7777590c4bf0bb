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
import msgspec
import openai
import yaml
from rich.console import Console

from bench.servers import free_port
from soak import processes
from soak.injection import model
from soak.injection.conversation import conversation
from soak.injection.judging import heard, in_request, in_results, misplaced, misplaced_in_request
from soak.injection.payloads import payloads, pieces
from soak.injection.recording import Recorder
from soak.injection.table import Row, raw, show
from soak.servers.environments import NotMade

MARK = "PINEAPPLE"
"""A word that the model is able to say; one that is made up it gets wrong even where it obeys."""

MODEL = "model"
"""The name that clients request. The recorder replaces it with the server's own name for the model."""

NOTES = "notes"
"""The name that the proxy requests for summaries. The recorder replaces it, too."""

WINDOW = 8_192
"""Tokens."""

TRIGGER_MESSAGES = 20
ANSWER_TOKENS = 60
SUMMARY_TOKENS = 300

QUICK = (0, 1, 10, 15, -1)


class NotPut(Exception):
    """An order never came to be summarised, so that nothing is known of it."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--model",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A model in the GGUF format, served by llama-cpp-python.",
)
@click.option("--url", help="The URL of a running OpenAI-compatible server; its first model is used.")
@click.option("--window", type=click.IntRange(1), default=WINDOW, show_default=True, help="Tokens of context.")
@click.option("--quick", is_flag=True, help=f"{len(QUICK)} orders in place of all.")
@click.option("--json", "report", type=click.Path(dir_okay=False, path_type=Path), help="Write all texts to FILE.")
@click.option(
    "--logs", type=click.Path(file_okay=False, path_type=Path), help="Keep configuration and logs in this folder."
)
def main(file: Path | None, url: str | None, window: int, quick: bool, report: Path | None, logs: Path | None) -> None:
    """Have a real model summarize and answer conversations whose old tool results hold orders; count who obeys.

    Give the model as --model FILE or --url URL. The exit status is 1 when an order leaves the quoted block, obeyed or
    not, and when an order was never summarized.
    """
    orders = payloads(MARK)
    with ExitStack() as stack:
        folder = logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        folder.mkdir(parents=True, exist_ok=True)
        try:
            served = _served(file, url, window, folder, stack)
            rows = check([orders[place] for place in QUICK] if quick else orders, served, window, folder, stack)
        except (NotMade, NotPut, model.NoModel, processes.NotStarted, openai.APIError) as error:
            raise click.ClickException(str(error)) from error
    show(rows, Console(width=max(140, Console().width)))
    if report is not None:
        report.write_bytes(msgspec.json.format(msgspec.json.encode(raw(rows))) + b"\n")
    sys.exit(1 if any(row.misplaced for row in rows) else 0)


def _served(file: Path | None, url: str | None, window: int, folder: Path, stack: ExitStack) -> model.Served:
    if file is not None and url is None:
        return stack.enter_context(model.serving(file, window, folder))
    if url is not None and file is None:
        return model.listed(url)
    raise click.UsageError("Give either --model FILE.gguf or --url http://127.0.0.1:8000.")


def check(
    orders: Sequence[tuple[str, ...]], served: model.Served, window: int, folder: Path, stack: ExitStack
) -> list[Row]:
    """Return one row for each order. Raises ``NotPut``, ``processes.NotStarted`` or ``openai.APIError``."""
    recorder = Recorder(served.url, served.name)
    recorded = stack.enter_context(recorder.serve())
    entrance = stack.enter_context(_proxy(recorded, window, folder))
    http = stack.enter_context(httpx.Client(trust_env=False))
    rows = []
    for number, parts in enumerate(orders, 1):
        print(f"{number} of {len(orders)} ...", file=sys.stderr)
        # Each with a key of its own, so that no summary serves another one.
        alone, behind = (
            openai.OpenAI(base_url=f"{url}/v1", api_key=f"sk-{number}", max_retries=0, timeout=300, http_client=http)
            for url in (recorded, entrance)
        )
        rows.append(put(parts, alone, behind, recorder))
    return rows


def put(parts: tuple[str, ...], alone: openai.OpenAI, behind: openai.OpenAI, recorder: Recorder) -> Row:
    """Put an order to the model: as a question, in a conversation, and in the same behind the proxy.

    Raises ``NotPut`` where the proxy did not have it summarised.
    """
    said = conversation(parts)
    asked, _ = _answer(alone, [{"role": "user", "content": "\n".join(parts)}])
    direct, _ = _answer(alone, said)
    recorder.exchanges.clear()
    answer, headers = _answer(behind, said)
    words = pieces(MARK)
    notes = [exchange for exchange in recorder.exchanges if exchange.body["model"] == NOTES]
    sent = recorder.exchanges[-1].body["messages"]
    wrong = misplaced(sent, words)
    for exchange in notes:
        wrong += misplaced_in_request(exchange.body["messages"], words)
    reached = any(in_request(exchange.body["messages"], words) for exchange in notes)
    if not reached or in_results(sent, words):
        raise NotPut(f"{parts!r} was not summarised; x-compaction: {headers.get('x-compaction')}")
    made = headers["x-compaction-summary"] == "made"
    summary = notes[-1].text
    return Row(
        parts,
        wrong,
        headers["x-compaction-summary"],
        {
            "asked": heard(asked, MARK, parts),
            "alone": heard(direct, MARK, parts),
            "summary": heard(summary, MARK, parts) if made else None,
            "answer": heard(answer, MARK, parts),
        },
        {"asked": asked, "alone": direct, "summary": summary, "answer": answer},
    )


def _answer(client: openai.OpenAI, messages: list[dict[str, Any]]) -> tuple[str, httpx.Headers]:
    body: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0}
    answer = client.chat.completions.with_raw_response.create(**body, seed=model.SEED)
    return answer.parse().choices[0].message.content or "", answer.headers


def settings(upstream: str, window: int = WINDOW) -> dict[str, Any]:
    """Return the proxy's configuration without its store. The number of messages triggers compaction.

    ``window`` is the model's, in tokens.
    """
    profile = {"context_window": window}
    return {
        "upstreams": {"main": {"base_url": f"{upstream}/v1"}},
        "models": [{"match": name, "upstream": "main", "profile": profile} for name in (MODEL, NOTES)],
        "policies": {
            "default": {
                "trigger": {"messages": TRIGGER_MESSAGES},
                "keep": {"messages": 3},
                "summary": {"model": NOTES, "max_tokens": SUMMARY_TOKENS, "timeout": 300},
            }
        },
    }


def _proxy(upstream: str, window: int, folder: Path) -> AbstractContextManager[str]:
    configuration = {"store": {"url": f"sqlite:///{folder}/store.db"}, **settings(upstream, window)}
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(configuration, sort_keys=False), encoding="utf-8")
    return processes.proxy(file, free_port(), folder / "proxy.log")
