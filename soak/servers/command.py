"""``python -m soak servers``."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import click
import httpx
import msgspec
import openai
import yaml
from rich.console import Console

from bench.servers import free_port
from soak import processes
from soak.servers.conversing import HABITS, Habit, Tally, converse
from soak.servers.engines import ENGINES, MODEL, USUAL, Serving
from soak.servers.environments import NotMade
from soak.servers.table import Row, raw, show
from soak.servers.tap import Counts, Tap

WINDOW = 2_048

ALONE = "no proxy"
TIMES_TOO_LARGE = 4

QUICK = [Habit("chat", True, None), Habit("agent", False, 128)]


def settings(window: int) -> dict[str, Mapping[str, object] | None]:
    """The profiles that the proxy is given, by the name in the table; ``None`` stands for no proxy at all."""
    return {
        ALONE: None,
        "correct": {"context_window": window},
        f"{TIMES_TOO_LARGE} × too large": {"context_window": TIMES_TOO_LARGE * window},
        "none": {},
    }


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--server",
    "names",
    type=click.Choice(list(ENGINES)),
    multiple=True,
    help="May be repeated; left out: " + ", ".join(USUAL) + ".",
)
@click.option("--window", default=WINDOW, show_default=True, help="Of the servers, in tokens.")
@click.option("--fill", default=3.0, show_default=True, help="How many windows a conversation fills.")
@click.option("--quick", is_flag=True, help="Two conversations for each row in place of twelve.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write every count to FILE.")
@click.option(
    "--logs", type=click.Path(file_okay=False, path_type=Path), help="Keep configurations and logs in this folder."
)
def main(names: Sequence[str], window: int, fill: float, quick: bool, file: Path | None, logs: Path | None) -> None:
    """Real inference servers with tiny models, behind the proxy and without it, and print what clients saw.

    The exit status is 1 where a client of the proxy saw an error, an answer without content, or a stream that broke.
    """
    habits = QUICK if quick else HABITS
    rows: list[Row] = []
    with ExitStack() as stack:
        folder = logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        folder.mkdir(parents=True, exist_ok=True)
        for name in names or USUAL:
            place = folder / name.replace(", ", "-")
            place.mkdir()
            try:
                rows += check(name, ENGINES[name], window, fill, habits, place)
            except (NotMade, processes.NotStarted) as error:
                raise click.ClickException(f"{name}: {error}") from error
    console = Console(width=max(170, Console().width))
    show(rows, window, console)
    if file is not None:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(raw(rows))) + b"\n")
    sys.exit(0 if all(row.met is not False for row in rows) else 1)


def check(name: str, engine: Serving, window: int, fill: float, habits: Sequence[Habit], folder: Path) -> list[Row]:
    """The rows of one server."""
    rows = []
    with engine.serve(folder, window) as port:
        tap = Tap(port)
        with tap.serve() as tapped:
            for number, (setting, profile) in enumerate(settings(window).items()):
                print(f"{name}, profile: {setting} ...", file=sys.stderr)
                place = folder / f"{number}-{setting}".replace(" ", "-")
                place.mkdir()
                tap.counts = Counts()
                seen = Tally()
                with ExitStack() as stack:
                    entrance = tapped if profile is None else stack.enter_context(_proxy(tapped, profile, place))
                    http = stack.enter_context(httpx.Client(trust_env=False))
                    for seed, habit in enumerate(habits, 1):
                        # What refusals taught is kept by key: with one of its own each conversation begins anew.
                        client = openai.OpenAI(
                            base_url=f"{entrance}/v1",
                            api_key=f"sk-soak-{seed}",
                            max_retries=0,
                            timeout=300,
                            http_client=http,
                        )
                        converse(client, habit, seed, int(fill * window), seen)
                rows.append(Row(name, setting, profile is not None, seen, tap.counts))
    return rows


def _proxy(upstream: str, profile: Mapping[str, object], folder: Path) -> AbstractContextManager[str]:
    model: dict[str, object] = {"match": MODEL, "upstream": "main"}
    if profile:
        model["profile"] = dict(profile)
    configuration = {
        "store": {"url": f"sqlite:///{folder}/store.db"},
        "upstreams": {"main": {"base_url": f"{upstream}/v1"}},
        "models": [model],
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(configuration, sort_keys=False), encoding="utf-8")
    return processes.proxy(file, free_port(), folder / "proxy.log")
