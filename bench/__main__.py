"""``python -m bench``."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress

from bench import alone, bodies, cases, compactions, servers
from bench.figures import FULL, QUICK, TINY, Row, Scale, raw
from bench.quality.langchain import ROOT, LangChain, langchain
from bench.table import show, write_json

SCALES = {"full": FULL, "quick": QUICK, "tiny": TINY}
GROUPS = ("requests", "turns", "compaction", "beside", "process")
PYTHON = ROOT / ".venv-bench" / "bin" / "python"
THRESHOLD = {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20)}
"""By default, the C library returns the memory of a large body after each request, which causes page faults. Both
servers have this threshold for turns of 1.1 MB."""

Start = Callable[..., contextlib.AbstractContextManager[servers.Server]]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", "scale", flag_value="quick", help="Few rounds.")
@click.option("--tiny", "scale", flag_value="tiny", help="One short round, to check that everything runs.")
@click.option("--api", "apis", multiple=True, type=click.Choice(list(bodies.APIS)),
              help="Measure only the rows of this API.")  # fmt: skip
@click.option("--only", "groups", multiple=True, type=click.Choice(GROUPS), help="Measure only these rows.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write every round to FILE.")
def main(scale: str | None, apis: Sequence[str], groups: Sequence[str], file: Path | None) -> None:
    """Compare the proxy with a minimal pass-through, and print the table.

    The table shows missed targets. The exit status is 0 if every measurement ran.
    """
    chosen = SCALES[scale or "full"]
    wanted = groups or (GROUPS[:2] if apis else GROUPS)
    steps = {"requests": 1, "turns": 2, "compaction": 1, "beside": 3, "process": (chosen.starts + 3) / chosen.rounds}
    console = Console(width=max(150, Console().width))
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        bar = progress.add_task("measuring", total=chosen.rounds * sum(steps[group] for group in wanted))
        rows = measure(chosen, apis or list(bodies.APIS), wanted, lambda: progress.advance(bar))
    show(rows, chosen.rounds, servers.cores(), console)
    if "compaction" in wanted and not PYTHON.exists():
        console.print("The rows of LangChain are omitted. `scripts/bench quality` creates its environment.")
    write_json(file, raw(rows))


def measure(scale: Scale, apis: Sequence[str], groups: Sequence[str], step: alone.Step) -> list[Row]:
    """Return the rows of some APIs and groups. The client is this process. It runs on the upstream's core."""
    server_core, client_core = servers.cores()
    with (
        servers.pinned(client_core),
        tempfile.TemporaryDirectory(prefix="bench-") as name,
        servers.upstream(client_core) as upstream,
    ):
        passthrough = partial(servers.passthrough, server_core, upstream)
        proxy = partial(servers.proxy, server_core, upstream, Path(name))
        rows: list[Row] = []
        if "requests" in groups:
            with passthrough() as theirs, proxy() as ours:
                rows += cases.measure(theirs, ours, cases.usual(scale, apis), scale.rounds, step)
        if "turns" in groups:
            for large in (False, True):
                environment = THRESHOLD if large else {}
                with passthrough(environment=environment) as theirs, proxy(environment=environment) as ours:
                    rows += cases.measure(theirs, ours, cases.known(scale, apis, large=large), scale.rounds, step)
        if "compaction" in groups:
            with passthrough() as theirs, proxy(compactions.configuration) as ours, _langchain(server_core) as other:
                rows += compactions.first(theirs, ours, other, scale, step)
        if "beside" in groups:
            with passthrough() as theirs, proxy(compactions.configuration) as ours:
                rows += compactions.beside(theirs, ours, scale, step)
        if "process" in groups:
            rows += _process(passthrough, proxy, Path(name), scale, step)
        return rows


def _process(passthrough: Start, proxy: Start, folder: Path, scale: Scale, step: alone.Step) -> list[Row]:
    """Return the rows about the process."""
    restarted = partial(proxy, lambda port, _: servers.configuration(port, folder / "cold.db"))
    rows = alone.starts(passthrough, proxy, scale, step)
    with passthrough() as theirs, proxy() as ours:
        rows += alone.event_loop(theirs, ours, scale)
        step()
        rows += alone.cold(theirs, restarted, scale)
        step()
    rows += alone.blocking(scale)
    step()
    return rows


@contextlib.contextmanager
def _langchain(core: int) -> Iterator[LangChain | None]:
    """Start LangChain on the core of the servers, if its environment exists."""
    if not PYTHON.exists():
        yield None
        return
    with contextlib.ExitStack() as running:
        with servers.pinned(core):  # The child inherits the core.
            other = running.enter_context(langchain(PYTHON))
        yield other


if __name__ == "__main__":
    main()
