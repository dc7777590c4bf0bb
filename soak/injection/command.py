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

NOTES = "notes"
"""The name by which the proxy asks for summaries; the server has one model and takes any name for it."""

TRIGGER_MESSAGES = 20
ANSWER_TOKENS = 60
SUMMARY_TOKENS = 300

QUICK = (0, 1, 10, 15, -1)


class NotPut(Exception):
    """An order never came to be summarised, so that nothing is known of it."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True, help=f"{len(QUICK)} orders in place of all.")
@click.option(
    "--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write all that was said to FILE."
)
@click.option(
    "--logs", type=click.Path(file_okay=False, path_type=Path), help="Keep configuration and logs in this folder."
)
def main(quick: bool, file: Path | None, logs: Path | None) -> None:
    """Orders in old tool results, summarised and answered by a real small model; who obeys is counted.

    The exit status is 1 where an order left the quoted block, whoever obeyed it, and where one was never summarised.
    """
    orders = payloads(MARK)
    with ExitStack() as stack:
        folder = logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        folder.mkdir(parents=True, exist_ok=True)
        try:
            rows = check([orders[place] for place in QUICK] if quick else orders, folder, stack)
        except (NotMade, NotPut, processes.NotStarted, openai.APIError) as error:
            raise click.ClickException(str(error)) from error
    show(rows, Console(width=max(140, Console().width)))
    if file is not None:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(raw(rows))) + b"\n")
    sys.exit(1 if any(row.misplaced for row in rows) else 0)


def check(orders: Sequence[tuple[str, ...]], folder: Path, stack: ExitStack) -> list[Row]:
    """One row for each order. Raises ``NotMade``, ``NotPut``, ``processes.NotStarted`` or ``openai.APIError``."""
    server = stack.enter_context(model.serving(folder))
    recorder = Recorder(server)
    entrance = stack.enter_context(_proxy(stack.enter_context(recorder.serve()), folder))
    http = stack.enter_context(httpx.Client(trust_env=False))
    rows = []
    for number, parts in enumerate(orders, 1):
        print(f"{number} of {len(orders)} ...", file=sys.stderr)
        # Each with a key of its own, so that no summary serves another one.
        alone, behind = (
            openai.OpenAI(base_url=f"{url}/v1", api_key=f"sk-{number}", max_retries=0, timeout=300, http_client=http)
            for url in (server, entrance)
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
    body: dict[str, Any] = {"model": model.MODEL, "messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0}
    answer = client.chat.completions.with_raw_response.create(**body, seed=model.SEED)
    return answer.parse().choices[0].message.content or "", answer.headers


def settings(upstream: str) -> dict[str, Any]:
    """The proxy's configuration, without its store: conversations are compacted by their number of messages."""
    profile = {"context_window": model.WINDOW}
    return {
        "upstreams": {"main": {"base_url": f"{upstream}/v1"}},
        "models": [{"match": name, "upstream": "main", "profile": profile} for name in (model.MODEL, NOTES)],
        "policies": {
            "default": {
                "trigger": {"messages": TRIGGER_MESSAGES},
                "keep": {"messages": 3},
                "summary": {"model": NOTES, "max_tokens": SUMMARY_TOKENS, "timeout": 300},
            }
        },
    }


def _proxy(upstream: str, folder: Path) -> AbstractContextManager[str]:
    configuration = {"store": {"url": f"sqlite:///{folder}/store.db"}, **settings(upstream)}
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(configuration, sort_keys=False), encoding="utf-8")
    return processes.proxy(file, free_port(), folder / "proxy.log")
