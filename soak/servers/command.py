"""``python -m soak servers``."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import click
import httpx
import openai
import yaml
from rich.console import Console

from bench.servers import free_port
from bench.table import write_json
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
    """Return the profiles for the proxy by their names in the table. ``None`` means that there's no proxy."""
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
    help="May be repeated. Default: " + ", ".join(USUAL) + ".",
)
@click.option("--window", default=WINDOW, show_default=True, help="Tokens of the servers' context.")
@click.option("--fill", default=3.0, show_default=True, help="Length of a conversation, in windows.")
@click.option("--quick", is_flag=True, help="Two conversations for each row instead of twelve.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write every count to FILE.")
@click.option(
    "--logs", type=click.Path(file_okay=False, path_type=Path), help="Keep configurations and logs in this folder."
)
def main(names: Sequence[str], window: int, fill: float, quick: bool, file: Path | None, logs: Path | None) -> None:
    """Run real inference servers with tiny models, with and without the proxy, and print the results of clients.

    The exit status is 1 if a client of the proxy got an error, a response without content, or a stream without an end.
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
    write_json(file, raw(rows))
    sys.exit(0 if all(row.met is not False for row in rows) else 1)


def check(name: str, engine: Serving, window: int, fill: float, habits: Sequence[Habit], folder: Path) -> list[Row]:
    """Return the rows of a server."""
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
                        # Learned limits belong to a key. With its own key, no conversation profits from another.
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
