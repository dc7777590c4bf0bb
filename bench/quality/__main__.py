"""``python -m bench.quality``."""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.progress import Progress

from bench.quality import sessions
from bench.quality.langchain import ROOT, langchain
from bench.quality.rows import Row, cases, engines, measure, measure_stages
from bench.quality.stages import Alone
from bench.quality.table import raw, show, show_stages
from bench.table import write_json

PYTHON = ROOT / ".venv-bench" / "bin" / "python"


@dataclass(frozen=True)
class Scale:
    """The number of generated conversations of each kind, and the windows in tokens."""

    seeds: int
    windows: tuple[int, ...]


FULL = Scale(2, (16_384, 32_768))
QUICK = Scale(1, (16_384,))

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True, help="A few generated conversations, in one window, and no recorded ones.")
@click.option("--json", "file", type=_FILE, help="Write every figure to FILE.")
@click.option("--chart", type=_FILE, help="Draw the chart into FILE (PNG).")
@click.option("--sessions", "folder", type=click.Path(path_type=Path), default=sessions.FOLDER, show_default=False,
              help="The folder with recorded sessions. Without it the table has no rows for them.")  # fmt: skip
@click.option("--langchain", "python", type=click.Path(exists=True, path_type=Path), default=PYTHON, show_default=False,
              help="The interpreter of the environment with LangChain.")  # fmt: skip
def main(quick: bool, file: Path | None, chart: Path | None, folder: Path, python: Path) -> None:
    """Compare the engine with LangChain's on the same conversations, and print the table."""
    console = Console(width=max(176, Console().width))
    rows, versions = compare(QUICK if quick else FULL, folder, python, console, recorded=not quick)
    show(rows, versions, console)
    stages = [] if quick else stages_alone(folder)
    if stages:
        show_stages(stages, console)
    measured = {"versions": versions, "rows": raw(rows), "stages": stages}
    write_json(file, measured)
    if chart is not None:
        command = [python, "-m", "bench.quality.chart", chart.resolve()]
        subprocess.run(command, input=msgspec.json.encode(measured), cwd=ROOT, check=True)


def compare(
    scale: Scale, folder: Path, python: Path, console: Console, *, recorded: bool
) -> tuple[list[Row], dict[str, str]]:
    """Return all rows, and the versions of LangChain's packages."""
    chosen = cases(folder if recorded else None, seeds=scale.seeds, windows=scale.windows)
    with (
        Progress(console=console, disable=not console.is_terminal, transient=True) as progress,
        tempfile.TemporaryDirectory(prefix="bench-") as store,
        langchain(python) as other,
    ):
        bar = progress.add_task("comparing", total=sum(len(list(engines(case))) for case in chosen))
        rows = asyncio.run(measure(chosen, Path(store), other, lambda: progress.advance(bar)))
        return rows, other.versions


def stages_alone(recorded: Path) -> list[Alone]:
    """Measure the cheap stages alone on recorded sessions. Empty if the folder has none."""
    with tempfile.TemporaryDirectory(prefix="bench-") as store:
        return asyncio.run(measure_stages(Path(store), recorded))


if __name__ == "__main__":
    main()
