"""``python -m bench.compare``."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain, groupby
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress

from bench.compare import traffic
from bench.compare.side import SAMPLE_SECONDS, running
from bench.compare.table import Result, show
from bench.compare.traffic import Case

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
"""Recorded sessions and the error catalogue aren't part of the project. They may be in a folder next to it."""

PAUSES = (SAMPLE_SECONDS, 5 * SAMPLE_SECONDS, 10 * SAMPLE_SECONDS)
"""Seconds, for the first run of a group and for the next ones."""

_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--before", required=True, type=_FOLDER, help="Checkout of the version to compare with.")
@click.option("--after", default=ROOT, type=_FOLDER, help="Checkout to compare. Default: this one.")
@click.option("--data", default=DATA, type=click.Path(path_type=Path), help="Folder of the sessions and the catalogue.")
@click.option("--sessions", type=click.IntRange(0), help="Most requests for each recording and window. Default: all.")
@click.option("--bodies", type=click.IntRange(0), help="Most fidelity bodies. Default: all.")
@click.option("--errors", type=click.IntRange(0), help="Most lines of the overflow catalogue. Default: all.")
@click.option("--generated", default=2_000, show_default=True, type=click.IntRange(0), help="Generated conversations.")
def main(
    before: Path,
    after: Path,
    data: Path,
    sessions: int | None,
    bodies: int | None,
    errors: int | None,
    generated: int,
) -> None:
    """Prove that two versions of the proxy send and return the same bytes. The exit status is 1 if they don't."""
    console = Console(width=max(120, Console().width))
    parts = [
        _recordings(data, sessions, console),
        traffic.fidelity(bodies),
        _catalogue(data, errors, console),
        traffic.conversations(generated),
    ]
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        bar = progress.add_task("comparing", total=None)
        result = compare(before.resolve(), after.resolve(), _counted(chain(*parts), progress, bar))
    show(result, console)
    sys.exit(0 if result.same else 1)


def compare(before: Path, after: Path, cases: Iterable[Case]) -> Result:
    """Send every case to both versions and compare. Each version gets one request at a time.

    Each group of cases has fresh servers and stores. The timing of summaries in the background can depend on other work
    on the machine, so a group with differences runs again with longer pauses.
    """
    result = Result()
    for _, group in groupby(cases, key=lambda case: case.group):
        traffic_of_group = list(group)
        for pause in PAUSES:
            compared = _compare_group(before, after, traffic_of_group, pause)
            if compared.same:
                break
        result.include(compared)
    return result


def _compare_group(before: Path, after: Path, cases: Iterable[Case], pause: float) -> Result:
    result = Result()
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(2))
        sides = []
        for checkout in (before, after):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="compare-")))
            sides.append(stack.enter_context(running(checkout, folder)))
        for case in cases:
            old, new = pool.map(lambda side, case=case: side.take(case, pause), sides)
            result.add(case, old, new)
    return result


def _recordings(data: Path, most: int | None, console: Console) -> Iterable[Case]:
    folder = data / "sessions"
    if not folder.is_dir():
        console.print(f"Skipped the recorded sessions: {folder} doesn't exist.")
        return ()
    return traffic.recorded(folder, most)


def _catalogue(data: Path, most: int | None, console: Console) -> Iterable[Case]:
    file = data / "overflow-errors.jsonl"
    if not file.is_file():
        console.print(f"Skipped the overflow catalogue: {file} doesn't exist.")
        return ()
    return traffic.errors(file, most)


def _counted(cases: Iterable[Case], progress: Progress, bar: int) -> Iterator[Case]:
    for case in cases:
        progress.update(bar, advance=1, description=case.group)  # type: ignore[arg-type]
        yield case


if __name__ == "__main__":
    main()
