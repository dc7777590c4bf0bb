"""``python -m bench.compare``."""

from __future__ import annotations

import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain, groupby
from pathlib import Path

import click

from bench import DATA, ROOT
from bench.compare import recoveries, traffic
from bench.compare.case import Case
from bench.compare.side import SAMPLE_SECONDS, Side, running
from bench.compare.table import Result, shown

PAUSES = (SAMPLE_SECONDS, 5 * SAMPLE_SECONDS, 10 * SAMPLE_SECONDS)
"""Seconds, for the first run of a group and for the next ones."""

JOBS = 2
"""Groups that run at once."""

GENERATED = 5_000
"""Generated requests of a full run."""

_CHECKOUT = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--before", required=True, type=_CHECKOUT, help="Checkout of the version to compare with.")
@click.option("--data", default=DATA, type=click.Path(path_type=Path), help="Folder of the sessions and the catalogue.")
@click.option("--most", type=click.IntRange(0), help="Most requests of each recording, API's spellings, and catalogue.")
@click.option("--generated", default=GENERATED, show_default=True, type=click.IntRange(0), help="Generated requests.")
@click.option("--only", multiple=True, help="Compare only groups whose name contains this text. Can be repeated.")
def main(before: Path, data: Path, most: int | None, generated: int, only: tuple[str, ...]) -> None:
    """Prove that two versions of the proxy send, return, and record the same. The exit status is 1 if they don't."""
    parts = [
        _if_there(data / "sessions", traffic.recorded, most),
        traffic.fidelity(most),
        _if_there(data / "overflow-errors.jsonl", traffic.errors, most),
        recoveries.generated(generated),
    ]
    cases = (case for case in chain(*parts) if not only or any(text in case.group for text in only))
    result = compare(before.resolve(), cases)
    click.echo(shown(result))
    click.echo(f"{result.recovered:.0%} of the generated requests met a recovery.")
    sys.exit(0 if result.same else 1)


def compare(before: Path, cases: Iterable[Case]) -> Result:
    """Send every case to another version and to this one, and compare. Each gets one request of a group at a time.

    ``JOBS`` groups run at once, each with fresh servers and stores.
    """
    result = Result()
    pending: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(JOBS) as pool:
        for _, group in groupby(cases, key=lambda case: case.group):
            pending.append(pool.submit(_settled, before, list(group)))
            if len(pending) > JOBS:
                result.include(pending.popleft().result())
        for compared in pending:
            result.include(compared.result())
    return result


def _settled(before: Path, cases: Sequence[Case]) -> Result:
    """Compare a group. If there are differences, compare it again with longer pauses.

    The timing of summaries in the background can depend on other work on the machine.
    """
    began, name = time.monotonic(), cases[0].group
    for pause in PAUSES:
        compared = _compare_group(before, cases, pause)
        if compared.same:
            break
        click.echo(f"{name}: differs. {compared.differences[0]}", err=True)
    click.echo(f"{name}: {len(cases)} cases in {time.monotonic() - began:.0f} s", err=True)
    return compared


def _compare_group(before: Path, cases: Sequence[Case], pause: float) -> Result:
    result = Result()
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(2))
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="compare-"))) for _ in range(2)]
        sides = [*pool.map(stack.enter_context, map(running, (before, ROOT), folders))]
        for case in cases:
            old, new = pool.map(lambda side, case=case: side.take(case, pause), sides)
            result.add(case, old, new)
        (old_records, old_metrics), (new_records, new_metrics) = pool.map(Side.observed, sides)
    result.add_records(cases, old_records, new_records)
    result.add_metrics(cases[0].group, old_metrics, new_metrics)
    return result


def _if_there(place: Path, cases: Callable[[Path, int | None], Iterable[Case]], most: int | None) -> Iterable[Case]:
    if not place.exists():
        click.echo(f"Skipped: {place} doesn't exist.")
        return ()
    return cases(place, most)


if __name__ == "__main__":
    main()
