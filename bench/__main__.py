"""``python -m bench``."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress

from bench import alone, bodies, cases, servers
from bench.figures import FULL, QUICK, TINY, Row, Scale, raw
from bench.table import show, write_json

SCALES = {"full": FULL, "quick": QUICK, "tiny": TINY}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", "scale", flag_value="quick", help="Few rounds.")
@click.option("--tiny", "scale", flag_value="tiny", help="One short round, to check that everything runs.")
@click.option("--api", "apis", multiple=True, type=click.Choice(list(bodies.APIS)), help="Measure only this API.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write every round to FILE.")
def main(scale: str | None, apis: Sequence[str], file: Path | None) -> None:
    """Compare the proxy with a minimal pass-through, and print the table.

    The table shows missed targets. The exit status is 0 if every measurement ran. With
    ``--api``, the rows about the process are omitted.
    """
    chosen = SCALES[scale or "full"]
    console = Console(width=max(140, Console().width))
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        bar = progress.add_task("measuring", total=chosen.rounds + (0 if apis else chosen.starts + 3))
        rows = measure(chosen, apis, lambda: progress.advance(bar))
    show(rows, chosen.rounds, servers.cores(), console)
    write_json(file, raw(rows))


def measure(scale: Scale, apis: Sequence[str], step: alone.Step) -> list[Row]:
    """Return all rows, or those of some APIs. The client is this process. It runs on the upstream's core."""
    server_core, client_core = servers.cores()
    with (
        servers.pinned(client_core),
        tempfile.TemporaryDirectory(prefix="bench-") as name,
        servers.upstream(client_core) as upstream,
    ):
        passthrough = partial(servers.passthrough, server_core, upstream)
        proxy = partial(servers.proxy, server_core, upstream, Path(name))
        database = Path(name) / "cold.db"
        restarted = partial(proxy, lambda port, _: servers.configuration(port, database))
        started = [] if apis else alone.starts(passthrough, proxy, scale, step)
        with passthrough() as theirs, proxy() as ours:
            rows = cases.measure(theirs, ours, scale, apis or list(bodies.APIS), step) + started
            if apis:
                return rows
            rows += alone.event_loop(theirs, ours, scale)
            step()
            rows += alone.cold(theirs, restarted, scale)
            step()
        rows += alone.planning(scale)
        step()
        return rows


if __name__ == "__main__":
    main()
